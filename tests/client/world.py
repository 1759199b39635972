"""One application with its database, a producer without a thread, and a broker in memory.

On any of the three kinds of database, through a blocking or an asynchronous engine. The truth is read
by a plain driver connection of its own (`truth.py`): what it sees is what committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.message import Message
from qmq_client.options import ProducerOptions
from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.outbox.sending.unawaited import Sent
from qmq_client.outbox.table import create_tables
from qmq_client.producer import Producer
from qmq_client.testing import FakeClock, MemoryBroker, MemoryTransport
from qmq_client.transport.port import Transport
from tests.client.truth import Truth
from tests.services.databases import Database
from tests.services.drivers import Driver

SUBJECT = "order.placed"
OUTBOX = "qmq_outbox"
LABEL_CHARACTERS = 100
#: Statements that open, close and mark transactions; they are not paid for a message.
CONTROL = ("BEGIN", "COMMIT", "ROLLBACK", "SAVEPOINT", "RELEASE", "PRAGMA")


class Base(DeclarativeBase):
    """The application's own tables."""


class Order(Base):
    """A business row; `promise` points to a row that need not be there before the commit.

    MySQL knows no such promise: there a commit fails by other means.
    """

    __tablename__ = "business_order"

    id: Mapped[int] = mapped_column(primary_key=True)
    label: Mapped[str] = mapped_column(sa.String(LABEL_CHARACTERS), unique=True)
    promise: Mapped[int | None] = mapped_column()

    __table_args__ = (
        sa.ForeignKeyConstraint(
            ["promise"], ["business_order.id"], deferrable=True, initially="DEFERRED"
        ).ddl_if(callable_=lambda *_, dialect, **__: dialect.name not in ("mysql", "mariadb")),
    )


class Statements:
    """Statements that an engine is given from now on, without those that only control transactions."""

    def __init__(self, engine: sa.Engine) -> None:
        self.texts: list[str] = []
        event.listen(engine, "before_cursor_execute", self._note)

    def _note(self, *given: Any) -> None:
        text: str = given[2]
        if not text.startswith(CONTROL):
            self.texts.append(text)

    def of_outbox(self) -> list[str]:
        return [text for text in self.texts if OUTBOX in text]


class Commits:
    """The driver's COMMIT, below everything of ours; a test may step in."""

    def __init__(self, engine: sa.Engine) -> None:
        dialect: Any = engine.dialect
        self.loaded_dbapi: Any = dialect.loaded_dbapi
        self.real: Callable[[Any], None] = dialect.do_commit
        self.now = self.real
        dialect.do_commit = self._commit

    def _commit(self, connection: Any) -> None:
        self.now(connection)


class World:
    """See the module. `engine` is what the application has, `sync_engine` what stands behind it."""

    def __init__(
        self,
        folder: Path,
        *,
        database: Database | None = None,
        is_async: bool = False,
        driver: Driver | None = None,
        engine_options: dict[str, Any] | None = None,
        real_clock: bool = False,
        **options: Any,
    ) -> None:
        self.path = folder / "shop.sqlite"
        self.url = f"sqlite+pysqlite:///{self.path}" if database is None else database.url
        self.kind = "sqlite" if database is None else database.kind
        self.is_async = is_async if driver is None else driver.is_async
        self.truth = Truth(self.url)
        set_up(self.url)
        self.engine: Any
        url = self.url if driver is None else driver.url(self.url)
        if self.is_async:
            from sqlalchemy.ext.asyncio import create_async_engine

            if driver is None:
                assert database is not None, "an asynchronous engine needs its URL"
                url = database.async_url
            self.engine = create_async_engine(url, **(engine_options or {}))
        else:
            self.engine = sa.create_engine(url, **(engine_options or {}))
        self.sync_engine: sa.Engine = self.engine.sync_engine if self.is_async else self.engine
        prepare(self.sync_engine)
        self.commits = Commits(self.sync_engine)
        self.clock: Any = SYSTEM_CLOCK if real_clock or options.get("background") else FakeClock()
        self.broker = MemoryBroker(clock=self.clock)
        self.memory = MemoryTransport(self.broker)
        #: A test may put another one here, for whoever sends from then on.
        self.transport: Transport = self.memory
        self.producer = self.make_producer(**options)
        self.store = OutboxStore(self.sync_engine)

    def make_producer(self, **options: Any) -> Producer:
        """Another producer of the same process on the same engine."""
        return Producer(
            self.engine,
            self.transport,
            options=ProducerOptions(**{"background": False, **options}),
            clock=self.clock,
        )

    def send(self, body: str, session: Any = None, **fields: Any) -> Sent:
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

    def outcome(self) -> tuple[list[str], list[str], set[str]]:
        """After a flush: business rows, messages at the broker, and rows that are left."""
        assert self.producer.flush().is_done
        return sorted(self.committed_orders()), sorted(self.sent()), self.stored_ids()

    def read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """What another connection sees."""
        return self.truth.read(query, *values)

    def change(self, query: str, *values: Any) -> int:
        """Change the database behind everybody's back."""
        return self.truth.change(query, *values)

    def checked_out(self) -> int:
        """Connections of the application's pool that are in somebody's hands."""
        pool = self.sync_engine.pool
        assert isinstance(pool, sa.QueuePool)
        return pool.checkedout()

    def make_due(self) -> None:
        """Let the takeover time of all rows pass."""
        self.change(f"UPDATE {OUTBOX} SET due_at_ms = 0")

    def close(self) -> None:
        """Requires: connections of an asynchronous engine were disposed of inside their loop."""
        self.producer.close()
        self.store.close()
        self.sync_engine.dispose(close=not self.is_async)


def prepare(engine: sa.Engine) -> None:
    """On SQLite: a write-ahead log, foreign keys, and no waiting for the disk."""
    if engine.dialect.name != "sqlite":
        return

    @event.listens_for(engine, "connect")
    def _prepare(driver: Any, _: Any) -> None:
        cursor = driver.cursor()
        for setting in ("journal_mode = WAL", "synchronous = OFF", "foreign_keys = ON"):
            cursor.execute(f"PRAGMA {setting}")
        cursor.close()


def set_up(url: str) -> None:
    """Make the tables, on connections that are gone afterwards."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    prepare(engine)
    Base.metadata.create_all(engine)
    create_tables(engine)
    engine.dispose()


def open_engine(path: Path, **settings: Any) -> sa.Engine:
    """An engine on a database file."""
    engine = sa.create_engine(f"sqlite:///{path}", **settings)
    prepare(engine)
    return engine


@contextmanager
def a_world(folder: Path, **options: Any) -> Iterator[World]:
    """A world that is closed at the end of the block."""
    world = World(folder, **options)
    try:
        yield world
    finally:
        world.close()


def add(world: World, session: Any, label: str) -> None:
    """A business row and its message, in one transaction."""
    session.execute(sa.insert(Order).values(label=label))
    world.send(label, session)
