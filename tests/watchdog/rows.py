"""Outbox rows as a dead sender leaves them, and what became of them; all times by the database."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from qmq_client.ids import MESSAGE_IDS
from qmq_client.message import Message, message_to_record
from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.outbox.table import DEFAULT_TABLES, LIVE, create_tables
from qmq_client.wire.record import encode_record
from qmq_watchdog.databases import Database
from tests.kit.listening import listening

OUTBOX = DEFAULT_TABLES.outbox
SUBJECT = "orders.created"
#: Token of a sender that no test is.
DEAD_SENDER = b"a dead sender's!"


def make_database(path: Path, *, name: str = "") -> Database:
    """A database in a file, with both tables."""
    engine = sa.create_engine(f"sqlite:///{path}")
    create_tables(engine)
    return Database(name=name or path.stem, store=OutboxStore(engine), engine=engine)


def new_rows(
    store: OutboxStore,
    count: int,
    *,
    due_in_ms: int = -1,
    first_id: int | None = None,
    body: bytes = b"{}",
) -> tuple[sa.Insert, list[dict[str, Any]]]:
    """What inserts rows of a dead sender: the statement and its values."""
    rows = []
    for number in range(count):
        message_id = MESSAGE_IDS.next_id()
        record = message_to_record(Message(SUBJECT, body), new_id=message_id, now_ms=1)
        rows.append(
            {
                "message_id": message_id,
                "subject": SUBJECT,
                "record": encode_record(record),
                "token": DEAD_SENDER,
                "state": LIVE,
                "attempts": 0,
            }
            | ({} if first_id is None else {"id": first_id + number})
        )
    due_at_ms = store.now_ms + due_in_ms
    return sa.insert(OUTBOX).values(due_at_ms=due_at_ms, created_at_ms=store.now_ms), rows


def put_rows(database: Database, count: int = 1, **options: Any) -> list[bytes]:
    """Commit rows that a dead sender owns; their message ids. Options as of `new_rows`."""
    insert, rows = new_rows(database.store, count, **options)
    with database.engine.begin() as connection:
        connection.execute(insert, rows)
    return [row["message_id"] for row in rows]


def make_due(database: Database, message_ids: Iterable[bytes] | None = None) -> None:
    """Let the time of these rows, or of all, have come."""
    update = sa.update(OUTBOX).values(due_at_ms=database.store.now_ms)
    if message_ids is not None:
        update = update.where(OUTBOX.c.message_id.in_(list(message_ids)))
    with database.engine.begin() as connection:
        connection.execute(update)


def damage(database: Database, message_id: bytes) -> None:
    """Alter the last byte of a stored record."""
    query = sa.select(OUTBOX.c.record).where(OUTBOX.c.message_id == message_id)
    with database.engine.begin() as connection:
        record = connection.execute(query).scalar_one()
        altered = record[:-1] + bytes([record[-1] ^ 1])
        connection.execute(
            sa.update(OUTBOX).where(OUTBOX.c.message_id == message_id).values(record=altered)
        )


def rows_of(database: Database) -> Sequence[Any]:
    """Message id, state, attempts, token and error of every row."""
    columns = OUTBOX.c
    query = sa.select(
        columns.message_id, columns.state, columns.attempts, columns.token, columns.last_error
    ).order_by(columns.id)
    with database.engine.connect() as connection:
        return connection.execute(query).all()


def left(database: Database) -> set[bytes]:
    """Message ids that are still in the outbox."""
    return {row.message_id for row in rows_of(database)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """One statement as it went to a driver."""

    text: str
    parameters: tuple[Any, ...]

    @property
    def verb(self) -> str:
        return self.text.split(maxsplit=1)[0]


@contextmanager
def executed() -> Iterator[list[Executed]]:
    """Every statement of every engine while inside."""
    found: list[Executed] = []

    def note(_c: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        rows = parameters if isinstance(parameters, list) else [parameters]
        values = tuple(value for row in rows for value in row)
        found.append(Executed(text=statement, parameters=values))

    with listening(sa.Engine, before_cursor_execute=note):
        yield found
