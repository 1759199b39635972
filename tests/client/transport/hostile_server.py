"""A peer that answers whatever it is told to, byte by byte, on a real socket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from qmq_client.wire.requests import FRAME_CONTENT_TYPE

#: Receives the connection after the request was read; returns to have it closed.
Behaviour = Callable[[socket.socket, threading.Event], None]

#: The begin of an answer that a client goes on to read.
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/vnd.qmq.frame\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
#: How long a client waits that is tried against such a peer.
DEADLINE_S = 0.5
#: For a thread to end that has nothing more to do.
JOIN_S_MAX = 60.0


@dataclass
class HostileServer:
    url: str
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0


@contextmanager
def hostile_server(
    behave: Behaviour, *, requests_per_connection: int = 1, is_reading: bool = True
) -> Iterator[HostileServer]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = HostileServer(url=f"http://127.0.0.1:{listener.getsockname()[1]}")
    ended = threading.Event()
    threads: list[threading.Thread] = []

    def serve(connection: socket.socket) -> None:
        with connection:
            try:
                for _ in range(requests_per_connection):
                    request = read_request(connection) if is_reading else b"unread"
                    if not request:
                        return
                    server.requests.append(request)
                    behave(connection, ended)
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            server.connections += 1
            threads.append(threading.Thread(target=serve, args=(connection,), daemon=True))
            threads[-1].start()

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    try:
        yield server
    finally:
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join(JOIN_S_MAX)
        for thread in threads:
            thread.join(JOIN_S_MAX)


def read_request(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(65_536)
        if not part:
            return data
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    while len(body) < length:
        body += connection.recv(65_536)
    return head + b"\r\n\r\n" + body


def answer(
    body: bytes,
    *,
    status: str = "200 OK",
    content_type: str = FRAME_CONTENT_TYPE,
    headers: tuple[str, ...] = (),
    is_last: bool = True,
) -> Behaviour:
    """A whole answer. The last of a connection says so, or a client may ask on it again just then."""
    if is_last:
        headers = (*headers, "connection: close")
    lines = [
        f"HTTP/1.1 {status}",
        f"content-type: {content_type}",
        f"content-length: {len(body)}",
        *headers,
        "\r\n",
    ]
    data = "\r\n".join(lines).encode() + body
    return lambda connection, _: connection.sendall(data)


def raw(data: bytes) -> Behaviour:
    return lambda connection, _: connection.sendall(data)


def endless(head: bytes, part: bytes) -> Behaviour:
    def behave(connection: socket.socket, ended: threading.Event) -> None:
        connection.sendall(head)
        while not ended.is_set():
            connection.sendall(part)

    return behave


def trickle(head: bytes, part: bytes, *, every_s: float = 0.05) -> Behaviour:
    def behave(connection: socket.socket, ended: threading.Event) -> None:
        connection.sendall(head)
        while not ended.wait(every_s):
            connection.sendall(part)

    return behave


def silent(connection: socket.socket, ended: threading.Event) -> None:
    ended.wait(60)
