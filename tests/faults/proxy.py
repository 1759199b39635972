"""A TCP forwarder in front of a database or a broker: cuts the line, or loses the answer to a COMMIT."""

from __future__ import annotations

import socket
import struct
import threading
from typing import Final, Self

_CHUNK_BYTES: Final = 65_536
_COMMIT: Final = b"COMMIT"
#: Close with RST instead of FIN.
_RESET: Final = struct.pack("ii", 1, 0)


class Proxy:
    """Forwards every connection to one port of this machine; `with` ends it.

    `arm("reset")`: the next COMMIT is executed, and its client finds the connection reset.
    `arm("swallow")`: it is executed, and its client waits for an answer that never comes, until
    `release` or the end of the block resets the connection.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._next: str | None = None
        self._is_cut = False
        self._sockets: list[socket.socket] = []
        self._swallowed: list[socket.socket] = []
        #: The server has answered a COMMIT whose answer nobody gets.
        self.struck = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        self._listener.close()
        for each in self._sockets:
            each.close()

    def arm(self, what: str) -> None:
        """Strike the next COMMIT."""
        self.struck.clear()
        self._next = what

    def release(self) -> None:
        """Reset the connections whose answers were swallowed."""
        for client in self._swallowed:
            _reset(client)
        self._swallowed.clear()

    def cut(self) -> None:
        """Reset every connection, now and from now on."""
        self._is_cut = True
        for each in self._sockets:
            _reset(each)
        self._sockets.clear()

    def heal(self) -> None:
        """New connections are forwarded again."""
        self._is_cut = False

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._is_cut:
                _reset(client)
                continue
            server = socket.create_connection(("127.0.0.1", self._target_port))
            self._sockets += [client, server]
            fate: list[str] = []
            for pump in (self._to_server, self._to_client):
                threading.Thread(target=pump, args=(client, server, fate), daemon=True).start()

    def _to_server(self, client: socket.socket, server: socket.socket, fate: list[str]) -> None:
        while data := _receive(client):
            if self._next is not None and _COMMIT in data:
                fate.append(self._next)
                self._next = None
            _send(server, data)
        _shut(server)

    def _to_client(self, client: socket.socket, server: socket.socket, fate: list[str]) -> None:
        while data := _receive(server):
            if not fate:
                _send(client, data)
                continue
            if fate[0] == "reset":
                _reset(client)
            else:
                self._swallowed.append(client)
            self.struck.set()
            while _receive(server):
                pass
        if not fate:
            _shut(client)


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(_CHUNK_BYTES)
    except OSError:
        return b""


def _send(connection: socket.socket, data: bytes) -> None:
    try:
        connection.sendall(data)
    except OSError:
        return


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def _reset(connection: socket.socket) -> None:
    if connection.fileno() < 0:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    # Another thread may be reading from it; only a shutdown wakes that one up.
    _shut(connection)
    connection.close()
