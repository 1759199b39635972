"""The gate before the one connection of a database in memory."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

from qmq_client.outbox.database import shared_connection as module
from qmq_client.outbox.database.shared_connection import SharedConnection, shared_connection

#: What a thread has that must not get through; long enough for one that may.
MOMENT_S = 0.5
#: What a child may take that waits for nobody.
CHILD_S_MAX = 20


def test_two_threads_that_begin_at_once_get_one_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = sa.create_engine("sqlite://").pool
    gates: list[SharedConnection] = []
    others: list[threading.Thread] = []

    class Overtaken(SharedConnection):
        """A gate in whose making another thread asks for one."""

        def __init__(self) -> None:
            super().__init__()
            if not others:
                others.append(
                    threading.Thread(target=lambda: gates.append(shared_connection(pool)))
                )
                others[0].start()
                others[0].join(MOMENT_S)

    monkeypatch.setattr(module, "SharedConnection", Overtaken)
    gates.append(shared_connection(pool))
    others[0].join()
    assert len(gates) == 2
    assert gates[0] is gates[1]


@pytest.fixture
def engine() -> Iterator[sa.Engine]:
    """A database in memory, in one connection."""
    made = sa.create_engine(
        "sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False}
    )
    yield made
    made.dispose()


@contextmanager
def in_a_thread(body: Callable[[threading.Event, threading.Event], None]) -> Iterator[None]:
    """While another thread is in the middle of `body`, which says so and waits to be let go on."""
    is_there, may_go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=body, args=(is_there, may_go_on))
    thread.start()
    try:
        assert is_there.wait(CHILD_S_MAX)
        yield
    finally:
        may_go_on.set()
        thread.join()


def in_a_child(body: Callable[[], None]) -> int:
    """The exit code of a child that does this: 0, or a signal's number below it when it hangs."""
    child = os.fork()
    if not child:
        code = 1
        with suppress(BaseException):
            signal.alarm(CHILD_S_MAX)
            body()
            code = 0
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_S10_a_child_does_not_wait_for_a_publisher_that_was_inside_when_it_was_forked(
    engine: sa.Engine,
) -> None:
    gate = shared_connection(engine.pool)

    def publish(is_there: threading.Event, may_go_on: threading.Event) -> None:
        with gate.enter():
            is_there.set()
            may_go_on.wait()

    with in_a_thread(publish):
        assert in_a_child(lambda: engine.connect().close()) == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_S10_a_child_does_not_wait_for_a_connection_that_another_thread_had_when_it_was_forked(
    engine: sa.Engine,
) -> None:
    gate = shared_connection(engine.pool)
    own = engine.connect()

    def apply(is_there: threading.Event, may_go_on: threading.Event) -> None:
        with engine.connect():
            is_there.set()
            may_go_on.wait()

    def publish() -> None:
        with pytest.raises(sa.exc.TimeoutError), gate.enter():  # the one that forked has its own
            pass
        own.close()
        with gate.enter():
            pass

    with in_a_thread(apply):
        assert in_a_child(publish) == 0
    own.close()
