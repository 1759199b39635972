"""The inbox: stores the id of a message in the transaction of its effect and of the messages that its handler sends.

The id is inserted first. If it exists already, the effect has already happened, and the message is
skipped. If the transaction rolls back, the id is removed too, and the next delivery tries again. So
within the retention the effect happens once for each id, even if messages are delivered twice or
processes die at any moment. Effects of a handler outside this database are not covered.

An asynchronous inbox runs the same code inside SQLAlchemy's `run_sync`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

import sqlalchemy as sa
from sqlalchemy.orm import Session, SessionTransaction, sessionmaker
from sqlalchemy.pool import StaticPool

from qmq_client.errors import ConfigurationError, InboxTransactionError, OutboxMissingError
from qmq_client.inbox.dialect import InboxDialect, Noted, inbox_dialect
from qmq_client.outbox.checking.rights import CONSUMER, Rights, lacking_texts
from qmq_client.outbox.database.dialect import dialect_of
from qmq_client.outbox.database.sqlite_file import follow_file
from qmq_client.outbox.table import DEFAULT_TABLES, Tables
from qmq_client.wire.message_id import MESSAGE_ID_BYTES
from qmq_client.wire.names import check_name

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

    SessionFactory = Callable[[], Session]


#: Rows per delete: each is a short transaction between those of the handlers.
PURGED_ROWS_PER_TRANSACTION: Final = 1_000


@dataclass(frozen=True, slots=True)
class Begun:
    """An open transaction with inserted ids."""

    connection: sa.Connection
    transaction: SessionTransaction | None
    #: None if there were no ids.
    noted: Noted | None

    @property
    def new(self) -> set[bytes]:
        """Ids that were not known before."""
        return set() if self.noted is None else self.noted.new


class Notes:
    """One group's part of the inbox table of one database."""

    def __init__(self, engine: sa.Engine, inbox: sa.Table, group: str) -> None:
        self.engine = engine
        self.group = check_name(group, field="group")
        self._bind_arguments: dict[str, Any] = {"clause": inbox}
        self._dialect: InboxDialect = inbox_dialect(engine, inbox)
        follow_file(engine)

    def begin(self, session: Session, message_ids: Sequence[bytes]) -> Begun:
        """Insert these ids in a new transaction of the session."""
        connection = session.connection(bind_arguments=self._bind_arguments)
        transaction = session.get_transaction()
        self._dialect.begin(connection)
        ids = message_ids if len(message_ids) == 1 else sorted(set(message_ids))
        noted = self._dialect.insert(connection, self.group, ids) if ids else None
        return Begun(connection, transaction, noted)

    def commit(self, session: Session, begun: Begun, forgotten: Collection[bytes]) -> None:
        """Delete the `forgotten` ids, and commit.

        Raises `InboxTransactionError` unless the transaction is still open.
        """
        if begun.transaction is None or session.get_transaction() is not begun.transaction:
            raise InboxTransactionError
        while (left_open := session.get_nested_transaction()) is not None:
            left_open.commit()  # as the COMMIT would; on MySQL the inbox's savepoint is around it
        if begun.noted is not None:
            self._dialect.confirm(begun.connection, self.group, begun.noted)
            self._dialect.forget(begun.connection, self.group, forgotten)
        self._commit(session, begun.connection)

    def probe(self, session: Session) -> None:
        """Insert an id that no message has; the caller rolls back."""
        self.begin(session, [os.urandom(MESSAGE_ID_BYTES)])

    def purge(self, session: Session, older_than_ms: int, limit: int) -> int:
        """Delete up to `limit` ids and commit; returns how many."""
        connection = session.connection(
            bind_arguments=self._bind_arguments, execution_options=self._dialect.purge_options
        )
        self._dialect.begin(connection)
        count = self._dialect.purge(
            connection, self.group, older_than_ms=older_than_ms, limit=limit
        )
        self._commit(session, connection)
        return count

    def check(self, session: Session) -> None:
        """Raise when no transaction can write, or the table is missing, not this user's, or unfit."""
        connection = self.begin(session, ()).connection
        inbox = self._dialect.table
        database = self.engine.url.render_as_string(hide_password=True)
        denied = Rights(connection).lacking_on(inbox, CONSUMER.inbox)
        if texts := lacking_texts(connection, CONSUMER, denied):
            raise OutboxMissingError(f"{'; '.join(texts)}, in {database}")
        wanted = {column.name for column in inbox.columns}
        try:
            columns = sa.inspect(connection).get_columns(inbox.name, schema=inbox.schema)
        except sa.exc.NoSuchTableError:
            columns = []
        found = {column["name"] for column in columns}
        if missing := sorted(wanted - found):
            lacks = f"has no {', '.join(missing)}" if found else "is missing"
            create = (
                "await create_tables_async" if self.engine.dialect.is_async else "create_tables"
            )
            raise OutboxMissingError(
                f"table {inbox.fullname} {lacks} in {database}. "
                f"Run `qmq db migrate --database {database}` or `{create}(engine)`."
            )
        if faults := dialect_of(self.engine).faults(connection, [inbox]):
            raise OutboxMissingError(f"{'; '.join(faults)}, in {database}")

    def _commit(self, session: Session, connection: sa.Connection) -> None:
        try:
            session.commit()
        except sa.exc.DBAPIError:
            self._dialect.undo_failed_commit(connection)
            raise


def purge_bounds(older_than: timedelta, rows_max: int | None) -> int:
    """The age in milliseconds; raises `ConfigurationError` for invalid values."""
    older_than_ms = round(older_than.total_seconds() * 1000)
    if older_than_ms < 0 or (rows_max is not None and rows_max < 1):
        raise ConfigurationError(
            setting="purge",
            value=f"older_than={older_than}, rows_max={rows_max}",
            remedy="Give a time in the past and at least one row.",
        )
    return older_than_ms


def purge_limit(purged: int, rows_max: int | None) -> int:
    """How many rows the next transaction may delete; 0 at the end."""
    if rows_max is None:
        return PURGED_ROWS_PER_TRANSACTION
    return min(PURGED_ROWS_PER_TRANSACTION, rows_max - purged)


_Session = TypeVar("_Session", Session, "AsyncSession")


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxWork(Generic[_Session]):
    """One open transaction of an inbox."""

    session: _Session
    #: Ids that were not handled before; only these may have effects now.
    new: set[bytes]
    #: Ids that the block adds are deleted from the inbox: their messages will be handled later.
    forgotten: set[bytes] = field(default_factory=set)


class Inbox:
    """The inbox of one consumer group in one database. Safe for any number of threads."""

    is_async: Final[Literal[False]] = False

    def __init__(
        self,
        session_factory: SessionFactory | sa.Engine,
        *,
        group: str,
        tables: Tables | None = None,
    ) -> None:
        table = (tables or DEFAULT_TABLES).inbox
        #: Equal for inboxes in the same table whose sessions come from the same object.
        self.place = (id(session_factory), table.fullname)
        if isinstance(session_factory, sa.Engine):
            session_factory = sessionmaker(session_factory)
        self._session_factory = session_factory
        with session_factory() as session:
            engine = session.get_bind(clause=table).engine
        self._notes = Notes(engine, table, group)
        self.group = self._notes.group
        # A database in memory has one connection for all threads.
        self._connection_lock: AbstractContextManager[object] = (
            threading.Lock() if isinstance(engine.pool, StaticPool) else nullcontext()
        )

    def check(self) -> None:
        """Raise when the inbox table is missing or the connection would commit by itself."""
        with self._connection_lock, self._session_factory() as session:
            self._notes.check(session)

    def probe(self) -> None:
        """Raise unless an id can be inserted now. Leaves none behind."""
        with self._connection_lock, self._session_factory() as session:
            self._notes.probe(session)
            session.rollback()

    @contextmanager
    def open(self, message_ids: Sequence[bytes]) -> Iterator[InboxWork[Session]]:
        """A transaction that has inserted these ids; committed at the end, rolled back on an error.

        Raises `InboxTransactionError` if the block ended the transaction itself.
        """
        with self._connection_lock, self._session_factory() as session:
            begun = self._notes.begin(session, message_ids)
            work = InboxWork(session=session, new=begun.new)
            yield work
            self._notes.commit(session, begun, work.forgotten)

    def purge(self, older_than: timedelta, *, rows_max: int | None = None) -> int:
        """Forget ids older than `older_than`, in small transactions; returns how many.

        When the message of a forgotten id is delivered again, its effect happens again.
        """
        older_than_ms = purge_bounds(older_than, rows_max)
        purged = 0
        while limit := purge_limit(purged, rows_max):
            with self._connection_lock, self._session_factory() as session:
                count = self._notes.purge(session, older_than_ms, limit)
            purged += count
            if count < limit:
                break
        return purged
