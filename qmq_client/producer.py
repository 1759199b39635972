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
from types import TracebackType
from typing import Any, Final, Self
from weakref import WeakSet

import sqlalchemy as sa

from qmq_client.clock import SYSTEM_CLOCK, Clock
from qmq_client.current import current_session
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
from qmq_client.outbox.database.dialect import (
    BEGIN_OPTION,
    BEGIN_TO_WRITE,
    OutboxDialect,
    dialect_of,
)
from qmq_client.outbox.database.driver import root_engine
from qmq_client.outbox.relay.store import OutboxStore
from qmq_client.outbox.row import OutboxRow
from qmq_client.outbox.table import DEFAULT_TABLES, Tables
from qmq_client.outbox.transaction.insert import InsertTexts
from qmq_client.outbox.transaction.joining import has_transaction, join, join_to_cancel, noted
from qmq_client.outbox.transaction.tracker import watch
from qmq_client.publishing.publisher import Publisher
from qmq_client.publishing.receipts import Receipt
from qmq_client.publishing.stats import Flushed, PublisherStats
from qmq_client.publishing.thread import PublisherThread
from qmq_client.transport.address import BrokerAddress
from qmq_client.transport.cancelling import cancel_at_broker
from qmq_client.transport.port import Transport, checked_transport
from qmq_client.wire.delayed import Cancellation
from qmq_client.wire.message_id import format_message_id, parse_message_id
from qmq_client.wire.record import encode_record

_producers: Final[WeakSet[Producer]] = WeakSet()


class Producer:
    """Sends messages through the outbox of one database to one broker.

    Make one for each engine and process and keep it. Safe for any number of threads; a forked child
    may go on using it, with a publisher and connections of its own. In asynchronous code `send` is
    the same plain call, since it only notes the message; what waits for something has a form to be
    awaited, so that no event loop is blocked, and `async with` closes it. Making a producer looks at
    the database and blocks for that long.
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

        `tables` where they have other names than those of `qmq_client.metadata`. Raises `ConfigurationError`, and `OutboxMissingError` when the tables are not there.
        """
        self.options = ProducerOptions() if options is None else options
        self.engine, self.session_factory = engine_and_factory(engine)
        self._broker = broker
        self._tables = tables or DEFAULT_TABLES
        self._clock = clock or SYSTEM_CLOCK
        self._dialect = dialect_of(self.engine)
        self._store = OutboxStore(self.engine, self._tables)
        needed = [self._tables.outbox]
        if self.options.order_by_key:
            needed.append(self._tables.order_lock)
        self._store.check_schema(needed)
        if self.options.order_by_key:
            self._store.prepare_ordering()
        if self.options.sqlite_begin == "IMMEDIATE":
            self.engine.update_execution_options(**{BEGIN_OPTION: BEGIN_TO_WRITE})
        root = root_engine(self.engine)
        self._dialect.prepare_application(root)
        watch(root)
        self._texts = InsertTexts(
            self.engine,
            self._tables.outbox,
            now_ms=self._dialect.now_ms,
            takeover_ms=self.options.takeover_ms,
        )
        self._open()
        _producers.add(self)

    def send(self, message: Message, *, session: AnySession | None = None) -> str:
        """Send when the transaction commits; returns the message's id, 32 hex digits.

        `session`: a `Session`, `scoped_session`, `AsyncSession` or a `Connection` in a transaction.
        It may be left out inside `@transactional` and `transaction`, and where exactly one session
        of this producer's engine has a transaction open in this thread. Raises
        `InvalidMessageError` or `OutboxError` before anything was written.
        """
        return self.send_many((message,), session=session)[0]

    def send_many(
        self, messages: Sequence[Message], *, session: AnySession | None = None
    ) -> list[str]:
        """Send all of these or, when one of them is invalid, none."""
        now_ms = self._clock.now_ms()
        rows = [self._make_row(message, now_ms) for message in messages]
        if not rows:
            return []
        join(session, self.engine, self._outlet, rows)
        self._thread.ensure_running()
        return [format_message_id(row.message_id) for row in rows]

    def send_now(self, message: Message) -> str:
        """Send in a transaction of its own: on return the message is stored, and will arrive."""
        return self.send_now_many((message,))[0]

    def send_now_many(self, messages: Sequence[Message]) -> list[str]:
        """Send all of these in one transaction of their own or, when one is invalid, none."""
        if self.engine.dialect.is_async:
            raise ConfigurationError(
                setting="send_now",
                value="a producer with an asynchronous engine",
                remedy="Write `await producer.send_now_async(message)`.",
            )
        with self.engine.connect() as connection:
            connection.execution_options(**{BEGIN_OPTION: BEGIN_TO_WRITE})
            return self._send_alone(connection, messages)

    async def send_now_async(self, message: Message) -> str:
        """`send_now` that blocks no event loop."""
        return (await self.send_now_many_async((message,)))[0]

    async def send_now_many_async(self, messages: Sequence[Message]) -> list[str]:
        """`send_now_many` that blocks no event loop.

        On an asynchronous engine through a connection of it, elsewhere in a thread.
        """
        if not self.engine.dialect.is_async:
            return await asyncio.to_thread(self.send_now_many, messages)
        from sqlalchemy.ext.asyncio import AsyncEngine

        async with AsyncEngine(self.engine).connect() as connection:
            await connection.execution_options(**{BEGIN_OPTION: BEGIN_TO_WRITE})
            return await connection.run_sync(self._send_alone, messages)

    def cancel(self, message_id: str, *, session: AnySession | None = None) -> bool | Cancellation:
        """Take a message back, as part of the transaction; whether it was there to be taken.

        One that was sent in this transaction is; one of an earlier transaction only while nobody
        may be sending it: given back after a failure, parked, or left by a process that died. False
        when it is sent, being sent, or unknown. Like any change, undone by a rollback.

        Where no transaction is open it is `cancel_now`.
        """
        wanted = parse_message_id(message_id)
        if session is None and not has_transaction(self.engine):
            return self.cancel_now(message_id)
        return join_to_cancel(session, self.engine, self._outlet, wanted)

    def cancel_now(self, message_id: str) -> Cancellation:
        """Take a message back, from the outbox or, while it waits for its time, from the broker.

        True when it will never be delivered; else it says why not. `UNKNOWN` also while the message
        is on its way from one to the other: ask again. Raises `TransportError`.
        """
        with self.engine.connect() as connection:
            connection.execution_options(**{BEGIN_OPTION: BEGIN_TO_WRITE})
            if self._cancel_alone(connection, message_id):
                return Cancellation.CANCELLED
        return cancel_at_broker(self._transport, message_id)

    async def cancel_async(
        self, message_id: str, *, session: AnyAsyncSession | None = None
    ) -> bool | Cancellation:
        """`cancel` in the transaction of an `AsyncSession` or `AsyncConnection`, or as `cancel_now`."""
        if session is None and not has_transaction(self.engine):
            return await self._cancel_now_async(message_id)
        scope: Any = current_session() if session is None else session_of(session)
        cancelled: bool = await scope.run_sync(
            lambda joined: self.cancel(message_id, session=joined)
        )
        return cancelled

    async def _cancel_now_async(self, message_id: str) -> Cancellation:
        if not self.engine.dialect.is_async:
            return await asyncio.to_thread(self.cancel_now, message_id)
        from sqlalchemy.ext.asyncio import AsyncEngine

        async with AsyncEngine(self.engine).connect() as connection:
            await connection.execution_options(**{BEGIN_OPTION: BEGIN_TO_WRITE})
            if await connection.run_sync(self._cancel_alone, message_id):
                return Cancellation.CANCELLED
        return await asyncio.to_thread(cancel_at_broker, self._transport, message_id)

    def receipt(self, message_id: str, *, session: AnySession | None = None) -> Receipt:
        """A receipt for a message sent in the transaction that is open; asked for before its end.

        `receipt.wait(deadline_s)` or `await receipt`, after the commit, tells what became of it.
        Without a thread (`background=False`) nothing does until `flush`. In a forked child the
        receipts of its parent stay open.
        """
        row = noted(session, self.engine, self._outlet, parse_message_id(message_id))
        if row is None:
            raise NoTransactionError(
                f"message {message_id} was not sent in this transaction, or not by this producer; "
                "ask for its receipt between the send and the commit"
            )
        return self.publisher.receipts.open(row)

    def flush(self, deadline_s: float = 10.0) -> Flushed:
        """Wait until everything committed is accepted or left to the watchdog, or the deadline.

        The result is true when all messages since the flush before were accepted; it counts those
        that were not.
        """
        is_done = self._thread.flush(deadline_s)
        with self._flush_lock:
            after = self.stats
            flushed = Flushed.between(self._flushed, after, is_done=is_done)
            self._flushed = after
        return flushed

    async def aflush(self, deadline_s: float = 10.0) -> Flushed:
        """`flush` that blocks no event loop."""
        return await asyncio.to_thread(self.flush, deadline_s)

    def close(self, deadline_s: float = 10.0) -> None:
        """Send what can be sent until the deadline and end the thread; safe to repeat.

        What is left stays in the outbox for the watchdog, as do messages sent after the close.
        """
        _producers.discard(self)
        if not self._thread.close(deadline_s):
            self._transport.close()
            self._thread.join_aborted()

    async def aclose(self, deadline_s: float = 10.0) -> None:
        """`close` that blocks no event loop."""
        await asyncio.to_thread(self.close, deadline_s)

    @property
    def stats(self) -> PublisherStats:
        """What became of the messages of this process until now."""
        return self.publisher.stats

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
        await self.aclose()

    def after_fork(self) -> None:
        """In a forked child: a fresh publisher, nothing shared with the parent. Called by itself."""
        self.publisher.receipts.abandon()
        self._store.after_fork()
        self._dialect.after_fork(root_engine(self.engine))
        self._open()

    def _open(self) -> None:
        self._transport = _open_transport(self._broker)
        self.publisher = Publisher(
            store=self._store,
            transport=self._transport,
            token=new_token(),
            options=self.options,
        )
        self._flush_lock = threading.Lock()
        self._flushed = PublisherStats()
        self._thread = PublisherThread(
            self.publisher,
            self._clock,
            is_background=self.options.background,
            on_end=self._release,
        )
        self._outlet = _Outlet(
            self.publisher,
            self._clock,
            tables=self._tables,
            record_bytes_max=self._store.record_bytes_max,
            dialect=self._dialect,
            texts=self._texts,
            options=self.options,
        )

    def _release(self) -> None:
        if isinstance(self._broker, str | BrokerAddress):
            self._transport.close()
        self._store.close()

    def _send_alone(self, connection: sa.Connection, messages: Sequence[Message]) -> list[str]:
        with connection.begin():
            return self.send_many(messages, session=connection)

    def _cancel_alone(self, connection: sa.Connection, message_id: str) -> bool:
        with connection.begin():
            return bool(self.cancel(message_id, session=connection))

    def _make_row(self, message: Message, now_ms: int) -> OutboxRow:
        record = message_to_record(
            message, new_id=MESSAGE_IDS.next_id(), now_ms=now_ms, limits=self.options.limits
        )
        return OutboxRow(
            message_id=record.message_id,
            subject=record.subject,
            ordering_key=record.key if self.options.order_by_key else None,
            record=encode_record(record, self.options.limits),
        )


class _Outlet:
    """What a transaction needs to know of the producer that sends in it; see `Outlet`."""

    def __init__(
        self,
        publisher: Publisher,
        clock: Clock,
        *,
        tables: Tables,
        record_bytes_max: int | None,
        dialect: OutboxDialect,
        texts: InsertTexts,
        options: ProducerOptions,
    ) -> None:
        self.outbox = tables.outbox
        self.order_lock = tables.order_lock
        self.record_bytes_max = record_bytes_max
        self.is_strict = options.strict
        self.dialect = dialect
        self.buffer_bytes = options.buffer_bytes
        self.token = publisher.token
        self.insert_text = texts.text
        self.monotonic_s = clock.monotonic_s
        self.hand_over = publisher.queue.put


def _open_transport(broker: str | BrokerAddress | Transport) -> Transport:
    if not isinstance(broker, str | BrokerAddress):
        return checked_transport(broker)
    from qmq_client.transport.http import HttpTransport  # late: brings the HTTP library with it

    return HttpTransport(broker)


def _after_fork_in_child() -> None:
    for producer in list(_producers):
        producer.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
