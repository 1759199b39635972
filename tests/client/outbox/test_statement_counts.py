"""S13: what a transaction with messages costs the server, counted where it cannot be hidden.

On SQLite by the driver's trace, on MySQL by the session's own counters, on PostgreSQL by what the
server logs. BEGIN and COMMIT belong to the application and are not counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client.message import Message
from tests.client.outbox.interference import driver_of
from tests.client.publishing import send_each, sibling_statements
from tests.client.world import SUBJECT, Order, World, a_world
from tests.services.databases import Database

#: The commands that a session of MySQL counts, as `SHOW SESSION STATUS` calls them.
_COUNTED: Final = (
    "Com_insert",
    "Com_select",
    "Com_update",
    "Com_delete",
    "Com_savepoint",
    "Com_show_create_table",
)
_TRACED: Final = re.compile(r"INSERT|SELECT|UPDATE|DELETE|SAVEPOINT", re.IGNORECASE)

Count = Callable[[], int]


@contextmanager
def counting(world: World, connection: sa.Connection) -> Iterator[Count]:
    """A function that says how many statements this session has had."""
    driver: Any = driver_of(connection)
    counter = {"sqlite": _sqlite_count, "mysql": _mysql_count, "postgresql": _postgresql_count}
    yield counter[world.kind](driver)
    if world.kind == "sqlite":
        driver.set_trace_callback(None)


def _sqlite_count(driver: Any) -> Count:
    seen: list[str] = []
    driver.set_trace_callback(lambda text: seen.append(text) if _TRACED.match(text) else None)
    return lambda: len(seen)


def _mysql_count(driver: Any) -> Count:
    names = ", ".join(f"'{name}'" for name in _COUNTED)

    def count() -> int:
        with driver.cursor() as cursor:
            cursor.execute(f"SHOW SESSION STATUS WHERE Variable_name IN ({names})")
            return sum(int(value) for _, value in cursor.fetchall())

    return count


def _postgresql_count(driver: Any) -> Count:
    """The server logs each statement, and sends its log to this client."""
    seen: list[str] = []

    def note(diagnostic: Any) -> None:
        _, _, text = str(diagnostic.message_primary).partition(": ")
        if _TRACED.match(text):
            seen.append(text)

    driver.add_notice_handler(note)
    with driver.cursor() as cursor:
        cursor.execute("SET LOCAL log_statement = 'all'")
        cursor.execute("SET LOCAL client_min_messages = 'log'")
    return lambda: len(seen)


@pytest.fixture(params=[False, True], ids=["normal", "strict"])
def counted_world(
    a_database: Database, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[World]:
    with a_world(tmp_path, database=a_database, strict=request.param) as world:
        yield world


@pytest.mark.parametrize("messages", [0, 1, 2, 100])
def test_S13_a_transaction_pays_one_insert_for_its_messages_and_nothing_for_none(
    counted_world: World, messages: int
) -> None:
    """Strict mode reads the rows back, and on MySQL looks whether a temporary table is there."""
    world = counted_world
    world.producer.send_now(Message(SUBJECT, "the first one has the tables looked at"))
    assert world.producer.flush()
    with world.engine.connect() as connection:
        connection.begin()
        with counting(world, connection) as count:
            before = count()
            with Session(connection, join_transaction_mode="control_fully") as session:
                session.execute(sa.insert(Order).values(label="a"))
                world.producer.send_many(
                    [Message(SUBJECT, f"{i}") for i in range(messages)], session=session
                )
                session.commit()
            paid = count() - before - 1  # the business's own INSERT
    strict = {"sqlite": 2, "mysql": 3, "postgresql": 2}[world.kind]
    expected = 0 if not messages else strict if world.producer.options.strict else 1
    assert paid == expected
    assert world.producer.flush()
    assert len(world.sent()) == 1 + messages


def test_S13_deletes_under_load_are_at_most_one_for_a_hundred_messages(
    a_database: Database, tmp_path: Path
) -> None:
    with a_world(tmp_path, database=a_database, takeover_ms=600_000) as world:
        statements = sibling_statements(world)
        send_each(world, 300)
        assert world.producer.flush()
        deletes = [text for text in statements.texts if text.startswith("DELETE")]
        assert len(deletes) <= 3
        assert (len(world.sent()), world.stored_ids()) == (300, set())
        looks = [
            text for text in statements.texts if text.startswith("SELECT") and "outbox" in text
        ]
        assert len(looks) == 1, "one for the batch"
