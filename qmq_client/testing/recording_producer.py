"""`RecordingProducer`: the producer for tests of code that sends.

It is the real producer on a real database, so its messages follow the transaction; only the broker
is in memory, and no thread runs. Without an engine it creates a database in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

from qmq_client.clock import Clock
from qmq_client.current import sync_of
from qmq_client.given import AnyEngine, AnySession, engine_of, listed
from qmq_client.message import Message, decode_message
from qmq_client.options import ProducerOptions
from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.outbox.sending.notes import open_rows
from qmq_client.outbox.sending.unawaited import Sent, SentMany
from qmq_client.outbox.table import DEFAULT_TABLES, Tables
from qmq_client.producer import Producer
from qmq_client.transport.memory import MemoryBroker, MemoryTransport
from qmq_client.wire.message_id import parse_message_id

#: Most messages of one test whose ids are remembered.
_MESSAGES_MAX: Final = 100_000


class RecordingProducer(Producer):
    """A `Producer` that shows its messages. Create one for each test, or `clear` it between tests.

    Missing tables are created. There is no thread: messages are sent inside `sent`, `flush` and
    `close`, on the calling thread, so a test is deterministic.
    """

    def __init__(
        self,
        engine: AnyEngine | None = None,
        *,
        options: ProducerOptions | None = None,
        tables: Tables | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`engine` as of `Producer`; without one, a `memory_engine` that ends with this.

        `options` apply except `background`.
        """
        self._own_engine: sa.Engine | None = None
        if engine is None:
            engine = self._own_engine = memory_engine()
        #: The broker that gets the messages: pass it to `MemoryTransport` and `drain` to handle them.
        self.broker = MemoryBroker() if clock is None else MemoryBroker(clock=clock)
        #: Subject and id of each send, with any outcome.
        self._sends: deque[tuple[str, str]] = deque(maxlen=_MESSAGES_MAX)
        _create_missing(engine, DEFAULT_TABLES if tables is None else tables)
        super().__init__(
            engine,
            MemoryTransport(self.broker),
            options=replace(options or ProducerOptions(), background=False),
            tables=tables,
            clock=clock,
        )

    def send(self, message: Message, *, session: AnySession | None = None) -> Sent:
        """See `Producer.send`."""
        message_id = super().send(message, session=session)
        self._sends.append((message.subject, str(message_id)))
        return message_id

    def send_many(
        self, messages: Sequence[Message], *, session: AnySession | None = None
    ) -> SentMany:
        """See `Producer.send_many`."""
        sent = listed(messages)
        ids = super().send_many(sent, session=session)
        self._sends.extend(zip((each.subject for each in sent), ids, strict=True))
        return ids

    def sent(self, subject: str | None = None) -> list[Message]:
        """Messages of committed transactions that arrived, of all subjects or one, in the order of the sends."""
        self.flush()
        sends = dict.fromkeys(each for each in self._sends if subject in (None, each[0]))
        arrived = {
            (message.subject, message.message_id): message
            for name in {name for name, _ in sends}
            for message in self.broker.messages(name)
        }
        return [arrived[each] for each in sends if each in arrived]

    def noted(self, session: AnySession) -> list[Message]:
        """Messages sent so far in the open transaction, without those that were rolled back.

        For tests that roll back the commits of the code under test at their end: there `session` is
        the connection with the outer transaction, and `sent` is always empty. For an asynchronous
        session it also returns messages that a savepoint has rolled back, because that is unknown
        here.
        """
        given = self._scopes.find(session)
        scope = sync_of(given)
        sent = {row.message_id: row for row, _ in open_rows(scope)}
        if scope is given and sent:  # a synchronous one shows what a savepoint has rolled back
            connection, _ = self._scopes.connection(scope)
            number = self._inserts.tables.outbox.c.message_id
            there = set(connection.scalars(sa.select(number).where(number.in_(sent))))
            sent = {each: row for each, row in sent.items() if each in there}
        wanted = [parse_message_id(each) for _, each in dict.fromkeys(self._sends)]
        found = [sent[each] for each in wanted if each in sent]
        return [decode_message(row.subject, row.record) for row in found]

    def clear(self) -> None:
        """Forget all messages so far; waiting ones are sent first."""
        self.flush()
        self._sends.clear()

    def close(self, deadline_s: float = 10.0) -> None:
        """See `Producer.close`."""
        super().close(deadline_s)
        if self._own_engine is not None:
            self._own_engine.dispose()


def memory_engine(**options: Any) -> sa.Engine:
    """An SQLite database in memory that every session on this engine shares; it is deleted with the engine.

    There is a single connection, so transactions never run concurrently.
    """
    return sa.create_engine(
        "sqlite://",
        poolclass=StaticPool,
        connect_args={"check_same_thread": False},
        **{"hide_parameters": True, **options},
    )


def _create_missing(given: AnyEngine, tables: Tables) -> None:
    engine = engine_of(given)
    if engine is None:  # refused by `Producer`
        return
    store = OutboxStore(engine, tables)

    def create(connection: sa.Connection) -> None:
        tables.outbox.metadata.create_all(connection, tables=list(tables.all))

    store.write(create)  # also if the application's engine is asynchronous
    store.close()
