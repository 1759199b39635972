"""The inbox for asynchronous sessions: it keeps the promises of `Inbox` and never blocks the loop.

An engine's connections belong to the loop that opened them. A consumer runs its handlers on a loop
of its own, so give its inbox an engine of its own; `close` closes the connections on that loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

from sqlalchemy.pool import StaticPool

from qmq_client.inbox.inbox import Begun, InboxWork, Notes, purge_bounds, purge_limit
from qmq_client.outbox.table import DEFAULT_TABLES, Tables

if TYPE_CHECKING:  # needs greenlet, which applications without asynchronous engines may lack
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession


class AsyncInbox:
    """`Inbox` for an asynchronous engine or session maker; all tasks of one loop may share it."""

    is_async: Final[Literal[True]] = True

    def __init__(
        self,
        session_factory: Callable[[], AsyncSession] | AsyncEngine,
        *,
        group: str,
        tables: Tables | None = None,
    ) -> None:
        from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

        table = (tables or DEFAULT_TABLES).inbox
        #: Equal for inboxes in the same table whose sessions come from the same object.
        self.place = (id(session_factory), table.fullname)
        if isinstance(session_factory, AsyncEngine):
            session_factory = async_sessionmaker(session_factory)
        self._session_factory = session_factory
        session = session_factory()  # no connection was opened, so there is nothing to close
        engine = session.sync_session.get_bind(clause=table).engine
        self._notes = Notes(engine, table, group)
        self.group = self._notes.group
        # An in-memory database has one connection for all tasks.
        self._connection_lock: AbstractAsyncContextManager[Any] = (
            asyncio.Lock() if isinstance(engine.pool, StaticPool) else nullcontext()
        )

    async def check(self) -> None:
        """Raise if the inbox table is missing or unfit, or the connection is in autocommit mode."""
        async with self._connection_lock, self._session_factory() as session:
            await session.run_sync(self._notes.check)

    async def probe(self) -> None:
        """Raise unless an id can be written now. The written id is rolled back."""
        async with self._connection_lock, self._session_factory() as session:
            await session.run_sync(self._notes.probe)
            await session.rollback()

    @asynccontextmanager
    async def open(self, message_ids: Sequence[bytes]) -> AsyncIterator[InboxWork[AsyncSession]]:
        """Run the block in a transaction that has stored these ids.

        Commits at the end of the block, rolls back on an error. Raises `InboxTransactionError` if
        the block itself ended the transaction.
        """
        async with self._connection_lock, self._session_factory() as session:
            begun: Begun = await session.run_sync(self._notes.begin, message_ids)
            work = InboxWork(session=session, new=begun.new)
            yield work
            await session.run_sync(self._notes.commit, begun, work.forgotten)

    async def purge(self, older_than: timedelta, *, rows_max: int | None = None) -> int:
        """See `Inbox.purge`."""
        older_than_ms = purge_bounds(older_than, rows_max)
        purged = 0
        while limit := purge_limit(purged, rows_max):
            async with self._connection_lock, self._session_factory() as session:
                count = await session.run_sync(self._notes.purge, older_than_ms, limit)
            purged += count
            if count < limit:
                break
        return purged

    async def close(self) -> None:
        """Close the pooled connections; the engine opens new ones when it is used again.

        An in-memory database keeps its one connection, because it would be lost with it.
        """
        from sqlalchemy.ext.asyncio import AsyncEngine

        engine = self._notes.engine
        if not isinstance(engine.pool, StaticPool):
            await AsyncEngine(engine).dispose()
