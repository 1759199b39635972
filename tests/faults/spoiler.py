"""A forwarder in front of a broker that spoils its answers: the broker has done what it was asked for.

Between the client and the answer stands only this: what the broker stored is stored. Only answers to
sends are spoilt.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Final

from tests.client.transport.hostile_server import read_request

_SEND: Final = b"POST /v1/send "
_HEAD_END: Final = b"\r\n\r\n"
_CLOSE: Final = b"connection: close"

#: What is made of a good answer.
Spoil = Callable[[bytes], bytes]


class Spoiler:
    """A `Behaviour` of `hostile_server(…, is_reading=False)`."""

    def __init__(self, broker_port: int) -> None:
        #: None to forward answers as they are.
        self.spoil: Spoil | None = None
        #: Answers that were spoilt so far.
        self.spoilt = 0
        self._broker_port = broker_port

    def __call__(self, connection: socket.socket, _: threading.Event) -> None:
        request = read_request(connection)
        if not request:
            return
        answer = self._asked(request)
        spoil = self.spoil
        if spoil is None or not request.startswith(_SEND):
            connection.sendall(answer)
            return
        connection.sendall(spoil(answer))
        self.spoilt += 1

    def _asked(self, request: bytes) -> bytes:
        """The broker's whole answer, which says that it is the last one of its connection."""
        head, _, body = request.partition(_HEAD_END)
        lines = [
            line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")
        ]
        parts: list[bytes] = []
        with socket.create_connection(("127.0.0.1", self._broker_port)) as broker:
            broker.sendall(b"\r\n".join((*lines, _CLOSE)) + _HEAD_END + body)
            while part := broker.recv(65_536):
                parts.append(part)
        return b"".join(parts)


def replaced_by(data: bytes) -> Spoil:
    """Always the same."""
    return lambda _: data


def refused(status: str) -> Spoil:
    """A refusal without a body."""
    lines = (f"HTTP/1.1 {status}", "content-length: 0", _CLOSE.decode())
    return replaced_by("\r\n".join((*lines, "", "")).encode())


def by_halves(answer: bytes) -> bytes:
    """As if the line broke in the middle of its body."""
    return answer[: answer.index(_HEAD_END) + len(_HEAD_END) + 10]


def with_garbage(answer: bytes) -> bytes:
    """The right head, and a body of the same length that says nothing."""
    head, end, body = answer.partition(_HEAD_END)
    return head + end + bytes(len(body))


def about_another(answer: bytes) -> Spoil:
    """The answer to another frame, good as it is."""
    return replaced_by(answer)
