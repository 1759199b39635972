"""The inbox: a message's id, the change it causes and what it sends are one transaction.

The id is noted first. When it was there before, the effect has happened and the message is skipped;
when the transaction rolls back, the id goes with it and the next delivery tries again. So the
effect happens once for each id within the retention, whatever is delivered twice, and whoever dies
when. What a handler does outside this database is not covered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import StaticPool

from qmq_client.errors import ConfigurationError, InboxTransactionError, OutboxMissingError
from qmq_client.inbox.dialect import InboxDialect, inbox_dialect
from qmq_client.outbox.dialect import BEGIN_OPTION, BEGIN_TO_WRITE
from qmq_client.outbox.table import DEFAULT_TABLES, Tables
from qmq_client.wire.names import check_name

if TYPE_CHECKING:
    SessionFactory = Callable[[], Session]

#: Rows per delete: each is a short transaction between those of the handlers.
PURGED_ROWS_PER_TRANSACTION: Final = 1_000
_OPTIONS: Final = {BEGIN_OPTION: BEGIN_TO_WRITE}


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxWork:
    """One open transaction."""

    session: Session
    #: Ids that were not handled before; only these may have effects now.
    new: set[bytes]


class Inbox:
    """The inbox of one consumer group in one database. Safe for any number of threads."""

    def __init__(
        self,
        session_factory: SessionFactory | sa.Engine,
        *,
        group: str,
        tables: Tables = DEFAULT_TABLES,
    ) -> None:
        if isinstance(session_factory, sa.Engine):
            session_factory = sessionmaker(session_factory)
        self._session_factory = session_factory
        self.group = check_name(group, field="group")
        self._inbox = tables.inbox
        self._bind_arguments = {"clause": tables.inbox}
        engine = self._engine()
        self._dialect: InboxDialect = inbox_dialect(engine, tables.inbox)
        # A database in memory has one connection for all threads.
        self._turn: AbstractContextManager[object] = (
            threading.Lock() if isinstance(engine.pool, StaticPool) else nullcontext()
        )

    def check(self) -> None:
        """Raise when the inbox table is missing or the connection would commit by itself."""
        engine = self._engine()
        wanted = {column.name for column in self._inbox.columns}
        try:
            found = {
                column["name"]
                for column in sa.inspect(engine).get_columns(
                    self._inbox.name, schema=self._inbox.schema
                )
            }
        except sa.exc.NoSuchTableError:
            found = set()
        if missing := sorted(wanted - found):
            database = engine.url.render_as_string(hide_password=True)
            lacks = f"has no {', '.join(missing)}" if found else "is missing"
            raise OutboxMissingError(
                f"table {self._inbox.fullname} {lacks} in {database}. "
                f"Run `qmq db migrate --database {database}` or create_tables(engine)."
            )
        with self.open(()):
            pass

    @contextmanager
    def open(self, message_ids: Sequence[bytes]) -> Iterator[InboxWork]:
        """A transaction that has noted these ids; committed at the end, rolled back on an error.

        Raises `InboxTransactionError` when the block ended the transaction by itself.
        """
        with self._turn, self._session_factory() as session:
            connection = session.connection(
                bind_arguments=self._bind_arguments, execution_options=_OPTIONS
            )
            transaction = session.get_transaction()
            self._dialect.begin(connection)
            ids = message_ids if len(message_ids) == 1 else list(dict.fromkeys(message_ids))
            new = self._dialect.insert(connection, self.group, ids) if ids else set()
            yield InboxWork(session=session, new=new)
            if transaction is None or session.get_transaction() is not transaction:
                raise InboxTransactionError()
            if ids:
                self._dialect.confirm(connection)
            session.commit()

    def purge(self, older_than: timedelta, *, rows_max: int | None = None) -> int:
        """Forget ids older than `older_than`, in small transactions; returns how many.

        An id forgotten is an effect that can happen again, should its message be delivered again.
        """
        older_than_ms = round(older_than.total_seconds() * 1000)
        if older_than_ms < 0 or (rows_max is not None and rows_max < 1):
            raise ConfigurationError(
                setting="purge",
                value=f"older_than={older_than}, rows_max={rows_max}",
                remedy="Give a time in the past and at least one row.",
            )
        purged = 0
        while rows_max is None or purged < rows_max:
            limit = PURGED_ROWS_PER_TRANSACTION
            if rows_max is not None:
                limit = min(limit, rows_max - purged)
            count = self._purge_once(older_than_ms, limit)
            purged += count
            if count < limit:
                break
        return purged

    def _purge_once(self, older_than_ms: int, limit: int) -> int:
        with self.open(()) as work:
            connection = work.session.connection(bind_arguments=self._bind_arguments)
            return self._dialect.purge(
                connection, self.group, older_than_ms=older_than_ms, limit=limit
            )

    def _engine(self) -> sa.Engine:
        with self._session_factory() as session:
            return session.get_bind(clause=self._inbox).engine
