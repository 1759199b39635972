"""Outbox tables of another name, or in another database of the same server than the business."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client import (
    Inbox,
    Message,
    OutboxMissingError,
    Producer,
    ProducerOptions,
    create_tables,
)
from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.outbox.row import BatchOutcome
from qmq_client.outbox.table import Tables, make_tables
from qmq_client.testing import MemoryBroker, MemoryTransport
from tests.conftest import MakeDatabase
from tests.services.databases import KINDS, Database

SUBJECT = "order.placed"
TOKEN = b"the watchdog's o"
SERVERS = tuple(kind for kind in KINDS if kind != "sqlite")
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
        dying._publisher.leave_all()
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


HIDE = {
    "sqlite": "CREATE TEMPORARY TABLE {name} AS SELECT * FROM main.{name} WHERE 1 = 0",
    "mysql": "CREATE TEMPORARY TABLE {name} AS SELECT * FROM {name} WHERE 1 = 0",
    "postgresql": "CREATE TEMPORARY TABLE {name} (LIKE public.{name} INCLUDING ALL)",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("table", ["outbox", "order_lock"])
def test_S1_S2_O4_a_temporary_table_hides_none_of_ours_or_the_send_is_refused(
    kind: str, table: str, make_database: MakeDatabase
) -> None:
    engine = make_database(kind).engine()
    create_tables(engine)
    broker = MemoryBroker()
    # Without `strict` MySQL's own rule holds, as for any table: a statement more for each send.
    options = ProducerOptions(background=False, order_by_key=True, strict=kind == "mysql")
    with Producer(engine, MemoryTransport(broker), options=options) as producer:
        producer.send_now(Message(SUBJECT, "before", key="a"))
        with Session(engine) as session:
            session.execute(sa.text(HIDE[kind].format(name=f"qmq_{table}")))
            if kind == "mysql":
                with pytest.raises(OutboxMissingError, match=f"qmq_{table}.*temporary table|hides"):
                    producer.send(Message(SUBJECT, "a", key="a"), session=session)
                session.execute(sa.text(f"DROP TEMPORARY TABLE qmq_{table}"))
            producer.send(Message(SUBJECT, "a", key="a"), session=session)
            session.commit()
        assert producer.flush()
    assert [message.body for message in broker.messages(SUBJECT)] == ["before", "a"]
    assert count(engine, make_tables(sa.MetaData())) == 0


@pytest.mark.parametrize("is_ordered", [False, True])
def test_S2_a_role_without_rights_that_a_session_has_taken_is_refused_by_the_servers_own_error(
    is_ordered: bool, postgresql_database: Database
) -> None:
    engine = postgresql_database.engine()
    create_tables(engine)
    broker = MemoryBroker()
    options = ProducerOptions(background=False, order_by_key=is_ordered)
    with Producer(engine, MemoryTransport(broker), options=options) as producer:
        for _ in range(2):  # before and after the first look at the tables
            with Session(engine) as session:
                session.execute(sa.text("SET LOCAL ROLE pg_monitor"))
                with pytest.raises(sa.exc.ProgrammingError, match="permission denied"):
                    producer.send(Message(SUBJECT, "a", key="a"), session=session)
            producer.send_now(Message(SUBJECT, "own", key="a"))
        assert producer.flush()
    assert [message.body for message in broker.messages(SUBJECT)] == ["own", "own"]


def test_O4_locks_that_somebody_removed_are_filled_again(a_server_database: Database) -> None:
    engine = a_server_database.engine()
    create_tables(engine)
    options = ProducerOptions(background=False, order_by_key=True)
    with Producer(engine, MemoryTransport(MemoryBroker()), options=options) as producer:
        producer.send_now(Message(SUBJECT, "a", key="a"))
        with engine.begin() as connection:
            connection.execute(sa.text("DELETE FROM qmq_order_lock"))
        with pytest.raises(OutboxMissingError, match=r"rows of .*qmq_order_lock are missing"):
            producer.send_now(Message(SUBJECT, "b", key="a"))
        producer.send_now(Message(SUBJECT, "b", key="a"))
        assert producer.flush().accepted == 2


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("kind", SERVERS)
def test_O4_a_snapshot_older_than_the_locks_locks_them_or_is_refused_once(
    kind: str, level: str, make_database: MakeDatabase
) -> None:
    """The first send under a key in the life of a database: another connection fills the locks."""
    engine = make_database(kind).engine(isolation_level=level)
    create_tables(engine)
    options = ProducerOptions(background=False, order_by_key=True)
    with Producer(engine, MemoryTransport(MemoryBroker()), options=options) as producer:
        errors: list[str] = []
        for number in range(3):
            try:
                with Session(engine) as session, session.begin():
                    session.execute(sa.text("SELECT 1"))
                    producer.send(Message(SUBJECT, f"{number}", key="a"), session=session)
            except OutboxMissingError as error:
                errors.append(str(error))
        assert len(errors) == (kind == "postgresql")
        assert all("Repeat the transaction" in error for error in errors)
        assert producer.flush().accepted == 3 - len(errors)


def make_tenant(kind: str, engine: sa.Engine, make_database: MakeDatabase) -> str:
    """A schema for the business of one tenant, with no table of ours in it."""
    tenant = make_schema(kind, engine, make_database)
    assert tenant is not None
    return tenant


@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.parametrize("strict", [False, True])
def test_S1_S2_what_an_application_makes_of_its_own_schemas_moves_no_table_of_ours(
    kind: str, strict: bool, make_database: MakeDatabase
) -> None:
    engine = make_database(kind).engine()
    create_tables(engine)
    its_own = make_tenant(kind, engine, make_database)
    translated = {None: its_own, engine.dialect.default_schema_name: its_own}
    tenant = engine.execution_options(schema_translate_map=translated)
    broker = MemoryBroker()
    options = ProducerOptions(background=False, strict=strict, order_by_key=True)
    with (
        Producer(engine, MemoryTransport(broker), options=options) as producer,
        Session(tenant) as session,
    ):
        undone = producer.send(Message(SUBJECT, "undone", key="a"), session=session)
        assert producer.cancel(undone, session=session)
        producer.send(Message(SUBJECT, "a"), session=session)
        session.commit()
        assert producer.flush()
    assert [message.body for message in broker.messages(SUBJECT)] == ["a"]
    assert count(engine, make_tables(sa.MetaData())) == 0


@pytest.mark.parametrize("kind", SERVERS)
def test_C5_an_inbox_is_where_it_is_whatever_an_application_makes_of_its_own_schemas(
    kind: str, make_database: MakeDatabase
) -> None:
    engine = make_database(kind).engine()
    create_tables(engine)
    its_own = make_tenant(kind, engine, make_database)
    translated = {None: its_own, engine.dialect.default_schema_name: its_own}
    tenant = engine.execution_options(schema_translate_map=translated)
    inbox = Inbox(tenant, group="stock")
    one, two = b"1" * 16, b"2" * 16
    with inbox.open([one, two]) as work:
        work.forgotten.add(two)
    with inbox.open([one, two]) as work:
        assert work.new == {two}


@pytest.mark.parametrize("kind", SERVERS)
def test_S1_S2_a_session_that_looks_elsewhere_writes_to_our_table_all_the_same(
    kind: str, make_database: MakeDatabase
) -> None:
    database = make_database(kind)
    engine = database.engine()
    create_tables(engine)
    tenant = make_tenant(kind, engine, make_database)
    create_tables(engine, make_tables(sa.MetaData(), schema=tenant))  # one that nobody looks into
    look_there = f"USE {tenant}" if kind == "mysql" else f"SET LOCAL search_path TO {tenant}"
    broker = MemoryBroker()
    options = ProducerOptions(background=False, order_by_key=True)
    with (
        Producer(engine, MemoryTransport(broker), options=options) as producer,
        Session(engine) as session,
    ):
        for is_wanted in (False, True):
            session.execute(sa.text(look_there))
            producer.send(Message(SUBJECT, f"{is_wanted}", key="a"), session=session)
            undone = producer.send(Message(SUBJECT, "undone", key="a"), session=session)
            assert producer.cancel(undone, session=session)
            session.commit() if is_wanted else session.rollback()
        assert producer.flush()
    assert [message.body for message in broker.messages(SUBJECT)] == ["True"]
