"""F16: the clock of a database server is set forwards and back while rows wait and are being sent.

All times of a row are that clock's, so one that is ahead makes rows due early, which costs a request
that the broker recognizes; one that is set back makes those of before wait until it gets there again.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from qmq_client.transport.memory import MemoryBroker
from qmq_watchdog.databases import Database
from qmq_watchdog.sweep import Sweep
from tests.client.world import World, a_world
from tests.conftest import give_up
from tests.services.databases import Databases
from tests.services.rungs import RungError
from tests.services.shifted import ShiftedServer
from tests.watchdog.rows import SUBJECT, left, put_rows
from tests.watchdog.transports import WatchedTransport

HOUR_S: Final = 3_600
JUMPS: Final = (HOUR_S, -HOUR_S)


@pytest.fixture(scope="module", params=["mysql", "postgresql"])
def server(request: pytest.FixtureRequest, databases: Databases) -> Iterator[ShiftedServer]:
    try:
        made = ShiftedServer(databases, request.param)
    except RungError as error:
        give_up(f"no clock that can be set for the tests. {error}", os.environ)
    made.start()
    yield made
    made.close()


@pytest.fixture
def world(server: ShiftedServer, databases: Databases, tmp_path: Path) -> Iterator[World]:
    server.shift(0)
    name = f"qmq_test_{secrets.token_hex(8)}"
    database = databases.make_on(server.server.url(), server.server.kind, name)
    with a_world(tmp_path, database=database) as made:
        yield made
    database.drop()


def watched(world: World) -> Database:
    return Database(name="shop", store=world.store, engine=world.sync_engine)


def sweep_of(world: World, on_send: Callable[[], None] = lambda: None) -> Sweep:
    return Sweep(watched(world), WatchedTransport(world.broker, on_send))


def stored(broker: MemoryBroker) -> list[str]:
    return sorted(str(message.message_id) for message in broker.messages(SUBJECT))


def hexed(ids: list[bytes]) -> list[str]:
    return sorted(each.hex() for each in ids)


@pytest.mark.parametrize("jump_s", JUMPS)
def test_F16_W4_O5_a_jump_between_commit_and_send_loses_and_doubles_nothing(
    world: World, server: ShiftedServer, jump_s: int
) -> None:
    """The application's own sending needs no clock; a watchdog beside it may take what seems late."""
    place(world, "before")
    server.shift(jump_s)
    place(world, "after")
    assert sweep_of(world).step().sent == (1 if jump_s > 0 else 0), "what was born before the jump"
    assert world.outcome() == (["after", "before"], ["after", "before"], set())


@pytest.mark.parametrize("jump_s", JUMPS)
def test_F16_W2_W4_a_jump_in_the_middle_of_a_sweep_loses_and_doubles_nothing(
    world: World, server: ShiftedServer, jump_s: int
) -> None:
    database = watched(world)
    ids = put_rows(database, 10)

    def jump_and_compete() -> None:
        server.shift(jump_s)
        other = sweep_of(world).step()
        assert (other.claimed, other.sent) == ((10, 10) if jump_s > 0 else (0, 0))

    counts = sweep_of(world, jump_and_compete).step()
    assert (counts.sent, counts.lost) == (10, 10 if jump_s > 0 else 0)
    assert stored(world.broker) == hexed(ids)
    assert left(database) == set()


def test_F16_W4_rows_of_before_a_clock_was_set_back_wait_and_are_sent_when_it_is_there_again(
    world: World, server: ShiftedServer
) -> None:
    database = watched(world)
    server.shift(HOUR_S)
    ids = put_rows(database, 3, due_in_ms=1_000)
    server.shift(0)
    later = put_rows(database, 2)
    assert sweep_of(world).step().sent == 2, "those of now wait for nobody"
    assert left(database) == set(ids)
    age_ms = database.store.oldest_unsent_age_ms()
    assert age_ms == 0, "made in what is the future now: never less than nothing"
    assert database.store.counts().live == 3
    server.shift(HOUR_S + 60)
    assert sweep_of(world).step().sent == 3
    assert stored(world.broker) == hexed([*ids, *later])


def place(world: World, label: str) -> None:
    with world.sync_engine.begin() as connection:
        connection.exec_driver_sql(f"INSERT INTO business_order (label) VALUES ('{label}')")
        world.send(label, connection)
