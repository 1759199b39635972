"""The producer for users' tests beyond what every outbox promises; see tests/contract for that."""

from __future__ import annotations

import asyncio
from typing import assert_type

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from qmq_client.errors import ConfigurationError
from qmq_client.message import Message
from qmq_client.options import ProducerOptions
from qmq_client.outbox.table import make_tables
from qmq_client.testing import FakeClock, RecordingProducer, memory_engine


def bodies(messages: list[Message]) -> list[object]:
    return [message.body for message in messages]


def test_messages_of_all_subjects_stand_in_the_order_of_their_sends() -> None:
    with RecordingProducer() as producer:
        for subject, body in (("b", 1), ("a", 2), ("b", 3)):
            producer.send_now(Message(subject, body, key="k", headers={"x": "y"}))
        assert bodies(producer.sent()) == [1, 2, 3]
        (only,) = producer.sent("a")
        assert (only.key, only.headers["x"]) == ("k", "y")
        producer.clear()
        assert producer.sent() == []
        producer.send_now(Message("a", 4))
        assert bodies(producer.sent()) == [4]


def test_an_answer_that_is_lost_shows_no_message_twice() -> None:
    with RecordingProducer() as producer:
        producer.broker.faults.lost_answers = 1
        producer.send_now(Message("a", 1))
        producer.flush()
        for _ in range(3):
            producer.send_now(Message("a", 1, dedupe_key="same"))
            producer.flush()
        assert len(producer.sent()) == len(producer.broker.messages("a")) == 2


def test_what_is_noted_follows_scopes_and_ends_with_the_transaction() -> None:
    with RecordingProducer() as producer:
        registry = scoped_session(sessionmaker(producer.engine))
        producer.send(Message("a", 1), session=registry)
        assert bodies(producer.noted(registry)) == [1]
        registry.commit()
        assert producer.noted(registry) == []
        assert bodies(producer.sent()) == [1]
        registry.remove()


def test_it_takes_other_tables_options_and_a_clock() -> None:
    tables = make_tables(sa.MetaData(), prefix="our_")
    clock = FakeClock()
    seen: list[str] = []
    options = ProducerOptions(background=True, order_by_key=True, on_sent=seen.extend)
    engine = memory_engine()
    with RecordingProducer(engine, tables=tables, options=options, clock=clock) as producer:
        with Session(engine) as session, session.begin():
            message_id = producer.send(Message("a", 1, key="k"), session=session)
        assert seen == [], "nothing goes out beside the test"
        assert bodies(producer.sent()) == [1]
        assert seen == [message_id]
    assert "our_outbox" in sa.inspect(engine).get_table_names()
    engine.dispose()


def test_a_session_maker_is_taken_for_its_engine_and_others_are_refused() -> None:
    engine = memory_engine()
    with RecordingProducer(sessionmaker(engine)) as producer:
        assert producer.engine is engine
    engine.dispose()
    with pytest.raises(ConfigurationError):
        RecordingProducer("sqlite://")  # type: ignore[arg-type]  # the mistake


def test_a_recording_producer_is_one_inside_a_block_of_either_kind() -> None:
    async def main() -> None:
        async with RecordingProducer() as producer:  # the checker of types reads these lines
            assert_type(producer, RecordingProducer)
            producer.send_now(Message("order.placed", "17"))
            assert [message.body for message in producer.sent()] == ["17"]

    asyncio.run(main())
    with RecordingProducer() as producer:
        assert_type(producer, RecordingProducer)
