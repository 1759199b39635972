"""The port to the differences between databases; one module per database is behind it.

A further database is a module with a function `make_dialect` and a line in `_MODULES`; nothing else
here or in `store.py`, `calls.py`, `tracker.py` and `unit.py` changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

import sqlalchemy as sa

from qmq_client.errors import ConfigurationError
from qmq_client.outbox.database.claiming import ClaimTerms
from qmq_client.outbox.database.driver import root_engine
from qmq_client.outbox.database.link import Link
from qmq_client.outbox.row import OutboxRow

#: Execution option of a connection: how its transactions begin, where the database has more than
#: one way. `write` announces that the caller will write.
BEGIN_OPTION: Final = "qmq_begin"
BEGIN_TO_WRITE: Final = "write"

_MODULES: Final = {
    "mariadb": "qmq_client.outbox.database.mysql",
    "mysql": "qmq_client.outbox.database.mysql",
    "postgresql": "qmq_client.outbox.database.postgresql",
    "sqlite": "qmq_client.outbox.database.sqlite",
}


class IdleRollbacks(Protocol):
    """Knows which of a pool's ROLLBACKs would be needless round trips."""

    def note_commit(self, link: Link) -> None:
        """A COMMIT has returned."""
        ...

    def is_at_rest(self, link: Link) -> bool:
        """Whether the driver surely executed nothing since a COMMIT, so that a ROLLBACK does nothing."""
        ...


class OutboxDialect(Protocol):
    """What the outbox needs to know about one kind of database."""

    #: SQL text: milliseconds since 1970 UTC by the database's clock.
    now_ms: str
    #: Seconds until a transaction of the publisher or watchdog is cut if the server is silent.
    transaction_s_max: float
    #: Seconds after which the server aborts one of their statements; None: only with the transaction.
    #: Not used if a driver does that by itself.
    statement_s_max: float | None
    #: For a driver that sends a ROLLBACK even if nothing is open; None if it knows better.
    idle_rollbacks: IdleRollbacks | None

    def prepare_application(self, engine: sa.Engine) -> None:
        """Make the application's engine keep the promises; safe to repeat.

        Raises `ConfigurationError` if that is not possible.
        """
        ...

    def before_statement(
        self, connection: sa.Connection, link: Link, cursor: Any, statement: str
    ) -> None:
        """The application is about to execute a statement, in a transaction not known to be open."""
        ...

    def note_answer(self, link: Link, statement: str) -> None:
        """The statement was answered: note whether the transaction is open now."""
        ...

    def is_transactional(self, link: Link) -> bool:
        """Whether what is written next can still be rolled back; False in AUTOCOMMIT.

        Asks the driver, which always knows. Requires: SQLAlchemy's transaction has begun. Whether
        it is still open is told by `is_in_transaction`.
        """
        ...

    def is_table_missing(self, error: sa.exc.DBAPIError) -> bool:
        """Whether a statement failed because a table or a column does not exist."""
        ...

    def is_overtaken(self, error: sa.exc.DBAPIError) -> bool:
        """Whether it failed because another transaction wrote after this one had read."""
        ...

    def is_refused(self, error: sa.exc.DBAPIError) -> bool:
        """Whether the database refused a statement because of its rows, and would again.

        For example by a trigger, a foreign key or a missing right; not if it was away, busy,
        locked, full or read-only.
        """
        ...

    def is_in_transaction(self, link: Link) -> bool:
        """Whether the driver's transaction is open, or will be with its first statement.

        False if it was ended behind SQLAlchemy's back. Asks the driver and sends nothing.
        """
        ...

    def can_commit(self, link: Link) -> bool:
        """Whether a COMMIT would store what was written, and would report it if not."""
        ...

    def is_busy(self, link: Link) -> bool:
        """Whether another statement would disturb what the application is still reading or writing.

        Such as an unbuffered result of PyMySQL, or a COPY of psycopg.
        """
        ...

    def can_encode(self, link: Link, text: str) -> bool:
        """Whether a text passes unaltered through this connection's character set."""
        ...

    def undoes_transaction(self, link: Link, error: BaseException | None) -> bool:
        """Whether this error of the driver ended the whole transaction.

        Whatever the application does next is in another one, and nobody tells it.
        """
        ...

    def savepoint_name(self, text: str) -> str:
        """The same for all texts that mean one savepoint, with quotes or without."""
        ...

    def lock_keys(
        self, connection: sa.Connection, order_lock: sa.Table, rows: Sequence[OutboxRow]
    ) -> None:
        """Lock the ordering keys of these rows until the end of the application's transaction.

        So the rows of one key are numbered in commit order.
        """
        ...

    def record_bytes_max(self, connection: sa.Connection) -> int | None:
        """The longest record that one statement can carry on this server; None if it sets no limit."""
        ...

    def faults(self, connection: sa.Connection, tables: Sequence[sa.Table]) -> list[str]:
        """Why this server or these tables are unfit, besides missing columns; one text each."""
        ...

    def open_sibling(self, engine: sa.Engine) -> sa.Engine:
        """An engine for the same database with a small pool of its own.

        For a database in memory it is the application's own engine, since another would see another
        database.
        """
        ...

    def close_sibling(self, sibling: sa.Engine) -> None:
        """Close its idle connections, unless it is the application's own; it may be used again."""
        ...

    def write(self, sibling: sa.Engine) -> AbstractContextManager[sa.Connection]:
        """A short transaction that will write; committed at the end, or rolled back on an error.

        Its durability may be relaxed: a settlement that is lost causes a duplicate, which the
        broker recognizes.
        """
        ...

    def read(self, sibling: sa.Engine) -> AbstractContextManager[sa.Connection]:
        """A connection that reads committed rows."""
        ...

    def claim(
        self, connection: sa.Connection, outbox: sa.Table, terms: ClaimTerms
    ) -> list[OutboxRow]:
        """Take live rows for `terms.token`: due ones, or followers; see `claiming.py`."""
        ...

    def reclaim(
        self,
        connection: sa.Connection,
        outbox: sa.Table,
        message_ids: Sequence[bytes],
        *,
        token: bytes,
        lease_ms: int,
    ) -> set[bytes]:
        """Extend the leases of those of these live rows that `token` still owns; which they are."""
        ...

    def after_fork(self, engine: sa.Engine) -> None:
        """In a forked child: drop the parent's connections without touching them.

        Called for the sibling, and for the application's engine, whose pool is shared as well.
        """
        ...


#: One for each engine, so that what it learns about the server and its transactions is shared.
_dialects: WeakKeyDictionary[sa.Engine, OutboxDialect] = WeakKeyDictionary()


def dialect_of(engine: sa.Engine) -> OutboxDialect:
    """The dialect for this engine's database; raises `ConfigurationError` for an unknown one."""
    root = root_engine(engine)
    dialect = _dialects.get(root)
    if dialect is None:
        dialect = _dialects[root] = _make(root)
    return dialect


def _make(engine: sa.Engine) -> OutboxDialect:
    name = engine.dialect.name
    module = _MODULES.get(name)
    if module is None:
        raise ConfigurationError(
            setting="engine",
            value=f"a {name} database",
            remedy=f"The outbox knows {', '.join(sorted(_MODULES))}.",
        )
    make: Any = import_module(module).make_dialect
    dialect: OutboxDialect = make(engine)
    return dialect
