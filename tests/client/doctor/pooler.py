"""A proxy that does to PostgreSQL's greeting what a pooler does: it tells a number of its own."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_BACKEND_KEY = b"K\0\0\0\x0c"
_OWN_NUMBER = 4242
_CHUNK_BYTES = 65_536
_GREETING_CHUNKS = 8


@contextmanager
def a_pooler(port: int) -> Iterator[int]:
    """Listens at the port it gives, in front of the server at `port`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_accept, args=(listener, port), daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, port: int) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        server = socket.create_connection(("127.0.0.1", port))
        for source, target, rewritten in ((client, server, 0), (server, client, _GREETING_CHUNKS)):
            arguments = (source, target, rewritten)
            threading.Thread(target=_pump, args=arguments, daemon=True).start()


def _pump(source: socket.socket, target: socket.socket, rewritten: int) -> None:
    with source, target:
        try:
            while data := source.recv(_CHUNK_BYTES):
                target.sendall(_with_own_number(data) if rewritten > 0 else data)
                rewritten -= 1
        except OSError:
            return


def _with_own_number(data: bytes) -> bytes:
    at = data.find(_BACKEND_KEY)
    if at < 0:
        return data
    at += len(_BACKEND_KEY)
    return data[:at] + struct.pack("!i", _OWN_NUMBER) + data[at + 4 :]
