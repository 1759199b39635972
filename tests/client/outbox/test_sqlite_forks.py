"""Forks of a process that uses SQLite, whose library keeps locks and file locks in its memory."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client.outbox.database import sqlite_turns
from qmq_client.outbox.database.sqlite_turns import Turn, Turns
from tests.client.world import Order, World, add
from tests.kit.forked import code_of, forked
from tests.kit.interrupting import at_each_look

DEADLINE_S: Final = 60.0
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@contextmanager
def child_of(work: Callable[[], bool]) -> Iterator[None]:
    """While a forked child does its work, which must return True."""
    child = forked(work)
    yield
    assert code_of(child) == 0


def order(world: World, label: str) -> None:
    with Session(world.engine) as session, session.begin():
        add(world, session, label)


def test_S1_S2_S10_what_a_child_commits_is_kept_when_its_parent_closes_its_connections(
    world: World,
) -> None:
    order(world, "of the parent")
    assert world.producer.flush()
    opened, told_opened = os.pipe()
    closed, told_closed = os.pipe()

    def commit_before_and_after() -> bool:
        order(world, "before")
        os.write(told_opened, b"!")
        os.read(closed, 1)
        order(world, "after")
        return world.producer.flush().is_done and "after" in world.sent()

    with child_of(commit_before_and_after):
        os.read(opened, 1)
        world.producer.close()
        world.store.close()
        world.engine.dispose()  # its last connection: SQLite may delete the write-ahead log now
        os.write(told_closed, b"!")
    with sqlite3.connect(world.path) as connection:
        labels = {label for (label,) in connection.execute("SELECT label FROM business_order")}
    connection.close()
    assert labels == {"of the parent", "before", "after"}


def test_S10_a_fork_waits_until_other_threads_of_ours_are_outside_of_sqlite(world: World) -> None:
    inside: set[int] = set()

    @sa.event.listens_for(world.engine.pool, "checkout")
    def enter(*_: Any) -> None:
        inside.add(threading.get_ident())

    @sa.event.listens_for(world.engine.pool, "checkin")
    def leave(*_: Any) -> None:
        inside.discard(threading.get_ident())

    store = world.make_producer()._store
    is_in, may_go_on = threading.Event(), threading.Event()

    def work() -> None:
        with store.write():
            is_in.set()
            assert may_go_on.wait(DEADLINE_S)

    other = threading.Thread(target=work)
    other.start()
    assert is_in.wait(DEADLINE_S)
    assert inside == {other.ident}
    forking.append(may_go_on)
    with child_of(lambda: not inside):
        pass
    forking.clear()
    other.join(DEADLINE_S)
    store.close()


#: What is set when a fork begins, before anybody else prepares for it.
forking: Final[list[threading.Event]] = []


def announce() -> None:
    for each in forking:
        each.set()


os.register_at_fork(before=announce)  # who registers last comes first


def test_S10_a_transaction_that_is_open_at_the_fork_goes_on_in_the_parent(world: World) -> None:
    with Session(world.engine) as session, session.begin():
        session.add(Order(label="open"))
        session.flush()
        with child_of(lambda: True):
            pass
        world.send("open", session)
    assert world.outcome() == (["open"], ["open"], set())


def engine() -> sa.Engine:
    """Of a file that is never opened."""
    return sa.create_engine("sqlite:///shop.db")


@pytest.mark.parametrize(
    "address", ["file::memory:?cache=shared", "file:shop?mode=memory&cache=shared"]
)
def test_S10_a_database_in_memory_outlives_a_fork(address: str) -> None:
    shop = sa.create_engine(f"sqlite:///{address}&uri=true", poolclass=sa.QueuePool)
    turns = Turns()
    turns.close_before_forks(shop)
    with shop.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE orders (number INTEGER)")
    turns.before_fork()
    turns.after_fork()
    assert sa.inspect(shop).get_table_names() == ["orders"]
    shop.dispose()


def fail() -> None:
    raise KeyboardInterrupt


def is_free(turn: Turn) -> bool:
    """Whether another thread can have it, after a moment."""
    had = threading.Event()

    def take() -> None:
        with turn.taken():
            had.set()

    other = threading.Thread(target=take, daemon=True)
    other.start()
    other.join(DEADLINE_S)
    return had.is_set()


def test_S12_a_signal_that_raises_while_a_process_forks_leaves_no_turn_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sqlite_turns, "_UNDER_WAY_S_MAX", 0.1)
    turns = Turns()
    turn = turns.of(engine())

    def fork() -> None:
        with suppress(KeyboardInterrupt):  # Python only reports it
            turns.before_fork()
        turns.after_fork()

    for interruption in at_each_look(fail, within=[sqlite_turns.__file__]):
        with suppress(KeyboardInterrupt):
            interruption.around(fork)
        assert is_free(turn), interruption.place
    assert interruption.at > 10


def test_S10_a_fork_that_ends_leaves_the_turns_to_another_threads_fork(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sqlite_turns, "_UNDER_WAY_S_MAX", 10 * DEADLINE_S)
    turns = Turns()
    turn = turns.of(engine())
    begun, may_end, had = threading.Event(), threading.Event(), threading.Event()

    def fork_slowly() -> None:
        turns.before_fork()
        begun.set()
        may_end.wait(DEADLINE_S)
        turns.after_fork()

    def take() -> None:
        with turn.taken():
            had.set()

    slow, publisher = threading.Thread(target=fork_slowly), threading.Thread(target=take)
    slow.start()
    assert begun.wait(DEADLINE_S)
    turns.before_fork()
    turns.after_fork()
    publisher.start()
    assert not had.wait(0.05)
    may_end.set()
    assert had.wait(DEADLINE_S)
    slow.join(DEADLINE_S)
    publisher.join(DEADLINE_S)


def test_a_thread_that_forks_has_the_turn_if_it_wants_it() -> None:
    turns = Turns()
    turns.before_fork()
    with turns.of(engine()).taken():
        turns.after_fork()


def hold(turn: Turn, is_in: threading.Event, may_go_on: threading.Event) -> None:
    with turn.taken():
        is_in.set()
        may_go_on.wait(DEADLINE_S)


def test_the_application_goes_on_as_soon_as_the_publisher_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sqlite_turns, "TURN_S_MAX", DEADLINE_S)
    turn = Turns().of(engine())
    is_in, may_go_on, gone_on = threading.Event(), threading.Event(), threading.Event()
    publisher = threading.Thread(target=partial(hold, turn, is_in, may_go_on))
    publisher.start()
    assert is_in.wait(DEADLINE_S)

    def begin() -> None:
        turn.let_the_publisher_go_first()
        gone_on.set()

    application = threading.Thread(target=begin)
    application.start()
    assert not gone_on.wait(0.05)
    may_go_on.set()
    assert gone_on.wait(DEADLINE_S / 4)
    publisher.join(DEADLINE_S)
    application.join(DEADLINE_S)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()
