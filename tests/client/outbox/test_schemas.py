"""Outbox tables of another name, or in another database of the same server."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client import Message, Producer, ProducerOptions, create_tables
from qmq_client.outbox.relay.store import OutboxStore
from qmq_client.outbox.row import BatchOutcome
from qmq_client.outbox.table import Tables, make_tables
from qmq_client.testing import MemoryBroker, MemoryTransport
from tests.conftest import MakeDatabase
from tests.services.databases import KINDS

SUBJECT = "order.placed"
TOKEN = b"the watchdog's o"
#: Larger than what a claim of two rows in 10,000 bytes reads at once.
LARGE = bytes(9_000)


def make_schema(kind: str, engine: sa.Engine, make_database: MakeDatabase) -> str | None:
    """Where the messages of this application are; on MySQL it is a database of its own."""
    if kind == "sqlite":
        return None  # has no schemas
    if kind == "mysql":
        return make_database(kind).name
    with engine.begin() as connection:
        connection.execute(sa.schema.CreateSchema("messages"))
    return "messages"


def make_outbox(kind: str, make_database: MakeDatabase) -> tuple[sa.Engine, Tables]:
    """A database whose messages have a schema of their own, and names that need quotes."""
    engine = make_database(kind).engine()
    schema = make_schema(kind, engine, make_database)
    tables = make_tables(sa.MetaData(), schema=schema, prefix="50%_'s ")
    create_tables(engine, tables)
    return engine, tables


def count(engine: sa.Engine, tables: Tables) -> int:
    with engine.connect() as connection:
        return connection.scalar(sa.select(sa.func.count()).select_from(tables.outbox)) or 0


@pytest.mark.parametrize("kind", KINDS)
def test_S1_S2_S5_messages_in_a_schema_of_their_own_go_with_the_transactions_of_the_business(
    kind: str, make_database: MakeDatabase
) -> None:
    engine, tables = make_outbox(kind, make_database)
    business = sa.Table("business", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True))
    business.create(engine)
    broker = MemoryBroker()
    options = ProducerOptions(background=False, order_by_key=True)
    with (
        Producer(engine, MemoryTransport(broker), options=options, tables=tables) as producer,
        Session(engine) as session,
    ):
        for number, is_wanted in ((1, True), (2, False)):
            session.execute(sa.insert(business).values(id=number))
            producer.send(Message(SUBJECT, f"{number}", key="a"), session=session)
            session.commit() if is_wanted else session.rollback()
        assert producer.flush()
    assert [message.body for message in broker.messages(SUBJECT)] == ["1"]
    assert count(engine, tables) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_W1_a_watchdog_claims_settles_and_purges_in_a_schema_of_its_own(
    kind: str, make_database: MakeDatabase
) -> None:
    engine, tables = make_outbox(kind, make_database)
    options = ProducerOptions(background=False)
    with Producer(engine, MemoryTransport(MemoryBroker()), options=options, tables=tables) as dying:
        dying.send_now_many([Message(SUBJECT, LARGE, key=key) for key in "abc"])
        dying.publisher.leave_all()
    store = OutboxStore(engine, tables)
    with engine.begin() as connection:
        connection.execute(sa.update(tables.outbox).values(due_at_ms=0))
    two = store.claim(token=TOKEN, limit=2, lease_ms=60_000, bytes_max=10_000)
    assert [len(row.record) > len(LARGE) for row in two] == [True, True]
    kept, deleted = (BatchOutcome(sent=(row.message_id,)) for row in two)
    assert store.settle(kept, token=TOKEN, keep_ms=0) == 1
    assert store.settle(deleted, token=TOKEN) == 1
    assert store.purge_sent() == 1
    assert count(engine, tables) == 1
    store.close()
