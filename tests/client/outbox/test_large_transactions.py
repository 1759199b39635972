"""Much in one transaction: in statements that the server takes, or refused by its size."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from qmq_client.errors import TooLargeError
from qmq_client.message import Message
from qmq_client.options import ProducerOptions
from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.outbox.database.dialect import dialect_of
from qmq_client.producer import Producer
from qmq_client.testing import MemoryBroker, MemoryTransport
from qmq_watchdog.databases import Database as Watched
from qmq_watchdog.sweep import Sweep
from tests.client.doctor.ward import a_server, a_shop, run
from tests.client.world import OUTBOX, SUBJECT
from tests.services.databases import Databases
from tests.services.private import PrivateServer

#: The drivers write each of these with a backslash, so a record is twice as long in a statement.
ESCAPED = b"\0"
PACKET_BYTES = 1024 * 1024


@pytest.fixture(scope="module")
def small_server(databases: Databases) -> Iterator[PrivateServer]:
    with a_server(databases, "mysql", f"--max-allowed-packet={PACKET_BYTES}") as server:
        yield server


@pytest.fixture(scope="module")
def small_shop(small_server: PrivateServer) -> sa.Engine:
    """A database whose server takes little in one statement."""
    return a_shop(small_server)


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
def producer(small_shop: sa.Engine, broker: MemoryBroker) -> Iterator[Producer]:
    options = ProducerOptions(background=False)
    with Producer(small_shop, MemoryTransport(broker), options=options) as made:
        yield made


def record_bytes_max(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        allowed = dialect_of(engine).record_bytes_max(connection)
    assert allowed is not None
    return allowed


def test_S1_a_transaction_larger_than_a_packet_goes_in_as_many_statements_as_it_needs(
    small_shop: sa.Engine, producer: Producer, broker: MemoryBroker
) -> None:
    allowed = record_bytes_max(small_shop)
    bodies = [ESCAPED * (allowed * share // 100) for share in (30, 30, 30, 30, 90, 90, 5, 5, 90)]
    with Session(small_shop) as session, session.begin():
        producer.send_many([Message(SUBJECT, body) for body in bodies], session=session)
    assert producer.flush()
    assert [message.body for message in broker.messages(SUBJECT)] == bodies


def test_S7_a_message_larger_than_a_packet_is_refused_and_its_transaction_continues(
    small_shop: sa.Engine, producer: Producer, broker: MemoryBroker
) -> None:
    allowed = record_bytes_max(small_shop)
    largest = largest_body(producer, small_shop, allowed)
    with Session(small_shop) as session, session.begin():
        session.execute(sa.text("SELECT 1"))
        with pytest.raises(TooLargeError, match=r"max_allowed_packet") as refused:
            producer.send(Message(SUBJECT, largest + ESCAPED), session=session)
        assert f"{allowed} bytes in one statement" in str(refused.value)
        producer.send(Message(SUBJECT, largest), session=session)
    assert producer.flush()
    assert [message.body for message in broker.messages(SUBJECT)] == [largest]


def largest_body(producer: Producer, engine: sa.Engine, allowed: int) -> bytes:
    """The body whose record is exactly as large as it may be."""
    with Session(engine) as session:
        producer.send(Message(SUBJECT, ESCAPED * 100_000), session=session)
        length = session.scalar(sa.text(f"SELECT LENGTH(record) FROM {OUTBOX}"))
        assert isinstance(length, int)
        session.rollback()
    return ESCAPED * (allowed - (length - 100_000))


def test_O1_O6_rows_stored_before_the_packet_was_made_smaller_are_sent(
    small_shop: sa.Engine,
) -> None:
    run(small_shop, f"SET GLOBAL max_allowed_packet = {16 * PACKET_BYTES}")
    broker = MemoryBroker()
    transport = MemoryTransport(broker)
    bodies = [bytes(3 * PACKET_BYTES), b"small"]
    options = ProducerOptions(background=False)
    broker.faults.is_unreachable = True
    try:
        with Producer(small_shop, transport, options=options) as producer:
            producer.send_now_many([Message(SUBJECT, body) for body in bodies])
    finally:
        run(small_shop, f"SET GLOBAL max_allowed_packet = {PACKET_BYTES}")
    broker.faults.is_unreachable = False
    run(small_shop, f"UPDATE {OUTBOX} SET due_at_ms = 0")
    fresh = sa.create_engine(small_shop.url, poolclass=NullPool)
    sweep = Sweep(Watched(name="shop", store=OutboxStore(fresh), engine=fresh), transport)
    counts = sweep.step()
    assert (counts.sent, counts.error) == (2, None)
    assert [message.body for message in broker.messages(SUBJECT)] == bodies
