"""Which connection a call gets, and which ones are closed, over real sockets."""

from __future__ import annotations

import select
import socket
import ssl
from typing import Any

import httpcore

from qmq_client.clock import SYSTEM_CLOCK, SystemClock
from qmq_client.transport.http_connections import (
    KEPT_CONNECTIONS_MAX,
    KEPT_S,
    CallDeadline,
    DeadlineBackend,
    KeptConnections,
)
from qmq_client.transport.plain_connection import PlainConnection, make_call
from tests.client.transport.hostile_server import HostileServer, answer, hostile_server

MANY = 99
#: Reached only when something hangs.
WAIT_S = 30.0


class SteppedClock(SystemClock):
    """Stands still until it is told."""

    now_s = 1000.0

    def monotonic_s(self) -> float:
        return self.now_s


class Watched(httpcore.SyncBackend):
    """Remembers the sockets that were opened."""

    def __init__(self) -> None:
        super().__init__()
        self.sockets: list[socket.socket] = []

    def connect_tcp(self, *given: Any, **named: Any) -> httpcore.NetworkStream:
        stream = super().connect_tcp(*given, **named)
        self.sockets.append(stream.get_extra_info("socket"))
        return stream

    def are_open(self) -> list[bool]:
        return [one.fileno() != -1 for one in self.sockets]


class Calls:
    """Calls on kept connections, each with its answer still to be closed."""

    def __init__(self, server: HostileServer) -> None:
        self.clock, self.backend = SteppedClock(), Watched()
        deadline = CallDeadline()
        deadline.ends_at_s = SYSTEM_CLOCK.monotonic_s() + WAIT_S
        backend = DeadlineBackend(SYSTEM_CLOCK, deadline, self.backend)
        self.kept = KeptConnections(self.clock, backend, ssl.create_default_context)
        self._url = server.url

    def begin(self) -> PlainConnection:
        call = make_call(httpcore.URL(self._url), [(b"host", b"broker")])
        answer, connection = self.kept.exchange(call, b"", WAIT_S)
        assert b"".join(answer.parts) == b"done"
        return connection

    def make(self) -> None:
        self.kept.give_back(self.begin())


def test_what_was_idle_too_long_is_closed_and_not_used_again() -> None:
    with hostile_server(answer(b"done", is_last=False), requests_per_connection=MANY) as server:
        calls = Calls(server)
        calls.make()
        calls.clock.now_s += KEPT_S / 2
        calls.make()
        assert calls.backend.are_open() == [True]
        calls.clock.now_s += KEPT_S * 2
        calls.make()
        assert calls.backend.are_open() == [False, True]
        calls.kept.close()


def test_a_connection_that_the_peer_ends_is_not_kept() -> None:
    with hostile_server(answer(b"done"), requests_per_connection=1) as server:
        calls = Calls(server)
        calls.make()
        calls.make()
        assert calls.backend.are_open() == [False, False]


def test_a_connection_that_the_peer_ended_while_it_was_idle_is_not_used_again() -> None:
    with hostile_server(answer(b"done", is_last=False), requests_per_connection=1) as server:
        calls = Calls(server)
        calls.make()
        (ended,) = calls.backend.sockets
        assert select.select([ended], [], [], WAIT_S)[0], "its end has arrived"
        calls.make()
        assert len(calls.backend.sockets) == 2
        assert ended.fileno() == -1
        calls.kept.close()


def test_what_many_calls_at_once_left_is_closed_by_those_that_come_later() -> None:
    with hostile_server(answer(b"done", is_last=False), requests_per_connection=MANY) as server:
        calls = Calls(server)
        for connection in [calls.begin() for _ in range(4)]:
            calls.kept.give_back(connection)
        assert calls.backend.are_open() == [True] * 4
        for _ in range(4):
            calls.clock.now_s += KEPT_S / 2
            calls.make()
        assert calls.backend.are_open() == [False, False, False, True]
        calls.kept.close()


def test_what_was_idle_for_just_as_long_as_is_allowed_is_kept() -> None:
    with hostile_server(answer(b"done", is_last=False), requests_per_connection=MANY) as server:
        calls = Calls(server)
        for connection in [calls.begin() for _ in range(2)]:
            calls.kept.give_back(connection)
        calls.clock.now_s += KEPT_S
        calls.make()
        assert calls.backend.are_open() == [True] * 2
        calls.kept.close()


def test_no_more_connections_are_kept_than_the_bound() -> None:
    with hostile_server(answer(b"done", is_last=False), requests_per_connection=MANY) as server:
        calls = Calls(server)
        for connection in [calls.begin() for _ in range(KEPT_CONNECTIONS_MAX + 2)]:
            calls.kept.give_back(connection)
        assert sum(calls.backend.are_open()) == KEPT_CONNECTIONS_MAX
        calls.kept.close()


def test_after_the_close_nothing_is_kept() -> None:
    with hostile_server(answer(b"done", is_last=False), requests_per_connection=MANY) as server:
        calls = Calls(server)
        calls.make()
        under_way = calls.begin()
        calls.kept.close()
        calls.kept.give_back(under_way)
        assert not any(calls.backend.are_open())
