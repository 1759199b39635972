"""What a send refuses, what it costs, and what it writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import StaticPool

from qmq_client.errors import (
    AutocommitError,
    ConfigurationError,
    EncodingError,
    InvalidMessageError,
    InvalidNameError,
    NoTransactionError,
    OutboxMissingError,
    TooLargeError,
    WrongDatabaseError,
)
from qmq_client.message import Message
from qmq_client.options import ProducerOptions
from qmq_client.outbox.table import create_tables, make_tables
from qmq_client.producer import Producer
from qmq_client.testing import MemoryBroker, MemoryTransport
from qmq_client.transactional import transaction, transactional
from qmq_client.wire.limits import Limits
from tests.client.world import OUTBOX, SUBJECT, Order, Statements, World, a_world, open_engine

BAD_MESSAGES: list[tuple[Message, type[InvalidMessageError]]] = [
    (Message("no spaces"), InvalidNameError),
    (Message("x" * 128), InvalidNameError),
    (Message(SUBJECT, bytes(5 * 1024 * 1024)), TooLargeError),
    (Message(SUBJECT, object()), EncodingError),
    (Message(SUBJECT, float("nan")), EncodingError),
    (Message(SUBJECT, "\ud800"), EncodingError),
    (Message(SUBJECT, key="\ud800"), EncodingError),
    (Message(SUBJECT, key="k" * 256), TooLargeError),
    (Message(SUBJECT, tags=("a,b",)), InvalidNameError),
    (Message(SUBJECT, headers={"h": "v" * 20_000}), TooLargeError),
    (Message(SUBJECT, message_id="short"), InvalidMessageError),
]


@pytest.fixture
def producer(world: World) -> Producer:
    return world.producer


@pytest.mark.parametrize(("message", "kind"), BAD_MESSAGES)
def test_S7_a_bad_message_is_refused_before_any_sql(
    world: World, message: Message, kind: type[InvalidMessageError]
) -> None:
    statements = Statements(world.sync_engine)
    with Session(world.engine) as session:
        with pytest.raises(kind) as caught:
            world.producer.send(message, session=session)
        assert caught.value.field
        assert caught.value.remedy
        with pytest.raises(kind):
            world.producer.send_many([Message(SUBJECT, "good"), message], session=session)
        assert not session.in_transaction()
        session.commit()
    assert statements.texts == []
    assert world.stored_ids() == set()


def test_S8_a_send_outside_of_a_transaction_is_refused(world: World) -> None:
    with pytest.raises(NoTransactionError, match="send_now"):
        world.send("a")
    with world.engine.connect() as connection, pytest.raises(NoTransactionError):
        world.send("a", connection)
    with Session(world.engine) as session:
        session.add(Order(label="a"))
        with pytest.raises(sa.exc.IntegrityError):
            session.execute(sa.text("INSERT INTO business_order (id) VALUES (1)"))
        session.add(Order(label="a"))
        with pytest.raises(sa.exc.IntegrityError):
            session.flush()
        with pytest.raises(NoTransactionError, match="no more statements"):
            world.send("a", session)
    with Session(world.engine) as session:
        session.connection().commit()
        with pytest.raises(NoTransactionError, match="directly"):
            world.send("a", session)
    with pytest.raises(ConfigurationError, match="sessionmaker"):
        world.send("a", sessionmaker(world.engine))
    assert world.stored_ids() == set()


def test_S8_send_now_stores_before_it_returns(world: World) -> None:
    message_id = world.producer.send_now(Message(SUBJECT, "now"))
    assert world.stored_ids() == {message_id}
    assert world.sent() == []
    assert world.producer.flush()
    assert world.sent() == ["now"]


def test_S8_a_hook_after_the_commit_cannot_send_in_the_transaction_that_is_over(
    world: World,
) -> None:
    refused: list[str] = []
    with Session(world.engine) as session:

        @sa.event.listens_for(session, "after_commit")
        def _send_late(committed: Session) -> None:
            try:
                world.send("late", committed)
            except NoTransactionError as error:
                refused.append(str(error))

        world.send("a", session)
        session.commit()
    assert len(refused) == 1
    assert world.producer.flush()
    assert world.sent() == ["a"]


def test_S8_no_session_is_guessed_however_few_there_are(world: World) -> None:
    with Session(world.engine) as session:
        session.execute(sa.select(Order))
        with pytest.raises(NoTransactionError, match=r"which transaction\? Pass `session=`"):
            world.send("a")
    assert world.outcome() == ([], [], set())


def test_inside_a_decorated_function_the_session_may_be_left_out(world: World) -> None:
    @transactional(world.producer)
    def place() -> None:
        with Session(world.engine):  # another session is no rival
            world.send("a")

    place()
    with transaction(world.engine) as connection:
        connection.execute(sa.insert(Order).values(label="b"))
        world.send("b")
    assert world.producer.flush()
    assert world.sent() == ["a", "b"]


@pytest.fixture(params=["engine", "engine options", "connection options"])
def autocommit_session(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Session]:
    path = tmp_path / "shop.sqlite"
    way = request.param
    engine = open_engine(path, **({"isolation_level": "AUTOCOMMIT"} if way == "engine" else {}))
    if way == "engine options":
        given: Any = engine.execution_options(isolation_level="AUTOCOMMIT")
    elif way == "connection options":
        given = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    else:
        given = engine
    create_tables(engine)
    with Session(given) as session:
        yield session
    if isinstance(given, sa.Connection):
        given.close()
    engine.dispose()


def test_S1_a_connection_in_autocommit_is_refused(autocommit_session: Session) -> None:
    engine = autocommit_session.get_bind().engine
    options = ProducerOptions(background=False)
    with Producer(engine, MemoryTransport(MemoryBroker()), options=options) as producer:
        with pytest.raises(AutocommitError, match="send_now"):
            producer.send(Message(SUBJECT, "a"), session=autocommit_session)
        autocommit_session.commit()
    count = autocommit_session.scalar(sa.text(f"SELECT count(*) FROM {OUTBOX}"))
    assert count == 0


def test_S1_a_transaction_on_another_database_is_refused(world: World, tmp_path: Path) -> None:
    other = open_engine(tmp_path / "other.sqlite")
    same_file = open_engine(world.path)
    create_tables(other)
    for engine in (other, same_file):
        with Session(engine) as session, pytest.raises(WrongDatabaseError, match="another engine"):
            world.send("a", session)
        with engine.begin() as connection, pytest.raises(WrongDatabaseError):
            world.send("a", connection)
        with Session(engine) as session, session.begin(), pytest.raises(NoTransactionError):
            world.send("a")
        engine.dispose()


def test_a_session_over_two_databases_sends_on_the_one_it_has_touched(
    world: World, tmp_path: Path
) -> None:
    other = open_engine(tmp_path / "other.sqlite")
    create_tables(other)
    tables = make_tables(sa.MetaData())
    with Session(binds={Order: world.engine, tables.outbox: other}) as session:
        with pytest.raises(WrongDatabaseError):
            world.send("a", session)
        session.execute(sa.select(Order))
        with session.begin_nested():
            world.send("a", session)
        session.commit()
    assert world.producer.flush()
    assert world.sent() == ["a"]
    other.dispose()


def test_a_missing_table_is_named_at_the_send(tmp_path: Path) -> None:
    engine = open_engine(tmp_path / "shop.sqlite")
    transport = MemoryTransport(MemoryBroker())
    with Producer(engine, transport, options=ProducerOptions(background=False)) as producer:
        with pytest.raises(OutboxMissingError, match=r"qmq_outbox is missing.*qmq db migrate"):
            producer.send_now(Message(SUBJECT, "a"))
        create_tables(engine)
        producer.send_now(Message(SUBJECT, "b"))
        with engine.begin() as connection:
            connection.exec_driver_sql(f"DROP TABLE {OUTBOX}")
        message = Message(SUBJECT, "c", message_id="ab" * 16)
        with (
            Session(engine) as session,
            pytest.raises(OutboxMissingError, match=rf"{message.message_id}.*{OUTBOX}"),
        ):
            producer.send(message, session=session)
    engine.dispose()


def test_an_insert_that_the_database_refuses_names_message_and_table(world: World) -> None:
    message_id = world.producer.send_now(Message(SUBJECT, "a"))
    with Session(world.engine) as session:
        session.add(Order(label="a"))
        session.flush()
        with pytest.raises(sa.exc.IntegrityError) as caught:
            world.producer.send(Message(SUBJECT, "b", message_id=message_id), session=session)
        assert any(message_id in note and OUTBOX in note for note in caught.value.__notes__)
        session.rollback()
    assert world.outcome() == ([], ["a"], set())


@pytest.mark.parametrize("count", [0, 1, 2, 100])
@pytest.mark.parametrize("way", ["send", "send_many"])
def test_S13_a_transaction_pays_one_insert_for_a_send_and_none_without(
    world: World, count: int, way: str
) -> None:
    world.producer.send_now(Message(SUBJECT, "the first one has the tables looked at"))
    statements = Statements(world.sync_engine)
    messages = [Message(SUBJECT, f"{i}") for i in range(count)]
    with Session(world.engine) as session, session.begin():
        session.add(Order(label="a"))
        session.flush()
        if way == "send_many":
            world.producer.send_many(messages, session=session)
        for message in messages if way == "send" else ():
            world.producer.send(message, session=session)
    inserts = [text for text in statements.of_outbox() if text.startswith("INSERT")]
    assert len(inserts) == (count if way == "send" else min(count, 1))
    assert len(statements.texts) == 1 + len(inserts)
    assert world.producer.flush()
    assert (len(world.sent()), world.producer.stats.reclaimed) == (count + 1, 0)


@pytest.mark.parametrize(("count", "inserts"), [(1_000, 1), (1_001, 2)])
def test_very_many_messages_are_written_in_blocks(world: World, count: int, inserts: int) -> None:
    world.producer.send_now(Message(SUBJECT, "first"))
    statements = Statements(world.sync_engine)
    with Session(world.engine) as session, session.begin():
        messages = [Message(SUBJECT, f"{i}") for i in range(count)]
        world.producer.send_many(messages, session=session)
    assert len(statements.of_outbox()) == inserts
    assert world.producer.flush()
    assert world.sent() == ["first", *(f"{i}" for i in range(count))]


def test_a_row_is_born_owned_for_the_takeover_time_by_the_databases_clock(tmp_path: Path) -> None:
    with a_world(tmp_path, takeover_ms=7_000) as world:
        world.producer.send_now(Message(SUBJECT, "a", key="k"))
        ((subject, key, state, token, attempts, error, owned_ms, age_ms),) = world.read(
            "SELECT subject, ordering_key, state, token, attempts, last_error, "
            "due_at_ms - created_at_ms, unixepoch() * 1000 - created_at_ms FROM qmq_outbox"
        )
        # A key alone asks for no order, and nobody shall pay for it.
        assert (subject, key, state, attempts, error) == (SUBJECT, None, 0, 0, None)
        assert token == world.producer._publisher.token
        assert owned_ms == 7_000
        assert -2_000 < age_ms < 2_000


@pytest.mark.parametrize("body", [b"\x00\xff", "grüße\n", {"a": [1, None, "x"]}, b"", ""])
def test_S9_the_body_arrives_as_it_was_given(world: World, body: Any) -> None:
    message_id = world.producer.send_now(
        Message(SUBJECT, body, key="k", tags=("a", "b"), headers={"h": "v\x00"})
    )
    assert world.producer.flush()
    (message,) = world.broker.messages(SUBJECT)
    assert (message.body, message.key, message.tags) == (body, "k", ("a", "b"))
    assert (dict(message.headers), message.message_id) == ({"h": "v\x00"}, message_id)


def test_a_chosen_message_id_is_kept(world: World) -> None:
    assert world.producer.send_now(Message(SUBJECT, message_id="ab" * 16)) == "ab" * 16
    assert world.stored_ids() == {"ab" * 16}


def test_other_table_names_and_limits_are_used(tmp_path: Path) -> None:
    engine = open_engine(tmp_path / "shop.sqlite")
    tables = make_tables(sa.MetaData(), prefix="app's ")
    create_tables(engine, tables)
    broker = MemoryBroker()
    options = ProducerOptions(background=False, limits=Limits(record_bytes=100))
    with Producer(engine, MemoryTransport(broker), options=options, tables=tables) as producer:
        with pytest.raises(TooLargeError, match="100 bytes"):
            producer.send_now(Message(SUBJECT, bytes(100)))
        producer.send_now(Message(SUBJECT, "a"))
        assert producer.flush()
    assert len(broker.messages(SUBJECT)) == 1
    engine.dispose()


@pytest.mark.parametrize(
    ("setting", "value"),
    [("takeover_ms", 0), ("queue_messages", 0), ("breaker_max_ms", 5)],
)
def test_a_setting_that_cannot_work_is_refused(setting: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=setting):
        ProducerOptions(**{setting: value})


def test_an_engine_that_cannot_work_is_refused(tmp_path: Path) -> None:
    transport = MemoryTransport(MemoryBroker())
    with pytest.raises(ConfigurationError, match="StaticPool"):
        Producer(sa.create_engine("sqlite://"), transport)
    with pytest.raises(ConfigurationError, match="session maker"):
        Producer("sqlite://", transport)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(ConfigurationError, match="session maker"):
        Producer(sessionmaker(), transport)


def test_a_database_in_memory_is_one_connection() -> None:
    engine = sa.create_engine("sqlite://", poolclass=StaticPool)
    create_tables(engine)
    broker, options = MemoryBroker(), ProducerOptions(background=False)
    with Producer(engine, MemoryTransport(broker), options=options) as producer:
        producer.send_now(Message(SUBJECT, "a"))
        assert producer.flush()
    assert len(broker.messages(SUBJECT)) == 1
    engine.dispose()


def test_a_connection_detached_from_its_pool_may_send(world: World) -> None:
    with world.engine.connect() as connection:
        connection.detach()
        with connection.begin():
            world.send("a", connection)
            connection.execute(sa.insert(Order).values(label="a"))
    assert world.producer.flush()
    assert (world.sent(), world.committed_orders()) == (["a"], {"a"})
