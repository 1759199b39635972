"""`Producer`: send messages that exist if and only if the caller's transaction commits.

`send` encodes and checks the message and writes it as a row through the caller's own session or
connection. So the message shares the outcome of the business rows. After the end of the transaction
a background thread checks whether the row is committed, and sends it to the broker; the row stays
until the broker has accepted the message, and a watchdog sends rows that a dead process left
behind.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, Self
from weakref import WeakSet, finalize

import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client.clock import SYSTEM_CLOCK, Clock
from qmq_client.current import sync_of
from qmq_client.deadline import checked_deadline_s
from qmq_client.errors import ConfigurationError, NoTransactionError
from qmq_client.given import (
    AnyAsyncSession,
    AnyEngine,
    AnySession,
    checked,
    engine_and_factory,
    listed,
)
from qmq_client.ids import MESSAGE_IDS, new_token
from qmq_client.message import Message, encode_message
from qmq_client.options import ProducerOptions
from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.outbox.database.dialect import dialect_of
from qmq_client.outbox.row import OutboxRow
from qmq_client.outbox.sending.cancel import delete_unsent
from qmq_client.outbox.sending.insert import Inserts, unencodable_key
from qmq_client.outbox.sending.notes import Hint, Note, is_committing, note, open_rows, watch
from qmq_client.outbox.sending.own_transaction import async_transaction, sync_transaction
from qmq_client.outbox.sending.scope import Scopes
from qmq_client.outbox.sending.unawaited import (
    Pending,
    PendingInSession,
    Sent,
    SentMany,
    discard_unawaited,
    has_unawaited,
    sent,
    sent_many,
)
from qmq_client.outbox.table import AS_NAMED, DEFAULT_TABLES, Tables
from qmq_client.publishing.publisher import Publisher
from qmq_client.publishing.receipts import Receipt
from qmq_client.publishing.stats import Flushed, PublisherStats
from qmq_client.publishing.thread import PublisherThread
from qmq_client.transport.address import BrokerAddress
from qmq_client.transport.port import Transport, cancel_at_broker, checked_transport
from qmq_client.wire.delayed import Cancellation
from qmq_client.wire.message_id import format_message_id, is_dedupe_id, parse_message_id

_producers: Final[WeakSet[Producer]] = WeakSet()
#: Connections of the parent in a child: closing them here would end its sessions.
_LEFT_TO_THE_PARENT: Final[list[sa.Pool]] = []


class Producer:
    """Sends messages through the outbox of one database to one broker.

    Create one for each engine in each process and keep it. It is safe to use from any number of
    threads, and a forked child may continue using it: the child gets its own publisher and
    connections. Each blocking call also has an awaitable form, and `async with` closes the
    producer. The thread of a garbage-collected producer sends its remaining messages, for a bounded
    time. The constructor opens nothing: a database that is unreachable is noticed by the first
    send.
    """

    _thread: PublisherThread
    _flushed: PublisherStats
    _at_collection: finalize[Any, Any] | None = None

    def __init__(
        self,
        engine: AnyEngine,
        broker: str | BrokerAddress | Transport,
        *,
        options: ProducerOptions | None = None,
        tables: Tables | None = None,
        session: AnySession | Callable[[], AnySession] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`engine`: an engine or a session maker, synchronous or not; `broker`: URL or transport.

        Pass `tables` if they have other names than those of `qmq_client.metadata`. `session`
        returns the session for a send without `session=`: a `scoped_session`, like `db.session` of
        Flask-SQLAlchemy, or a function. Raises `ConfigurationError`.
        """
        self.options = checked("Producer(options=…)", options, ProducerOptions, ProducerOptions())
        self.engine, self.session_factory = engine_and_factory(engine)
        self._broker = broker
        self._tables = checked("Producer(tables=…)", tables, Tables, DEFAULT_TABLES)
        self._clock = _checked_clock(clock)
        dialect = dialect_of(self.engine)
        self._store = OutboxStore(self.engine, self._tables)
        self._inserts = Inserts(
            self.engine,
            dialect,
            self._tables,
            takeover_ms=self.options.takeover_ms,
            is_ordered=self.options.order_by_key,
            is_strict=self.options.strict,
        )
        self._scopes = Scopes(
            self.engine,
            self._tables.outbox,
            _asking(session),
            is_strict=self.options.strict,
        )
        watch(self.engine)
        self._open()
        _producers.add(self)

    def send(self, message: Message, *, session: AnySession | None = None) -> Sent:
        """Send if the transaction commits: write the row now; returns the message's id, 32 hex digits.

        `session` is a `Session`, `scoped_session`, or a `Connection` in a transaction. With an
        `AsyncSession`, `async_scoped_session` or `AsyncConnection` write `await producer.send(…)`.
        It may be left out inside `@transactional`, `transaction` and inbox handlers, and with a
        producer that was created with `session=`. Raises `InvalidMessageError` or `OutboxError`
        before anything is written, and the database's own errors.
        """
        row = self._make_row(message, self._clock.now_ms())
        return sent(format_message_id(row.message_id), self._write(session, [row]))

    def send_many(
        self, messages: Sequence[Message], *, session: AnySession | None = None
    ) -> SentMany:
        """`send` for several messages in one statement: all of them or, if one is invalid, none."""
        now_ms = self._clock.now_ms()
        rows = [self._make_row(message, now_ms) for message in listed(messages)]
        ids = [format_message_id(row.message_id) for row in rows]
        return sent_many(ids, self._write(session, rows) if rows else None)

    def send_now(self, message: Message) -> str:
        """Send in a separate transaction: on return the message is stored and will be delivered."""
        return self.send_now_many((message,))[0]

    def send_now_many(self, messages: Sequence[Message]) -> list[str]:
        """`send_now` for several messages in one transaction: all or, if one is invalid, none."""
        if self.engine.dialect.is_async:
            raise ConfigurationError(
                setting="send_now",
                value="a producer with an asynchronous engine",
                remedy="Write `await producer.send_now_async(message)`.",
            )
        with sync_transaction(self.engine) as connection:
            return list(self.send_many(messages, session=connection))

    async def send_now_async(self, message: Message) -> str:
        """`send_now` without blocking the event loop."""
        return (await self.send_now_many_async((message,)))[0]

    async def send_now_many_async(self, messages: Sequence[Message]) -> list[str]:
        """`send_now_many` without blocking the event loop.

        Uses a connection of an asynchronous engine, and a thread for any other engine.
        """
        if not self.engine.dialect.is_async:
            return await asyncio.to_thread(self.send_now_many, messages)
        async with async_transaction(self.engine) as connection:
            return await self.send_many(messages, session=connection)

    def cancel(self, message_id: str, *, session: AnySession | None = None) -> Cancellation:
        """Withdraw a message as part of the transaction; the result is true if that was possible.

        A message sent in this transaction can always be withdrawn. One from an earlier transaction
        can be only while no process may be sending it: after a failed attempt, while it is parked, or
        when the process that sent it has died. `UNKNOWN` if it was sent, is being sent, or never was.
        Like any other change, the withdrawal is undone by a rollback. This does not involve the
        broker, which may have the message from an attempt whose answer was lost; `cancel_now`
        withdraws it there too.

        Without an open transaction this is `cancel_now`.
        """
        wanted = parse_message_id(message_id)
        if session is None and not self._scopes.has_scope():
            return self.cancel_now(message_id)
        scope = self._scopes.find(session)
        if scope is not sync_of(scope):
            raise ConfigurationError(
                setting="cancel",
                value=f"session: {type(scope).__name__}",
                remedy="Write `await producer.cancel_async(message_id, session=session)`.",
            )
        return _cancellation(self._delete(scope, wanted))

    def cancel_now(self, message_id: str) -> Cancellation:
        """Withdraw a message from the outbox and, if it is delayed, from the broker.

        The result is true when the message will never be delivered; otherwise it says why not. It
        is also `UNKNOWN` while the message is between outbox and broker: call it again. Raises
        `TransportError`: then the message will not be sent any more if it was not being sent, but
        the broker may have it from an attempt whose answer was lost. Call it again then, too.
        """
        wanted = parse_message_id(message_id)
        with sync_transaction(self.engine) as connection:
            subject = self._withdraw(connection, wanted)
        outcome = cancel_at_broker(self._transport, message_id, withdrawn_from=subject)
        if outcome and subject is None:
            with sync_transaction(self.engine) as connection:
                self._delete(connection, wanted, is_at_broker=True)
        return outcome

    async def cancel_async(
        self, message_id: str, *, session: AnyAsyncSession | None = None
    ) -> Cancellation:
        """`cancel` for an `AsyncSession` or `AsyncConnection`; without a transaction, `cancel_now_async`."""
        if session is None and not self._scopes.has_scope():
            return await self.cancel_now_async(message_id)
        wanted, scope = parse_message_id(message_id), self._scopes.find(session)
        if scope is sync_of(scope):
            raise ConfigurationError(
                setting="cancel_async",
                value=f"session: {type(scope).__name__}",
                remedy="Write `producer.cancel(message_id, session=session)`.",
            )
        return _cancellation(await scope.run_sync(self._delete, wanted))

    async def cancel_now_async(self, message_id: str) -> Cancellation:
        """`cancel_now` without blocking the event loop."""
        if not self.engine.dialect.is_async:
            return await asyncio.to_thread(self.cancel_now, message_id)
        wanted = parse_message_id(message_id)
        async with async_transaction(self.engine) as connection:
            subject = await connection.run_sync(self._withdraw, wanted)
        outcome = await asyncio.to_thread(
            cancel_at_broker, self._transport, message_id, withdrawn_from=subject
        )
        if outcome and subject is None:
            async with async_transaction(self.engine) as connection:
                await connection.run_sync(self._delete, wanted, True)
        return outcome

    def receipt(self, message_id: str, *, session: AnySession | None = None) -> Receipt:
        """A receipt for a message sent in the open transaction; call it before the commit.

        After the commit, `receipt.wait(deadline_s)` or `await receipt` returns the outcome of the
        message. Without a publisher thread (`background=False`) that is not known before `flush`.
        In a forked child the receipts of the parent are never answered.
        """
        wanted, scope = parse_message_id(message_id), sync_of(self._scopes.find(session))
        if not self._was_sent_in(scope, wanted):
            raise NoTransactionError(
                f"message {message_id} was not sent in this transaction, or not by this producer; "
                "ask for its receipt between the send and the commit"
            )
        return self._publisher.receipts.open(wanted)

    def flush(self, deadline_s: float = 10.0) -> Flushed:
        """Wait until each committed message is accepted or left to the watchdog, or for the deadline.

        The result is true if all messages since the previous flush were accepted, and counts those
        that were not. Raises `ConfigurationError` in a callback of this producer, because it would wait for itself.
        """
        is_done = self._thread.flush(checked_deadline_s("deadline_s of flush", deadline_s))
        with self._flush_lock:
            after = self.stats
            before, self._flushed = self._flushed, after
        return Flushed.between(before, after, is_done=is_done)

    async def flush_async(self, deadline_s: float = 10.0) -> Flushed:
        """`flush` without blocking the event loop."""
        return await asyncio.to_thread(self.flush, deadline_s)

    def close(self, deadline_s: float = 10.0) -> None:
        """Send what can be sent before the deadline, then end the thread. Safe to call again.

        The remaining messages stay in the outbox for the watchdog, and so do messages sent after the close.
        """
        if not self._thread.close(checked_deadline_s("deadline_s of close", deadline_s)):
            self._transport.close()
            self._thread.join_aborted()
        _producers.discard(self)

    async def close_async(self, deadline_s: float = 10.0) -> None:
        """`close` without blocking the event loop."""
        await asyncio.to_thread(self.close, deadline_s)

    @property
    def stats(self) -> PublisherStats:
        """Counts of the outcomes of this process's messages."""
        return self._publisher.stats

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        await self.close_async()

    def _after_fork(self) -> None:
        """Give a forked child its own publisher, which shares nothing with the parent. Called on fork."""
        self._store.after_fork()
        _LEFT_TO_THE_PARENT.append(self.engine.pool)
        if not _is_in_memory(self.engine):
            self.engine.dispose(close=False)
        self._open()

    def _open(self) -> None:
        self._transport = _open_transport(self._broker)
        self._publisher = Publisher(
            store=self._store,
            transport=self._transport,
            token=new_token(),
            options=self.options,
        )
        self._flush_lock = threading.RLock()  # a signal handler may flush, too
        self._flushed = PublisherStats()
        is_own = isinstance(self._broker, str | BrokerAddress)
        self._thread = PublisherThread(
            self._publisher,
            self._clock,
            is_background=self.options.background,
            # Without the producer itself, so that an unused one is collected.
            on_end=partial(_release, self._store, self._transport if is_own else None),
        )
        if self._at_collection is not None:
            self._at_collection.detach()
        self._at_collection = finalize(self, self._thread.end_soon)
        self._at_collection.atexit = False

    def _write(self, given: AnySession | None, rows: list[OutboxRow]) -> Pending | None:
        """Write the rows now, or return an awaitable that writes them."""
        scope = self._scopes.find(given)
        if isinstance(scope, Session | sa.Connection):
            try:
                self._write_now(scope, rows)
            except (sa.exc.MissingGreenlet, sa.exc.StatementError) as error:
                if not isinstance(getattr(error, "orig", error), sa.exc.MissingGreenlet):
                    raise
                raise NoTransactionError(
                    "a plain session of an asynchronous engine executes nothing outside of its events: pass "
                    "`session=` the AsyncSession itself, and `await` the send"
                ) from error
            return None
        return self._write_when_awaited(scope, rows)

    def _write_now(self, scope: Session | sa.Connection, rows: Sequence[OutboxRow]) -> None:
        connection, is_kept = self._scopes.connection(scope)
        written_at_s, token = self._clock.monotonic_s(), self._publisher.token
        try:
            self._inserts.write(connection, rows, token, fill_locks=self._store.prepare_ordering)
        except UnicodeEncodeError as error:
            raise unencodable_key(rows) from error
        self._note(scope, connection, rows, written_at_s, is_kept=is_kept)

    def _write_when_awaited(
        self,
        scope: Any,  # an AsyncSession or AsyncConnection
        rows: list[OutboxRow],
    ) -> Pending | None:
        sync = sync_of(scope)
        if not isinstance(sync, Session):
            return Pending(rows, lambda: scope.run_sync(self._write_now, rows))
        self._scopes.bind_of(sync)  # raises for another database
        if is_committing(sync):  # so this is one of its events, in which nothing has to be awaited
            self._write_now(sync, rows)
            return None
        drop = self._publisher.on_rolled_back
        return PendingInSession(scope, sync, rows, write_now=self._write_now, drop=drop)

    def _note(
        self,
        scope: Session | sa.Connection,
        connection: sa.Connection,
        rows: Sequence[OutboxRow],
        written_at_s: float,
        *,
        is_kept: bool,
    ) -> None:
        hint = Hint(rows=rows, token=self._publisher.token, written_at_s=written_at_s)
        made = Note(hint=hint, put=self._put, drop=self._publisher.on_rolled_back)
        note(scope, connection, made, is_kept=is_kept)

    def _put(self, hint: Hint) -> None:
        self._publisher.queue.put(hint)
        if hint.is_early:
            self._thread.start_soon()
        else:
            self._thread.ensure_running()

    def _was_sent_in(self, scope: Session | sa.Connection, message_id: bytes) -> bool:
        token = self._publisher.token
        if any((row.message_id, owner) == (message_id, token) for row, owner in open_rows(scope)):
            return True
        return isinstance(scope, Session) and has_unawaited(scope, message_id)

    def _withdraw(self, connection: sa.Connection, message_id: bytes) -> str | None:
        """Delete an unsent row; its subject, or None if there was no such row."""
        columns = self._inserts.tables.outbox.c
        subject: str | None = connection.scalar(
            sa.select(columns.subject).where(columns.message_id == message_id),
            execution_options=AS_NAMED,
        )
        return subject if self._delete(connection, message_id) else None

    def _delete(
        self, scope: Session | sa.Connection, message_id: bytes, is_at_broker: bool = False
    ) -> bool:
        """Delete an unsent row in the scope's transaction; returns whether there was one."""
        if isinstance(scope, Session) and discard_unawaited(scope, message_id):
            return True
        connection, _ = self._scopes.connection(scope)
        own = self._publisher.token if self._was_sent_in(scope, message_id) else None
        return delete_unsent(
            connection, self._inserts.tables.outbox, message_id, own=own, is_at_broker=is_at_broker
        )

    def _make_row(self, message: Message, now_ms: int) -> OutboxRow:
        limits, new_id = self.options.limits, MESSAGE_IDS.next_id()
        message_id, record = encode_message(message, new_id, now_ms, limits)
        return OutboxRow(
            message_id=message_id,
            subject=message.subject,
            ordering_key=message.key if self.options.order_by_key else None,
            record=record,
            is_repeatable=message_id is not new_id and is_dedupe_id(message_id),
        )


def _release(store: OutboxStore, transport: Transport | None) -> None:
    if transport is not None:
        transport.close()
    store.close()


def _asking(session: Any) -> Callable[[], Any] | None:
    """A function that returns the session, from the producer's `session=`."""
    if session is None:
        return None
    if callable(session):  # a scoped session is its own registry's function
        found: Callable[[], Any] = session
        return found
    raise ConfigurationError(
        setting="Producer(session=…)",
        value=type(session).__name__,
        remedy="Give a scoped_session, or a function that returns the session of the running code.",
    )


def _checked_clock(clock: Clock | None) -> Clock:
    if clock is None:
        return SYSTEM_CLOCK
    if all(callable(getattr(clock, name, None)) for name in ("now_ms", "monotonic_s", "sleep")):
        return clock
    raise ConfigurationError(
        setting="Producer(clock=…)",
        value=type(clock).__name__,
        remedy="Leave it out, or give a FakeClock of qmq_client.testing.",
    )


def _cancellation(was_there: bool) -> Cancellation:
    return Cancellation.CANCELLED if was_there else Cancellation.UNKNOWN


def _is_in_memory(engine: sa.Engine) -> bool:
    return isinstance(engine.pool, sa.StaticPool)


def _open_transport(broker: str | BrokerAddress | Transport) -> Transport:
    if not isinstance(broker, str | BrokerAddress):
        return checked_transport(broker)
    from qmq_client.transport.http import (
        HttpTransport,
    )  # imported late, because it imports the HTTP library

    return HttpTransport(broker)


def _after_fork_in_child() -> None:
    for producer in list(_producers):
        producer._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
