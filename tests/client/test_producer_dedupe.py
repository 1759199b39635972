"""A business transaction may be run again: with a dedupe key its message is sent once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

from qmq_client.errors import BrokerRefusedError, InvalidMessageError
from qmq_client.message import Message
from qmq_client.wire.message_id import dedupe_message_id
from qmq_client.wire.requests import ErrorAnswer, SendAnswer
from tests.client.publishing import Answers, sweep, with_transport
from tests.client.world import SUBJECT, Statements, World, a_world
from tests.services.databases import Database

KEY = "order-17-paid"
DEADLINE_S = 60.0


@pytest.fixture
def world(tmp_path: Path, a_database: Database) -> Iterator[World]:
    with a_world(tmp_path, database=a_database) as made:
        yield made


def run(world: World, *bodies: str, producer: Any = None, key: str = KEY) -> list[str]:
    """One run of the business transaction, some time after the one before."""
    world.clock.advance(1_000)
    with Session(world.sync_engine) as session, session.begin():
        return (producer or world.producer).send_many(
            [Message(SUBJECT, body, dedupe_key=key) for body in bodies], session=session
        )


def test_S6_a_transaction_run_again_before_its_message_is_sent_sends_once(world: World) -> None:
    ids = run(world, "first") + run(world, "again")
    assert set(ids) == {dedupe_message_id(SUBJECT, KEY).hex()} == world.stored_ids()
    assert world.producer.flush()
    assert (world.sent(), world.stored_ids()) == (["first"], set())


def test_S6_a_transaction_run_again_after_its_message_was_accepted_sends_once(
    world: World,
) -> None:
    run(world, "first")
    assert world.producer.flush()
    run(world, "again")
    assert len(world.stored_ids()) == 1
    assert world.producer.flush()
    assert (world.sent(), world.stored_ids()) == (["first"], set())
    assert world.producer.stats.parked == 0


def test_S6_a_message_said_twice_in_one_transaction_is_sent_once(world: World) -> None:
    run(world, "first", "again")
    assert world.producer.flush()
    assert (world.sent(), world.stored_ids()) == (["first"], set())


def test_D4_what_is_said_in_place_of_a_cancelled_message_is_sent_in_its_place(world: World) -> None:
    with Session(world.sync_engine) as session, session.begin():
        cancelled = world.send("cancelled", session, dedupe_key=KEY)
        assert world.producer.cancel(cancelled, session=session)
        world.send("instead", session, dedupe_key=KEY)
    assert world.producer.flush()
    assert (world.sent(), world.stored_ids()) == (["instead"], set())


def test_S6_a_rolled_back_run_leaves_the_key_to_the_next(world: World) -> None:
    with Session(world.sync_engine) as session:
        world.send("first", session, dedupe_key=KEY)
        session.rollback()
    run(world, "again")
    assert world.producer.flush()
    assert (world.sent(), world.stored_ids()) == (["again"], set())


def test_S6_other_messages_of_the_batch_continue(world: World) -> None:
    run(world, "first")
    assert world.producer.flush()
    with Session(world.sync_engine) as session, session.begin():
        for i in range(5):
            world.send(f"{i}", session)
        world.send("again", session, dedupe_key=KEY)
        world.send("other", session, dedupe_key="order-18-paid")
    assert world.producer.flush()
    assert sorted(world.sent()) == ["0", "1", "2", "3", "4", "first", "other"]
    assert (world.stored_ids(), world.producer.stats.sent) == (set(), 8)


def test_O3_a_row_stored_by_another_process_is_left_to_it(world: World) -> None:
    other = world.make_producer()
    run(world, "first", producer=other)
    run(world, "again")
    flushed = world.producer.flush()
    assert (bool(flushed), flushed.left, world.sent()) == (False, 1, [])
    assert other.flush()
    other.close()
    assert (world.sent(), world.stored_ids()) == (["first"], set())


def test_S6_the_watchdog_takes_a_known_message_for_sent(world: World) -> None:
    run(world, "first")
    assert world.producer.flush()
    run(world, "again")
    world.producer._publisher.leave_all()
    world.make_due()
    outcome = sweep(world)
    assert (len(outcome.sent), outcome.parked) == (1, ())
    assert (world.sent(), world.stored_ids()) == (["first"], set())


@pytest.mark.parametrize("commits", [True, False])
def test_S6_a_run_waits_for_the_one_that_is_under_way(
    tmp_path: Path, a_server_database: Database, commits: bool
) -> None:
    with a_world(tmp_path, database=a_server_database, strict=True) as world:
        written, ended, done = threading.Event(), threading.Event(), threading.Event()

        def again() -> None:
            world.clock.advance(1_000)
            with Session(world.sync_engine) as session:
                world.send("again", session, dedupe_key=KEY)  # strict: written at once
                written.set()
                # Awake with the other's COMMIT, it could be at the broker before the other is.
                assert ended.wait(DEADLINE_S)
                session.commit()
            done.set()

        with Session(world.sync_engine) as session:
            world.send("first", session, dedupe_key=KEY)
            thread = threading.Thread(target=again)
            thread.start()
            assert not written.is_set()
            session.commit() if commits else session.rollback()
        ended.set()
        thread.join(DEADLINE_S)
        assert done.is_set()
        assert world.producer.flush()
        assert (world.sent(), world.stored_ids()) == (["first" if commits else "again"], set())


@pytest.mark.parametrize(
    ("status", "code", "key"),
    [(409, "other", KEY), (422, "id_conflict", KEY), (400, "bad", KEY), (409, "id_conflict", None)],
    ids=["other code", "other status", "bad request", "random id"],
)
def test_O2_a_refusal_of_another_kind_or_of_a_random_id_does_not_count_as_sent(
    tmp_path: Path, status: int, code: str, key: str | None
) -> None:
    with a_world(tmp_path) as world:
        message_id = world.producer.send_now(Message(SUBJECT, "x", dedupe_key=key))

        def refuse(_: SendAnswer) -> SendAnswer:
            raise BrokerRefusedError(
                status, ErrorAnswer(code=code, message="no", message_id=message_id)
            )

        with_transport(world, Answers(world, refuse))
        flushed = world.producer.flush()
        assert (flushed.accepted, flushed.parked) == (0, 1)
        assert world.stored_ids() == {message_id}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"dedupe_key": "a", "message_id": "0" * 32}, "no message_id with it"),
        ({"dedupe_key": ""}, "an empty text"),
        ({"dedupe_key": "x" * 256}, "256 bytes"),
        ({"dedupe_key": "\ud800"}, "can be encoded"),
        ({"dedupe_key": 7}, "can be encoded"),
        ({"dedupe_key": "a", "subject": "no name"}, "Choose another subject"),
        ({"dedupe_key": "a", "subject": 7}, "Choose another subject"),
    ],
    ids=["two ids", "empty", "long", "surrogate", "number", "bad subject", "no subject"],
)
def test_S7_a_dedupe_key_that_cannot_work_is_refused_before_any_sql(
    tmp_path: Path, fields: dict[str, Any], says: str
) -> None:
    with a_world(tmp_path) as world:
        statements = Statements(world.sync_engine)
        refused = pytest.raises(InvalidMessageError, match=says)
        with Session(world.sync_engine) as session, refused:
            world.producer.send(Message(**{"subject": SUBJECT, **fields}), session=session)
        assert statements.texts == []


def test_O2_O7_an_id_that_only_looks_like_one_of_a_dedupe_key_is_parked_on_a_conflict(
    world: World,
) -> None:
    (first,) = run(world, "first")
    assert world.producer.flush()
    with Session(world.engine) as session:
        other = Message(SUBJECT, "forwarded", message_id=first)
        world.producer.send(other, session=session)
        session.commit()
    assert world.producer.flush().parked == 1
