"""Much in one transaction: written early, in statements that the server takes, or refused by its size."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from qmq_client.errors import TooLargeError
from qmq_client.message import Message
from qmq_client.options import ProducerOptions
from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.producer import Producer
from qmq_client.testing import MemoryBroker, MemoryTransport
from qmq_watchdog.databases import Database as Watched
from qmq_watchdog.sweep import Sweep
from tests.client.doctor.ward import a_server, a_shop, run
from tests.client.world import OUTBOX, SUBJECT, World, a_world
from tests.conftest import MakeDatabase
from tests.services.databases import Database, Databases
from tests.services.private import PrivateServer

#: The drivers write each of these with a backslash, so a record is twice as long in a statement.
ESCAPED = b"\0"
PACKET_BYTES = 1024 * 1024
BODY_BYTES = 300
WAITING = sa.text(f"SELECT count(*) FROM {OUTBOX}")
#: Two of these bodies wait, a third is too much.
BUFFER = {"buffer_bytes": 3 * BODY_BYTES}


def test_S1_S4_what_waits_for_the_commit_is_written_when_its_bytes_are_too_many(
    a_database: Database, tmp_path: Path
) -> None:
    with a_world(tmp_path, database=a_database, **BUFFER) as world:
        written = []
        with Session(world.engine) as session, session.begin():
            for i in range(7):
                world.send(f"{i}".ljust(BODY_BYTES), session)
                written.append(session.scalar(WAITING))
        assert written == [0, 0, 3, 3, 3, 6, 6]
        with Session(world.engine) as session:
            for _ in range(3):
                world.send("x" * BODY_BYTES, session)
            assert session.scalar(WAITING) == 10
            session.rollback()
        _, sent, left = world.outcome()
        assert ([int(body) for body in sent], left) == (list(range(7)), set())


def send_and_look(world: World, session: Session, count: int) -> list[int]:
    """Send messages of which three are too many; how many are written after each."""
    written = []
    for _ in range(count):
        world.send("x" * BODY_BYTES, session)
        written.append(session.scalar(WAITING) or 0)
    return written


def test_S3_what_a_savepoint_took_with_it_is_too_much_no_longer(
    a_database: Database, tmp_path: Path
) -> None:
    with (
        a_world(tmp_path, database=a_database, **BUFFER) as world,
        Session(world.engine) as session,
    ):
        assert send_and_look(world, session, 1) == [0]
        savepoint = session.begin_nested()
        assert send_and_look(world, session, 1) == [0]
        savepoint.rollback()
        assert send_and_look(world, session, 2) == [0, 3]


def test_S3_what_waits_again_behind_a_savepoint_counts_again(
    a_database: Database, tmp_path: Path
) -> None:
    """It was sent before the savepoint and written inside it."""
    with (
        a_world(tmp_path, database=a_database, **BUFFER) as world,
        Session(world.engine) as session,
    ):
        assert send_and_look(world, session, 1) == [0]
        savepoint = session.begin_nested()
        assert send_and_look(world, session, 2) == [0, 3]
        savepoint.rollback()
        assert send_and_look(world, session, 2) == [0, 3]


@pytest.mark.parametrize("kind", ["sqlite", "mysql"])  # on PostgreSQL an error ends it all
def test_S3_what_a_rollback_that_failed_left_waiting_still_counts(
    make_database: MakeDatabase, tmp_path: Path, kind: str
) -> None:
    with (
        a_world(tmp_path, database=make_database(kind), **BUFFER) as world,
        Session(world.engine) as session,
    ):
        assert send_and_look(world, session, 2) == [0, 0]
        with pytest.raises(sa.exc.DBAPIError):
            session.execute(sa.text("ROLLBACK TO SAVEPOINT nowhere"))
        assert send_and_look(world, session, 1) == [3]


def test_S1_S11_an_asynchronous_session_writes_it_before_its_next_statement(
    a_database: Database, tmp_path: Path
) -> None:
    written = []

    async def work(world: Any) -> None:
        async with AsyncSession(world.engine) as session, session.begin():
            await session.execute(sa.text("SELECT 1"))
            for i in range(7):
                world.send(f"{i}".ljust(BODY_BYTES), session)
                written.append(await session.scalar(WAITING))
        await world.engine.dispose()

    with a_world(tmp_path, database=a_database, is_async=True, **BUFFER) as world:
        asyncio.run(work(world))
        assert written == [0, 0, 3, 3, 3, 6, 6]
        _, sent, left = world.outcome()
        assert ([int(body) for body in sent], left) == (list(range(7)), set())


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
    """Its messages wait for the commit, however large they are."""
    options = ProducerOptions(background=False, buffer_bytes=1024**3)
    with Producer(small_shop, MemoryTransport(broker), options=options) as made:
        yield made


def record_bytes_max(engine: sa.Engine) -> int:
    store = OutboxStore(engine)
    store.check_schema()
    store.close()
    assert store.record_bytes_max is not None
    return store.record_bytes_max


def test_S1_a_transaction_larger_than_a_packet_goes_in_as_many_statements_as_it_needs(
    small_shop: sa.Engine, producer: Producer, broker: MemoryBroker
) -> None:
    allowed = record_bytes_max(small_shop)
    bodies = [ESCAPED * (allowed * share // 100) for share in (30, 30, 30, 30, 90, 90, 5, 5, 90)]
    with Session(small_shop) as session, session.begin():
        producer.send_many([Message(SUBJECT, body) for body in bodies], session=session)
    assert producer.flush()
    assert [message.body for message in broker.messages(SUBJECT)] == bodies


def test_S7_a_message_larger_than_a_packet_is_refused_and_its_transaction_goes_on(
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
        session.flush()
        session.connection().exec_driver_sql("SET @early = 1")  # what waits is written before it
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
