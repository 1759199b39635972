"""Forks of a process that uses SQLite, whose library keeps locks and file locks in its memory."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.client.world import Order, World, add
from tests.kit.forked import code_of, forked

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
    world.engine.dispose()  # the application's connections are its own affair
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

    def stay(_: sa.Connection) -> None:
        is_in.set()
        assert may_go_on.wait(DEADLINE_S)

    def work() -> None:
        store.write(stay)

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


def test_S10_a_transaction_that_is_open_at_the_fork_continues_in_the_parent(world: World) -> None:
    with Session(world.engine) as session, session.begin():
        session.add(Order(label="open"))
        session.flush()
        with child_of(lambda: True):
            pass
        world.send("open", session)
    assert world.outcome() == (["open"], ["open"], set())


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()
