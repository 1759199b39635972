"""One outbox of each kind that there is, for the tests of the contract.

Real ones on each database, SQLite's also in memory, and the double that applications use in their own
tests. They differ in how they are made and in nothing that a test may see.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import sqlalchemy as sa

from qmq_client.message import Message
from qmq_client.options import ProducerOptions
from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.outbox.table import create_tables
from qmq_client.producer import Producer
from qmq_client.testing import MemoryBroker, MemoryTransport, RecordingProducer, memory_engine
from tests.client.world import prepare
from tests.conftest import MakeDatabase

KINDS: Final = ("sqlite", "sqlite in memory", "mysql", "postgresql", "double")
SUBJECT: Final = "contract"
BUSINESS: Final = sa.Table(
    "business", sa.MetaData(), sa.Column("label", sa.String(50), primary_key=True)
)


class Outbox:
    """A business database with an outbox, the producer on it, and what arrived."""

    def __init__(self, engine: sa.Engine, producer: Producer, arrived: MemoryBroker) -> None:
        self.engine = engine
        self.producer = producer
        self.store = OutboxStore(engine)
        self._arrived = arrived
        BUSINESS.create(engine)

    def write(self, label: str, scope: sa.Connection | sa.orm.Session) -> str:
        """A business row and its message, in the transaction of the scope; the message's id."""
        scope.execute(sa.insert(BUSINESS).values(label=label))
        return self.producer.send(Message(SUBJECT, label), session=scope)

    def outcome(self) -> tuple[list[str], list[str]]:
        """Labels of business rows that are there and of messages that arrived."""
        assert self.producer.flush().is_done
        if isinstance(self.producer, RecordingProducer):
            found = [message.body for message in self.producer.sent(SUBJECT)]
        else:
            found = [message.body for message in self._arrived.messages(SUBJECT)]
        with self.engine.connect() as connection:
            rows = connection.scalars(sa.select(BUSINESS.c.label)).all()
        return sorted(rows), sorted(found)


@contextmanager
def an_outbox(kind: str, make_database: MakeDatabase) -> Iterator[Outbox]:
    """One of the kinds."""
    if kind == "double":
        with RecordingProducer() as recording:
            made = Outbox(recording.engine, recording, recording.broker)
            yield made
            made.store.close()
        return
    engine = memory_engine() if kind == "sqlite in memory" else make_database(kind).engine()
    prepare(engine)
    create_tables(engine)
    broker = MemoryBroker()
    options = ProducerOptions(background=False)
    with Producer(engine, MemoryTransport(broker), options=options) as producer:
        made = Outbox(engine, producer, broker)
        yield made
        made.store.close()
    engine.dispose()
