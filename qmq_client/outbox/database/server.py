"""What MySQL, MariaDB and PostgreSQL have in common for the outbox.

Their drivers begin a transaction with its first statement, so "not in a transaction" means either
not begun yet, or ended behind SQLAlchemy's back. Having seen it open once tells the two apart; see
`Link.was_open`. The publisher's connections always use READ COMMITTED: at MariaDB's default level
an open claim blocks every INSERT of the business.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import event

from qmq_client.outbox.database.blocking import blocking_engine
from qmq_client.outbox.database.deadline import TRANSACTION_S_MAX, answered_within
from qmq_client.outbox.database.dialect import IdleRollbacks
from qmq_client.outbox.database.driver import driver_of
from qmq_client.outbox.database.link import Link, leave_out
from qmq_client.outbox.row import OutboxRow
from qmq_client.outbox.table import AS_NAMED, ORDER_LOCKS

#: The parent's pools stay the parent's: closing their sockets here would end its sessions there.
_LEFT_TO_THE_PARENT: Final[list[sa.Pool]] = []
#: Connections of siblings that were checked since they were opened.
_CHECKED: Final = "qmq_checked"


class ServerDialect(ABC):
    """The common part of `OutboxDialect`; one subclass for each kind of server."""

    now_ms: str
    idle_rollbacks: IdleRollbacks | None = None

    def __init__(self) -> None:
        #: After this time a transaction of the publisher or watchdog is cut; see `deadline.py`.
        self.transaction_s_max = TRANSACTION_S_MAX
        self.statement_s_max: float | None = None

    # -- what a subclass knows

    @abstractmethod
    def is_open(self, link: Link) -> bool:
        """Whether a transaction is open on the server, according to its last answer."""

    @abstractmethod
    def is_autocommit(self, link: Link) -> bool:
        """Whether each statement commits by itself; asks the driver and sends nothing."""

    @abstractmethod
    def prepare_sibling(self, connection: sa.Connection) -> None:
        """Check a connection of the publisher before its first use, in a transaction.

        Raises SQLAlchemy's `OperationalError` if it does not lead to a writable primary.
        """

    @abstractmethod
    def blocking_url(self, url: sa.URL) -> sa.URL:
        """The same database through a driver that needs no event loop."""

    @abstractmethod
    def on_connect(self, driver: Any, _: Any) -> None:
        """A new connection of the publisher: READ COMMITTED."""

    @abstractmethod
    def relax(self, connection: sa.Connection) -> None:
        """Make the transaction that has just begun no more durable than needed, if possible.

        A settlement that a crash of the server loses is a duplicate that the broker recognizes.
        """

    # -- transactions of the application

    def prepare_application(self, engine: sa.Engine) -> None:  # noqa: B027  # no choice to be made
        """Nothing: the driver begins by itself."""

    def before_statement(  # noqa: B027  # no choice to be made
        self, connection: sa.Connection, link: Link, cursor: Any, statement: str
    ) -> None:
        """Nothing: the driver begins by itself."""

    def note_answer(self, link: Link, _: str) -> None:
        link.was_open = self.is_open(link)

    def is_transactional(self, link: Link) -> bool:
        if self.is_open(link):
            link.was_open = True
        return not self.is_autocommit(link)

    def is_in_transaction(self, link: Link) -> bool:
        if self.is_open(link):
            link.was_open = True
            return True
        return not link.was_open

    def is_overtaken(self, _: sa.exc.DBAPIError) -> bool:
        return False

    can_commit = is_in_transaction

    # -- the publisher's own connections

    def open_sibling(self, engine: sa.Engine) -> sa.Engine:
        sibling = self._make_sibling(engine)
        event.listen(sibling, "connect", self.on_connect)
        event.listen(sibling, "connect", lambda _, entry: leave_out(entry))
        return sibling

    def _make_sibling(self, engine: sa.Engine) -> sa.Engine:
        if engine.dialect.is_async:
            return blocking_engine(engine, self.blocking_url(engine.url), hide_parameters=True)
        # Errors are logged, so they must not contain a token or a record.
        return sa.Engine(engine.pool.recreate(), engine.dialect, engine.url, hide_parameters=True)

    def close_sibling(self, sibling: sa.Engine) -> None:
        sibling.dispose()

    @contextmanager
    def write(self, sibling: sa.Engine) -> Iterator[sa.Connection]:
        with self._connect(sibling) as connection, connection.begin():
            if _CHECKED not in connection.info:
                self.prepare_sibling(connection)
                connection.info[_CHECKED] = True
            self.relax(connection)
            yield connection

    @contextmanager
    def read(self, sibling: sa.Engine) -> Iterator[sa.Connection]:
        with self._connect(sibling) as connection:
            yield connection

    @contextmanager
    def _connect(self, sibling: sa.Engine) -> Iterator[sa.Connection]:
        # Watched until just before it goes back: afterwards other threads may use it.
        with (
            sibling.connect() as connection,
            answered_within(driver_of(connection), self.transaction_s_max),
        ):
            yield connection

    def after_fork(self, engine: sa.Engine) -> None:
        _LEFT_TO_THE_PARENT.append(engine.pool)
        engine.dispose(close=False)

    # -- statements

    def reclaim(
        self,
        connection: sa.Connection,
        outbox: sa.Table,
        message_ids: Sequence[bytes],
        *,
        token: bytes,
        lease_ms: int,
    ) -> set[bytes]:
        is_owned = outbox.c.message_id.in_(message_ids) & (outbox.c.token == token)
        connection.execute(
            sa.update(outbox)
            .where(is_owned)
            .values(due_at_ms=sa.literal_column(self.now_ms, sa.BigInteger()) + lease_ms)
        )
        return set(connection.scalars(sa.select(outbox.c.message_id).where(is_owned)))

    def lock_keys(
        self, connection: sa.Connection, order_lock: sa.Table, rows: Sequence[OutboxRow]
    ) -> None:
        slots = sorted({order_slot(row) for row in rows if row.ordering_key is not None})
        # Always in the same order, so that two transactions cannot deadlock.
        connection.execute(
            sa.select(order_lock.c.slot)
            .where(order_lock.c.slot.in_(slots))
            .order_by(order_lock.c.slot)
            .limit(len(slots))  # or `sql_select_limit` of MySQL would leave some unlocked
            .with_for_update(),
            execution_options=AS_NAMED,
        )


def order_slot(row: OutboxRow) -> int:
    """The lock for the row's subject and key."""
    return zlib.crc32(f"{row.subject}\0{row.ordering_key}".encode()) % ORDER_LOCKS


def refuse(reason: str) -> sa.exc.OperationalError:
    """The error for a connection to a place where rows cannot be written."""
    return sa.exc.OperationalError(reason, None, ConnectionError(reason))
