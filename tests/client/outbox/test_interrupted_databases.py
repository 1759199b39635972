"""What a signal handler raises in the parts that keep watch over connections leaves nothing taken."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Final

import pytest
import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

from qmq_client.outbox.database import deadline, shared_connection
from qmq_client.outbox.database.deadline import answered_within
from tests.kit.interrupting import at_each_look
from tests.kit.waiting import wait_for

DEADLINE_S: Final = 30.0


def fail() -> None:
    raise KeyboardInterrupt


def is_done_in_time(work: Callable[[], object]) -> bool:
    """Whether another thread gets through this."""
    done = threading.Event()

    def do() -> None:
        work()
        done.set()

    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    return done.is_set()


@pytest.fixture
def deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this test alone; their thread looks often."""
    monkeypatch.setattr(deadline, "_LOOK_S", 0.01)
    monkeypatch.setattr(deadline, "_deadlines", deadline._Deadlines())


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_S12_a_signal_that_raises_around_a_transaction_of_ours_stops_no_other(
    sockets: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def transaction() -> None:
        with answered_within(sockets[0], DEADLINE_S):
            pass

    for interruption in at_each_look(fail, within=[deadline.__file__, threading.__file__]):
        monkeypatch.setattr(deadline, "_deadlines", deadline._Deadlines())
        with suppress(KeyboardInterrupt):
            interruption.around(transaction)
        assert is_done_in_time(transaction), interruption.place
        left = [watch for watch in deadline._deadlines._watches if not watch.is_over]
        assert left == [], "who has the socket afterwards would be cut"
    assert interruption.at > 5


@pytest.mark.usefixtures("deadlines")
def test_W3_a_transaction_over_its_deadline_is_cut_also_after_all_slept(
    sockets: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadline, "_IDLE_LOOKS_MAX", 0)
    ours, theirs = sockets
    theirs.settimeout(DEADLINE_S)
    with answered_within(ours, DEADLINE_S):
        pass
    wait_for(lambda: deadline._deadlines._is_asleep)
    with answered_within(ours, 0.0):
        assert theirs.recv(1) == b""


class Shared:
    """A database in memory, and what its two users do."""

    def __init__(self) -> None:
        self.engine = sa.create_engine(
            "sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False}
        )
        self.gate = shared_connection.shared_connection(self.engine.pool)

    def publish(self) -> None:
        with self.gate.enter(), self.engine.connect():
            pass

    def apply(self) -> None:
        self.engine.connect().close()


@pytest.mark.parametrize("who", [Shared.publish, Shared.apply])
@pytest.mark.parametrize("raises", [True, False])
def test_S12_a_signal_that_comes_while_one_connection_is_shared_leaves_it_free(
    raises: bool, who: Callable[[Shared], None]
) -> None:
    def visit() -> None:
        if raises:
            fail()
        shared.apply()

    within = [shared_connection.__file__, threading.__file__]
    for interruption in at_each_look(visit, within=within):
        shared = Shared()
        with suppress(KeyboardInterrupt):
            interruption.around(partial(who, shared))
        assert is_done_in_time(shared.publish), interruption.place
        assert is_done_in_time(shared.apply), interruption.place
        assert shared.gate._inside is None, interruption.place
        assert not shared.gate._entering, interruption.place
        shared.engine.dispose()
    assert interruption.at > 5
