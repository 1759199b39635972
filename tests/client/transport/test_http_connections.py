"""How a request is written: head and body of a small one together, and nothing after a close."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import httpcore
import pytest

from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.transport.http_connections import CallDeadline, DeadlineBackend

ANSWER = b"HTTP/1.1 200 OK\r\n\r\n"


class Pair(httpcore.NetworkBackend):
    """Connects to a socket that the test holds."""

    def __init__(self) -> None:
        self.ours, self.peer = socket.socketpair()
        self.peer.setblocking(False)

    def connect_tcp(self, *_: Any, **__: Any) -> httpcore.NetworkStream:
        return PairStream(self.ours)


class PairStream(httpcore.NetworkStream):
    def __init__(self, ours: socket.socket) -> None:
        self._ours = ours

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._ours.recv(max_bytes)

    def close(self) -> None:
        self._ours.close()

    def get_extra_info(self, info: str) -> Any:
        return self._ours if info == "socket" else None


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.ours.close()
    pair.peer.close()


def backend_over(pair: Pair) -> DeadlineBackend:
    deadline = CallDeadline()
    deadline.ends_at_s = SYSTEM_CLOCK.monotonic_s() + 60
    return DeadlineBackend(SYSTEM_CLOCK, deadline, pair)


def received(pair: Pair) -> bytes:
    try:
        return pair.peer.recv(1_000_000)
    except BlockingIOError:
        return b""


def test_head_and_body_of_a_small_request_are_written_together(pair: Pair) -> None:
    stream = backend_over(pair).connect_tcp("broker", 1)
    stream.write(b"head ")
    stream.write(b"body")
    before = received(pair)
    pair.peer.send(ANSWER)
    assert stream.read(100) == ANSWER
    assert (before, received(pair)) == (b"", b"head body")


def test_a_large_body_goes_behind_its_head(pair: Pair) -> None:
    stream = backend_over(pair).connect_tcp("broker", 1)
    stream.write(b"head ")
    stream.write(b"x" * 70_000)
    assert received(pair) == b"head " + b"x" * 70_000


def test_what_was_answered_before_the_peer_hung_up_is_read(pair: Pair) -> None:
    stream = backend_over(pair).connect_tcp("broker", 1)
    pair.peer.send(ANSWER)
    pair.peer.close()
    stream.write(b"head ")
    assert stream.read(100) == ANSWER


def test_a_call_that_connects_while_all_is_closed_leaves_no_socket(pair: Pair) -> None:
    backend = backend_over(pair)
    backend.is_closed = True
    with pytest.raises(httpcore.ConnectError):
        backend.connect_tcp("broker", 1)
    assert pair.ours.fileno() == -1
