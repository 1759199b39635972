"""`Producer`: send messages that exist if and only if the caller's transaction commits.

`send` encodes and checks the message, notes it in the transaction and returns its id; the row is
written by one INSERT before the COMMIT, through the caller's own connection. After the commit a
background thread hands it to the broker. Whatever happens in between, the row stays until the broker
has accepted the message, and a watchdog sends what a dead process left behind.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self
from weakref import WeakSet

import sqlalchemy as sa
from sqlalchemy.util import greenlet_spawn

from qmq_client.clock import SYSTEM_CLOCK, Clock
from qmq_client.current import sync_of
from qmq_client.errors import ConfigurationError, NoTransactionError
from qmq_client.given import (
    AnyAsyncSession,
    AnyEngine,
    AnySession,
    engine_and_factory,
    session_of,
)
from qmq_client.ids import MESSAGE_IDS, new_token
from qmq_client.message import Message, message_to_record
from qmq_client.options import ProducerOptions
from qmq_client.outbox.checking.rights import PRODUCER, PRODUCER_IN_ORDER
from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.outbox.database.dialect import dialect_of
from qmq_client.outbox.database.driver import root_engine
from qmq_client.outbox.database.to_write import (
    TO_WRITE,
    connected_to_write,
    connected_to_write_async,
)
from qmq_client.outbox.row import OutboxRow
from qmq_client.outbox.table import AS_NAMED, DEFAULT_TABLES, Tables
from qmq_client.outbox.transaction.insert import InsertTexts
from qmq_client.outbox.transaction.joining import has_transaction, join, join_to_cancel, noted
from qmq_client.outbox.transaction.outlet import Outlet
from qmq_client.outbox.transaction.tracker import watch
from qmq_client.publishing.publisher import Publisher
from qmq_client.publishing.receipts import Receipt
from qmq_client.publishing.stats import Flushed, PublisherStats
from qmq_client.publishing.thread import PublisherThread
from qmq_client.transport.address import BrokerAddress
from qmq_client.transport.cancelling import cancel_at_broker
from qmq_client.transport.port import Transport, checked_transport
from qmq_client.wire.delayed import Cancellation
from qmq_client.wire.message_id import format_message_id, is_dedupe_id, parse_message_id
from qmq_client.wire.record import encode_record

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

_producers: Final[WeakSet[Producer]] = WeakSet()


class Producer:
    """Sends messages through the outbox of one database to one broker.

    Create one for each engine in each process and keep it. It is safe to use from any number of
    threads, and a forked child may go on using it: the child gets a publisher and connections of its
    own. Asynchronous code calls the same plain `send`, which only notes the message. Whatever has to
    wait also exists in a form to be awaited, and `async with` closes the producer. The constructor
    checks the database's tables, and blocks while it does.
    """

    _thread: PublisherThread
    _flushed: PublisherStats

    def __init__(
        self,
        engine: AnyEngine,
        broker: str | BrokerAddress | Transport,
        *,
        options: ProducerOptions | None = None,
        tables: Tables | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`engine`: an engine or a session maker, synchronous or not; `broker`: URL or transport.

        Give `tables` when they have other names than those of `qmq_client.metadata`. Raises
        `ConfigurationError`, and `OutboxMissingError` when the tables do not exist.
        """
        self.options = ProducerOptions() if options is None else options
        self.engine, self.session_factory = engine_and_factory(engine)
        self._broker = broker
        self._tables = tables or DEFAULT_TABLES
        self._clock = clock or SYSTEM_CLOCK
        self._dialect = dialect_of(self.engine)
        self._store = OutboxStore(self.engine, self._tables)
        try:
            self._prepare()
        except BaseException:
            self._store.close()  # it has connected by then
            raise
        _producers.add(self)

    def _prepare(self) -> None:
        outbox, is_ordered = self._tables.outbox, self.options.order_by_key
        needed = [outbox, self._tables.order_lock] if is_ordered else [outbox]
        self._store.check_schema(needed, role=PRODUCER_IN_ORDER if is_ordered else PRODUCER)
        if is_ordered:
            self._store.prepare_ordering()
        if self.options.sqlite_begin == "IMMEDIATE":
            self.engine.update_execution_options(**TO_WRITE)
        root = root_engine(self.engine)
        self._dialect.prepare_application(root)
        watch(root)
        now_ms, takeover_ms = self._dialect.now_ms, self.options.takeover_ms
        self._texts = InsertTexts(self.engine, outbox, now_ms=now_ms, takeover_ms=takeover_ms)
        self._open()

    def send(self, message: Message, *, session: AnySession | None = None) -> str:
        """Send when the transaction commits; returns the message's id, 32 hex digits.

        `session` is a `Session`, `scoped_session`, `AsyncSession`, or a `Connection` in a transaction.
        It may be left out inside `@transactional` and `transaction`, and when exactly one session of
        this producer's engine has a transaction open in this thread. Raises `InvalidMessageError` or
        `OutboxError` before anything is written.
        """
        row = self._make_row(message, self._clock.now_ms())
        join(session, self.engine, self._outlet, [row])
        if not self._thread.is_running:
            self._thread.ensure_running()
        return format_message_id(row.message_id)

    def send_many(
        self, messages: Sequence[Message], *, session: AnySession | None = None
    ) -> list[str]:
        """`send` for several messages: all of them or, if one is invalid, none."""
        now_ms = self._clock.now_ms()
        rows = [self._make_row(message, now_ms) for message in messages]
        if not rows:
            return []
        join(session, self.engine, self._outlet, rows)
        self._thread.ensure_running()
        return [format_message_id(row.message_id) for row in rows]

    def send_now(self, message: Message) -> str:
        """Send in a transaction of its own: on return the message is stored and will be delivered."""
        return self.send_now_many((message,))[0]

    def send_now_many(self, messages: Sequence[Message]) -> list[str]:
        """`send_now` for several messages in one transaction: all or, if one is invalid, none."""
        if self.engine.dialect.is_async:
            raise ConfigurationError(
                setting="send_now",
                value="a producer with an asynchronous engine",
                remedy="Write `await producer.send_now_async(message)`.",
            )
        with connected_to_write(self.engine) as connection:
            return self._send_alone(connection, messages)

    async def send_now_async(self, message: Message) -> str:
        """`send_now` without blocking the event loop."""
        return (await self.send_now_many_async((message,)))[0]

    async def send_now_many_async(self, messages: Sequence[Message]) -> list[str]:
        """`send_now_many` without blocking the event loop.

        Uses a connection of an asynchronous engine, and a thread for any other engine.
        """
        if not self.engine.dialect.is_async:
            return await asyncio.to_thread(self.send_now_many, messages)
        async with self._own_async_connection() as connection:
            return await connection.run_sync(self._send_alone, messages)

    def cancel(self, message_id: str, *, session: AnySession | None = None) -> Cancellation:
        """Withdraw a message as part of the transaction; the result is true if that was possible.

        A message sent in this transaction can always be withdrawn. One from an earlier transaction
        can be only while no process may be sending it: after a failed attempt, while it is parked, or
        when the process that sent it has died. `UNKNOWN` if it was sent, is being sent, or never was.
        Like any other change, the withdrawal is undone by a rollback. The broker is not asked: it may
        have the message from an attempt whose answer was lost; `cancel_now` withdraws it there too.

        Without an open transaction this is `cancel_now`.
        """
        wanted = parse_message_id(message_id)
        if session is None and not has_transaction(self.engine, self._outlet):
            return self.cancel_now(message_id)
        was_there = join_to_cancel(session, self.engine, self._outlet, wanted)
        return Cancellation.CANCELLED if was_there else Cancellation.UNKNOWN

    def cancel_now(self, message_id: str) -> Cancellation:
        """Withdraw a message from the outbox and, if it is delayed, from the broker.

        The result is true when the message will never be delivered; otherwise it says why not. It is
        also `UNKNOWN` while the message is on its way from one to the other: ask again. Raises
        `TransportError`: then it will not be sent any more if nobody was sending it, but the broker may
        have it from an attempt whose answer was lost. Ask again then, too.
        """
        with connected_to_write(self.engine) as connection:
            subject = self._cancel_alone(connection, message_id)
        outcome = cancel_at_broker(self._transport, message_id, withdrawn_from=subject)
        if outcome and subject is None:
            with connected_to_write(self.engine) as connection:
                self._cancel_alone(connection, message_id, is_at_broker=True)
        return outcome

    async def cancel_async(
        self, message_id: str, *, session: AnyAsyncSession | None = None
    ) -> Cancellation:
        """`cancel` for an `AsyncSession` or `AsyncConnection`; without a transaction, `cancel_now_async`."""
        if session is None and not has_transaction(self.engine, self._outlet):
            return await self.cancel_now_async(message_id)
        joined = None if session is None else sync_of(session_of(session))
        # As their `run_sync` does; of a session that `cancel` finds, only the synchronous one is known.
        outcome: Cancellation = await greenlet_spawn(self.cancel, message_id, session=joined)
        return outcome

    async def cancel_now_async(self, message_id: str) -> Cancellation:
        """`cancel_now` without blocking the event loop."""
        if not self.engine.dialect.is_async:
            return await asyncio.to_thread(self.cancel_now, message_id)
        subject = await self._cancel_alone_async(message_id)
        outcome = await asyncio.to_thread(
            cancel_at_broker, self._transport, message_id, withdrawn_from=subject
        )
        if outcome and subject is None:
            await self._cancel_alone_async(message_id, is_at_broker=True)
        return outcome

    def receipt(self, message_id: str, *, session: AnySession | None = None) -> Receipt:
        """A receipt for a message sent in the open transaction; ask for it before the commit.

        After the commit, `receipt.wait(deadline_s)` or `await receipt` tells what became of the
        message. Without a publisher thread (`background=False`) that is not known before `flush`. In a
        forked child the receipts of the parent are never answered.
        """
        found = noted(session, self.engine, self._outlet, parse_message_id(message_id))
        if found is None:
            raise NoTransactionError(
                f"message {message_id} was not sent in this transaction, or not by this producer; "
                "ask for its receipt between the send and the commit"
            )
        return self._publisher.receipts.open(*found)

    def flush(self, deadline_s: float = 10.0) -> Flushed:
        """Wait until each committed message is accepted or left to the watchdog, or for the deadline.

        The result is true if all messages since the previous flush were accepted, and counts those
        that were not.
        """
        is_done = self._thread.flush(deadline_s)
        with self._flush_lock:
            after = self.stats
            before, self._flushed = self._flushed, after
        return Flushed.between(before, after, is_done=is_done)

    async def flush_async(self, deadline_s: float = 10.0) -> Flushed:
        """`flush` without blocking the event loop."""
        return await asyncio.to_thread(self.flush, deadline_s)

    def close(self, deadline_s: float = 10.0) -> None:
        """Send what can be sent before the deadline, then end the thread. Safe to call again.

        Whatever is left stays in the outbox for the watchdog, and so do messages sent after the close.
        """
        if not self._thread.close(deadline_s):
            self._transport.close()
            self._thread.join_aborted()
        _producers.discard(self)

    async def close_async(self, deadline_s: float = 10.0) -> None:
        """`close` without blocking the event loop."""
        await asyncio.to_thread(self.close, deadline_s)

    @property
    def stats(self) -> PublisherStats:
        """What has become of this process's messages so far."""
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
        """Give a forked child a publisher of its own, sharing nothing with the parent. Called on fork."""
        self._publisher.receipts.abandon()
        self._store.after_fork()
        self._dialect.after_fork(root_engine(self.engine))
        self._open()

    def _open(self) -> None:
        self._transport = _open_transport(self._broker)
        self._publisher = Publisher(
            store=self._store,
            transport=self._transport,
            token=new_token(),
            options=self.options,
        )
        #: Reentrant for a signal handler that flushes, too.
        self._flush_lock = threading.RLock()
        self._flushed = PublisherStats()
        self._thread = PublisherThread(
            self._publisher,
            self._clock,
            is_background=self.options.background,
            on_end=self._release,
        )
        self._outlet = Outlet(
            outbox=self._tables.outbox,
            order_lock=self._tables.order_lock,
            dialect=self._dialect,
            buffer_bytes=self.options.buffer_bytes,
            record_bytes_max=self._store.record_bytes_max,
            is_strict=self.options.strict,
            token=self._publisher.token,
            insert_texts=self._texts,
            monotonic_s=self._clock.monotonic_s,
            hand_over=self._publisher.queue.put,
        )

    def _release(self) -> None:
        if isinstance(self._broker, str | BrokerAddress):
            self._transport.close()
        self._store.close()

    def _send_alone(self, connection: sa.Connection, messages: Sequence[Message]) -> list[str]:
        with connection.begin():
            return self.send_many(messages, session=connection)

    def _own_async_connection(self) -> AbstractAsyncContextManager[AsyncConnection]:
        from sqlalchemy.ext.asyncio import AsyncEngine

        return connected_to_write_async(AsyncEngine(self.engine))

    def _cancel_alone(
        self, connection: sa.Connection, message_id: str, is_at_broker: bool = False
    ) -> str | None:
        wanted, columns = parse_message_id(message_id), self._outlet.outbox.c
        its_subject = sa.select(columns.subject).where(columns.message_id == wanted)
        with connection.begin():
            subject = connection.scalar(its_subject, execution_options=AS_NAMED)
            was_there = join_to_cancel(
                connection, self.engine, self._outlet, wanted, is_at_broker=is_at_broker
            )
            return subject if was_there else None

    async def _cancel_alone_async(self, message_id: str, is_at_broker: bool = False) -> str | None:
        async with self._own_async_connection() as connection:
            return await connection.run_sync(self._cancel_alone, message_id, is_at_broker)

    def _make_row(self, message: Message, now_ms: int) -> OutboxRow:
        limits, new_id = self.options.limits, MESSAGE_IDS.next_id()
        record = message_to_record(message, new_id=new_id, now_ms=now_ms, limits=limits)
        message_id = record.message_id
        return OutboxRow(
            message_id=message_id,
            subject=record.subject,
            ordering_key=record.key if self.options.order_by_key else None,
            record=encode_record(record, limits),
            is_repeatable=message_id is not new_id and is_dedupe_id(message_id),
        )


def _open_transport(broker: str | BrokerAddress | Transport) -> Transport:
    if not isinstance(broker, str | BrokerAddress):
        return checked_transport(broker)
    from qmq_client.transport.http import HttpTransport  # late: brings the HTTP library with it

    return HttpTransport(broker)


def _after_fork_in_child() -> None:
    for producer in list(_producers):
        producer._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
