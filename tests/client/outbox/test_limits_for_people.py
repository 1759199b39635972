"""Limits that a server or a session has for the sake of people hold for none of our statements.

`sql_select_limit` cuts results short, `sql_safe_updates` refuses to delete by a list, `max_join_size`
refuses what may take long, and time limits end it. On the application's own connections, too, our
statements do what they say.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client.message import Message
from qmq_client.outbox.database.dialect import order_slot
from qmq_client.outbox.row import OutboxRow
from qmq_watchdog.databases import Database as Watched
from qmq_watchdog.sweep import Sweep
from tests.client.world import SUBJECT, World, a_world
from tests.conftest import MakeDatabase
from tests.watchdog.rows import put_rows

LIMITS: dict[str, dict[str, Any]] = {
    "mysql": {
        "init_command": "SET sql_select_limit = 1, sql_safe_updates = 1, max_join_size = 256 "
        "/*M!100100 , max_statement_time = 30 */ /*!80000 , max_execution_time = 30000 */"
    },
    "postgresql": {
        "options": "-c standard_conforming_strings=off -c statement_timeout=30s -c bytea_output=escape"
    },
}
#: What the publisher's sessions say of these limits.
LIFTED = {
    "mysql": (
        "SELECT @@sql_select_limit, @@sql_safe_updates, @@sql_big_selects, "
        "/*M!100100 @@max_statement_time */ /*!80000 @@max_execution_time */",
        (2**64 - 1, 0, 1, 0),
    ),
    "postgresql": ("SELECT current_setting('statement_timeout')", ("1min",)),
}


@pytest.fixture(params=LIMITS)
def limited(
    request: pytest.FixtureRequest, tmp_path: Path, make_database: MakeDatabase
) -> Iterator[World]:
    kind: str = request.param
    settings = {"connect_args": LIMITS[kind]}
    with a_world(
        tmp_path, database=make_database(kind), engine_options=settings, order_by_key=True
    ) as world:
        yield world


def messages(count: int) -> list[Message]:
    return [Message(SUBJECT, f"{i}", key=f"key {i % 5}" if i % 2 else None) for i in range(count)]


def test_O1_O2_a_limited_application_sends_and_its_publisher_deletes(limited: World) -> None:
    with Session(limited.engine) as session, session.begin():
        limited.producer.send_many(messages(60), session=session)
    assert limited.producer.flush()
    assert len(set(limited.sent())) == len(limited.sent()) == 60
    assert (limited.stored_ids(), limited.producer.stats.database_errors) == (set(), 0)


def test_O1_O2_a_limited_database_is_swept(limited: World) -> None:
    database = Watched(name="shop", store=limited.store, engine=limited.sync_engine)
    put_rows(database, 250)
    counts = Sweep(database, limited.memory).step()
    assert (counts.sent, counts.lost, counts.error) == (250, 0, None)
    assert limited.stored_ids() == set()


def test_O1_no_limit_of_the_application_is_one_of_the_publisher(limited: World) -> None:
    query, expected = LIFTED[limited.kind]
    found = limited.store.write(lambda connection: tuple(connection.exec_driver_sql(query).one()))
    assert found == expected


def test_O4_every_key_of_a_transaction_is_locked_where_results_are_cut_short(
    tmp_path: Path, make_database: MakeDatabase
) -> None:
    settings = {"connect_args": LIMITS["mysql"]}
    with a_world(
        tmp_path, database=make_database("mysql"), engine_options=settings, order_by_key=True
    ) as world:
        keys = ["a", "b", "c", "d"]
        slots = {slot_of(key) for key in keys}
        assert len(slots) == len(keys)
        with Session(world.engine) as session:
            for key in keys:
                world.send(key, session, key=key)
            assert free_slots(world) == set(range(256)) - slots
            session.commit()


def test_S1_rows_are_all_found_again_where_results_are_cut_short(
    tmp_path: Path, make_database: MakeDatabase
) -> None:
    settings = {"connect_args": LIMITS["mysql"]}
    with (
        a_world(
            tmp_path, database=make_database("mysql"), engine_options=settings, strict=True
        ) as world,
        Session(world.engine) as session,
        session.begin(),
    ):
        for i in range(3):
            world.send(f"{i}", session)


def slot_of(key: str) -> int:
    return order_slot(OutboxRow(message_id=b"", subject=SUBJECT, ordering_key=key, record=b""))


def free_slots(world: World) -> set[int]:
    """Those that another transaction may lock."""
    other = sa.create_engine(world.url, poolclass=sa.NullPool)
    with other.connect() as connection:
        query = "SELECT slot FROM qmq_order_lock FOR UPDATE SKIP LOCKED"
        return set(connection.exec_driver_sql(query).scalars())
