"""One transport for many threads, and for the child of a fork."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from qmq_client.errors import BrokerUnreachableError
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.requests import PullRequest, SettleAnswer, SettleRequest, encode_control
from tests.client.transport.hostile_server import answer, hostile_server

SETTLE = SettleRequest(subject="s", group="g", consumer="c", settlements=())
PULL = PullRequest(subject="s", group="g", consumer="c", wait_ms=30_000)
SETTLED = encode_control(SettleAnswer(settled=3))
WAIT_S = 60.0


def test_calls_at_the_same_time_have_connections_of_their_own() -> None:
    together = threading.Barrier(4)

    def behave(connection: socket.socket, ended: threading.Event) -> None:
        together.wait(WAIT_S)
        answer(SETTLED)(connection, ended)

    with hostile_server(behave) as server:
        transport = HttpTransport(server.url)
        settled: list[int] = []
        threads = [
            threading.Thread(target=lambda: settled.append(transport.settle(SETTLE).settled))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        transport.close()
    assert settled == [3, 3, 3, 3]
    assert server.connections == 4


def test_calls_one_after_the_other_share_a_connection() -> None:
    with hostile_server(answer(SETTLED, is_last=False), requests_per_connection=9) as server:
        transport = HttpTransport(server.url)
        for _ in range(5):
            transport.settle(SETTLE)
        transport.close()
    assert (len(server.requests), server.connections) == (5, 1)


def test_a_close_wakes_a_call_that_waits() -> None:
    asked = threading.Event()

    def behave(_: socket.socket, ended: threading.Event) -> None:
        asked.set()
        ended.wait(WAIT_S)

    errors: list[BaseException] = []

    def call(transport: HttpTransport) -> None:
        with pytest.raises(BrokerUnreachableError) as caught:
            transport.pull(PULL)
        errors.append(caught.value)

    with hostile_server(behave) as server:
        transport = HttpTransport(server.url)
        waiting = threading.Thread(target=call, args=(transport,))
        waiting.start()
        assert asked.wait(WAIT_S)
        transport.close()
        waiting.join(WAIT_S)
        assert not waiting.is_alive()
    assert len(errors) == 1


def test_S10_a_forked_child_has_connections_of_its_own_and_leaves_those_of_its_parent() -> None:
    with hostile_server(answer(SETTLED, is_last=False), requests_per_connection=9) as server:
        transport = HttpTransport(server.url)
        transport.settle(SETTLE)
        child = os.fork()
        if not child:
            is_good = transport.settle(SETTLE).settled == 3
            transport.close()
            os._exit(0 if is_good else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert transport.settle(SETTLE).settled == 3
        transport.close()
    assert server.connections == 2
