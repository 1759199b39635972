"""The interface to one kind of database; each kind has a separate module.

A further database is a module with a function `make_dialect` and a line in `_MODULES`.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final
from weakref import WeakKeyDictionary

import sqlalchemy as sa

from qmq_client.errors import ConfigurationError
from qmq_client.outbox.database.claiming import ClaimTerms
from qmq_client.outbox.row import OutboxRow
from qmq_client.outbox.table import AS_NAMED, ORDER_LOCKS


def refuse(reason: str) -> sa.exc.OperationalError:
    """SQLAlchemy's error with this reason, as if the driver had raised it."""
    return sa.exc.OperationalError(reason, None, ConnectionError(reason))


_MODULES: Final = {
    "mariadb": "qmq_client.outbox.database.mysql",
    "mysql": "qmq_client.outbox.database.mysql",
    "postgresql": "qmq_client.outbox.database.postgresql",
    "sqlite": "qmq_client.outbox.database.sqlite",
}
#: Far above the time of a batch, and short enough to detect a hanging database.
TRANSACTION_S_MAX: Final = 60.0
LAST_CHARACTER: Final = "\U0010ffff"


class OutboxDialect(ABC):
    """One kind of database. Statements are synchronous; see `own_connections.py` for asynchronous drivers."""

    #: SQL text: milliseconds since 1970 UTC by the database's clock.
    now_ms: str
    #: Ending of an INSERT that skips existing ids.
    skip_known = " ON CONFLICT (message_id) DO NOTHING"

    def __init__(self) -> None:
        #: Seconds until a transaction of the publisher or watchdog is cut if the server is silent.
        self.transaction_s_max = TRANSACTION_S_MAX
        #: Seconds after which the server aborts one of their statements; None: only with the transaction.
        self.statement_s_max: float | None = None

    # -- the publisher's and the watchdog's own connections

    @abstractmethod
    def on_connect(self, connection: Any, dialect: sa.Dialect) -> None:
        """Set up a new connection of the store's pool, as passed to the pool's listeners; AUTOCOMMIT is on."""

    @abstractmethod
    def begin(self, connection: sa.Connection, *, is_to_write: bool) -> None:
        """Begin a short transaction of the store at READ COMMITTED, on a connection in AUTOCOMMIT.

        Its durability may be relaxed: a settlement that is lost causes a duplicate, which the broker
        recognizes.
        """

    def check_writable(self, connection: sa.Connection) -> None:  # noqa: B027  # SQLite checks the file
        """Raise SQLAlchemy's `OperationalError` unless the connection leads to a writable primary."""

    @contextmanager
    def quiet_moment(self) -> Iterator[bool]:  # only SQLite must wait
        """Whether a write of the store within the block disturbs no open transaction of the application."""
        yield True

    def after_fork(self) -> None:  # noqa: B027  # most have nothing that a child must forget
        """In a forked child."""

    @abstractmethod
    def binary(self, value: bytes) -> str:
        """A literal for these bytes that is valid with any settings of the server."""

    @abstractmethod
    def claim(
        self, connection: sa.Connection, outbox: sa.Table, terms: ClaimTerms
    ) -> list[OutboxRow]:
        """Take live rows for `terms.token`: due ones, or followers; see `claiming.py`."""

    # -- the application's connections

    def lock_keys(
        self, connection: sa.Connection, order_lock: sa.Table, rows: Sequence[OutboxRow]
    ) -> bool:
        """Lock the ordering keys of these rows until the end of the application's transaction.

        So the rows of one key are numbered in commit order. False if locks are missing.
        """
        slots = sorted({order_slot(row) for row in rows if row.ordering_key is not None})
        # Always in the same order, so that two calls cannot deadlock.
        locked = connection.execute(
            sa.select(order_lock.c.slot)
            .where(order_lock.c.slot.in_(slots))
            .order_by(order_lock.c.slot)
            .limit(len(slots))  # otherwise `sql_select_limit` of MySQL would leave some unlocked
            .with_for_update(),
            execution_options=AS_NAMED,
        )
        return len(locked.all()) == len(slots)

    def locks_what_it_reads(self, _: sa.Connection) -> bool:
        """Whether a plain SELECT on this connection keeps others from inserting what it has not found."""
        return False

    def refuse_hidden(  # noqa: B027  # on others a whole name leads to no temporary table
        self, connection: sa.Connection, table: sa.Table
    ) -> None:
        """Raise `OutboxMissingError` if a temporary table of this connection hides the table."""

    def record_bytes_max(self, _: sa.Connection) -> int | None:
        """The longest record that one statement can carry on this server; None if it sets no limit."""
        return None

    def last_character(self, _: sa.Connection) -> str:
        """The last character that this connection's character set can encode; a driver refuses others."""
        return LAST_CHARACTER

    # -- what its errors and settings mean

    @abstractmethod
    def is_table_missing(self, error: sa.exc.DBAPIError) -> bool:
        """Whether a statement failed because a table or a column does not exist."""

    @abstractmethod
    def is_refused(self, error: sa.exc.DBAPIError) -> bool:
        """Whether the database refused a statement because of its rows, permanently.

        For example by a trigger, a foreign key or a missing right; not if it was unreachable, busy,
        locked, full or read-only.
        """

    @abstractmethod
    def faults(self, connection: sa.Connection, tables: Sequence[sa.Table]) -> list[str]:
        """The faults of this server or these tables, besides missing columns; one text each."""


#: One for each engine, so that its facts about the server are shared.
_dialects: WeakKeyDictionary[sa.Engine, OutboxDialect] = WeakKeyDictionary()


def dialect_of(engine: sa.Engine) -> OutboxDialect:
    """The dialect for this engine's database; raises `ConfigurationError` for an unknown one."""
    dialect = _dialects.get(engine)
    if dialect is None:
        dialect = _dialects[engine] = _make(engine)
    return dialect


def order_slot(row: OutboxRow) -> int:
    """The lock for the row's subject and key."""
    return zlib.crc32(f"{row.subject}\0{row.ordering_key}".encode()) % ORDER_LOCKS


def error_code(error: BaseException | None) -> object:
    """The code of a driver's error: MySQL's number, or PostgreSQL's SQLSTATE; None without one.

    Drivers keep it in different public places: psycopg and asyncpg in `sqlstate`, psycopg2 in `pgcode`,
    pg8000 in the answer's field `C`, MySQL's in the first argument. SQLAlchemy's asynchronous adapters
    wrap the driver's own error.
    """
    if error is None:
        return None
    first = error.args[0] if error.args else None
    for code in (getattr(error, "sqlstate", None), getattr(error, "pgcode", None)):
        if code is not None and not isinstance(first, int):
            return code
    if isinstance(first, dict):
        return first.get("C")
    return first if isinstance(first, int) else None


def _make(engine: sa.Engine) -> OutboxDialect:
    name = engine.dialect.name
    module = _MODULES.get(name)
    if module is None:
        raise ConfigurationError(
            setting="engine",
            value=f"a {name} database",
            remedy=f"Use one that the outbox works with: {', '.join(sorted(_MODULES))}.",
        )
    make: Any = import_module(module).make_dialect
    dialect: OutboxDialect = make(engine)
    return dialect
