"""The inbox: a message's id, the change it causes and what it sends are one transaction.

The id is noted first. If it was there before, the effect has already happened, and the message is
skipped. If the transaction rolls back, the id goes with it, and the next delivery tries again. So
within the retention the effect happens once for each id, even if messages are delivered twice or
processes die at any moment. What a handler does outside this database is not covered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Generic, Literal, TypeVar

import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import StaticPool

from qmq_client.inbox.notes import Notes, purge_bounds, purge_limit
from qmq_client.outbox.table import DEFAULT_TABLES, Tables

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

    SessionFactory = Callable[[], Session]


_Session = TypeVar("_Session", Session, "AsyncSession")


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxWork(Generic[_Session]):
    """One open transaction of an inbox."""

    session: _Session
    #: Ids that were not handled before; only these may have effects now.
    new: set[bytes]
    #: Ids that the block adds are not noted after all: their messages will be handled another time.
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
        self._turn: AbstractContextManager[object] = (
            threading.Lock() if isinstance(engine.pool, StaticPool) else nullcontext()
        )

    def check(self) -> None:
        """Raise when the inbox table is missing or the connection would commit by itself."""
        with self._turn, self._session_factory() as session:
            self._notes.check(session)

    def probe(self) -> None:
        """Raise unless an id can be noted now. Leaves none behind."""
        with self._turn, self._session_factory() as session:
            self._notes.probe(session)
            session.rollback()

    @contextmanager
    def open(self, message_ids: Sequence[bytes]) -> Iterator[InboxWork[Session]]:
        """A transaction that has noted these ids; committed at the end, rolled back on an error.

        Raises `InboxTransactionError` when the block ended the transaction by itself.
        """
        with self._turn, self._session_factory() as session:
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
            with self._turn, self._session_factory() as session:
                count = self._notes.purge(session, older_than_ms, limit)
            purged += count
            if count < limit:
                break
        return purged
