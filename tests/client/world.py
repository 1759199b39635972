"""One application with its database file, a producer without a thread, and a broker in memory.

The truth is read by a plain driver connection of its own: what it sees is what committed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from qmq_client.message import Message
from qmq_client.options import ProducerOptions
from qmq_client.outbox.store import OutboxStore
from qmq_client.outbox.table import create_tables
from qmq_client.producer import Producer
from qmq_client.testing import FakeClock, MemoryBroker, MemoryTransport

SUBJECT = "order.placed"
OUTBOX = "qmq_outbox"
#: Statements that open, close and mark transactions; they are not paid for a message.
CONTROL = ("BEGIN", "COMMIT", "ROLLBACK", "SAVEPOINT", "RELEASE", "PRAGMA")


class Base(DeclarativeBase):
    """The application's own tables."""


class Order(Base):
    """A business row; `promise` points to a row that need not be there before the commit."""

    __tablename__ = "business_order"

    id: Mapped[int] = mapped_column(primary_key=True)
    label: Mapped[str] = mapped_column(unique=True)
    promise: Mapped[int | None] = mapped_column(
        sa.ForeignKey("business_order.id", deferrable=True, initially="DEFERRED")
    )


class Statements:
    """Statements that an engine was given, without those that only control transactions."""

    def __init__(self, engine: sa.Engine) -> None:
        self.texts: list[str] = []
        event.listen(engine, "before_cursor_execute", self._note)

    def _note(self, *given: Any) -> None:
        text: str = given[2]
        if not text.startswith(CONTROL):
            self.texts.append(text)

    def clear(self) -> None:
        self.texts.clear()

    def of_outbox(self) -> list[str]:
        return [text for text in self.texts if OUTBOX in text]


class World:
    """See the module."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.path = folder / "shop.sqlite"
        self.engine = open_engine(self.path)
        Base.metadata.create_all(self.engine)
        create_tables(self.engine)
        self.clock = FakeClock()
        self.broker = MemoryBroker(clock=self.clock)
        self.transport = MemoryTransport(self.broker)
        self.producer = self.make_producer(**options)
        self.store = OutboxStore(self.engine)
        self.statements = Statements(self.engine)

    def make_producer(self, **options: Any) -> Producer:
        """Another producer of the same process on the same engine."""
        return Producer(
            self.engine,
            self.transport,
            options=ProducerOptions(**{"background": False, **options}),
            clock=self.clock,
        )

    def send(self, body: str, session: Any = None, **fields: Any) -> str:
        return self.producer.send(Message(SUBJECT, body, **fields), session=session)

    def sent(self) -> list[str]:
        """Bodies that the broker has, in its order."""
        return [message.body for message in self.broker.messages(SUBJECT)]

    def sent_ids(self) -> set[str]:
        return {str(message.message_id) for message in self.broker.messages(SUBJECT)}

    def stored_ids(self) -> set[str]:
        """Ids of the outbox rows that committed."""
        return {row[0].hex() for row in self.read(f"SELECT message_id FROM {OUTBOX}")}

    def committed_orders(self) -> set[str]:
        """Labels of the business rows that committed."""
        return {row[0] for row in self.read("SELECT label FROM business_order")}

    def read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """What another connection sees."""
        with closing(sqlite3.connect(self.path)) as connection:
            return connection.execute(query, values).fetchall()

    def change(self, query: str, *values: Any) -> int:
        """Change the database behind everybody's back."""
        with closing(sqlite3.connect(self.path)) as connection, connection:
            return connection.execute(query, values).rowcount

    def checked_out(self) -> int:
        """Connections of the application's pool that are in somebody's hands."""
        pool = self.engine.pool
        assert isinstance(pool, sa.QueuePool)
        return pool.checkedout()

    def make_due(self) -> None:
        """Let the takeover time of all rows pass."""
        self.change(f"UPDATE {OUTBOX} SET due_at_ms = 0")

    def close(self) -> None:
        self.producer.close()
        self.store.close()
        self.engine.dispose()


def open_engine(path: Path, **settings: Any) -> sa.Engine:
    """A database file with a write-ahead log, foreign keys, and no waiting for the disk."""
    engine = sa.create_engine(f"sqlite:///{path}", **settings)

    @event.listens_for(engine, "connect")
    def _prepare(driver: Any, _: Any) -> None:
        cursor = driver.cursor()
        for setting in ("journal_mode = WAL", "synchronous = OFF", "foreign_keys = ON"):
            cursor.execute(f"PRAGMA {setting}")
        cursor.close()

    return engine


@contextmanager
def a_world(folder: Path, **options: Any) -> Iterator[World]:
    """A world that is closed at the end of the block."""
    world = World(folder, **options)
    try:
        yield world
    finally:
        world.close()
