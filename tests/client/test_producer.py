"""What a producer can do beside sending: cancel, flush with an account, keep for an audit."""

from __future__ import annotations

import pydoc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

from qmq_client.errors import (
    ConfigurationError,
    InvalidMessageError,
    TransportError,
)
from qmq_client.message import Message
from qmq_client.options import ProducerOptions
from qmq_client.outbox.row import BatchOutcome, FailedRow
from qmq_client.outbox.table import LIVE, SENT
from qmq_client.producer import Producer
from qmq_client.publishing.stats import Flushed
from qmq_client.transactional import transaction
from qmq_client.wire.delayed import Cancellation
from tests.client.publishing import WATCHDOG, sweep
from tests.client.world import OUTBOX, SUBJECT, World, a_world
from tests.services.databases import Database

HOUR_S = 3_600


@pytest.fixture
def world(tmp_path: Path, a_database: Database) -> Iterator[World]:
    with a_world(tmp_path, database=a_database) as made:
        yield made


def left_behind(world: World) -> str:
    """A committed message that the broker has not taken yet; free for the watchdog."""
    world.broker.faults.is_unreachable = True
    message_id = world.producer.send_now(Message(SUBJECT, "earlier"))
    assert world.producer.flush().left == 1
    world.broker.faults.is_unreachable = False
    return message_id


def test_a_message_is_cancelled_in_the_transaction_it_was_sent_in(world: World) -> None:
    with Session(world.sync_engine) as session, session.begin():
        own = world.send("own", session)
        world.send("kept", session)
        assert world.producer.cancel(own, session=session)
        assert not world.producer.cancel(own, session=session)
    assert world.producer.flush()
    assert (world.sent(), world.stored_ids()) == (["kept"], set())


def test_S1_a_commit_that_looks_for_its_rows_misses_none_that_was_cancelled(
    a_database: Database, tmp_path: Path
) -> None:
    with a_world(tmp_path, database=a_database, strict=True) as world:
        with Session(world.sync_engine) as session, session.begin():
            own = world.send("own", session)
            world.send("kept", session)
            assert world.producer.cancel(own, session=session)
        assert world.producer.flush()
        assert (world.sent(), world.stored_ids()) == (["kept"], set())


def test_a_message_of_an_earlier_transaction_is_cancelled_while_nobody_sends_it(
    world: World,
) -> None:
    message_id = left_behind(world)
    with transaction(world.sync_engine):
        assert world.producer.cancel(message_id)
    world.make_due()
    assert sweep(world).sent == ()
    assert (world.sent(), world.stored_ids()) == ([], set())


def test_a_cancelling_is_undone_by_a_rollback_of_transaction_or_savepoint(world: World) -> None:
    message_id = left_behind(world)
    with Session(world.sync_engine) as session:
        assert world.producer.cancel(message_id, session=session)
        session.rollback()
    with Session(world.sync_engine) as session, session.begin():
        savepoint = session.begin_nested()
        assert world.producer.cancel(message_id, session=session)
        savepoint.rollback()
    assert world.stored_ids() == {message_id}


def test_O3_what_may_be_under_way_is_not_cancelled(world: World) -> None:
    message_id = world.producer.send_now(Message(SUBJECT, "x"))
    with Session(world.sync_engine) as session, session.begin():
        assert not world.producer.cancel(message_id, session=session)
        assert not world.producer.cancel("0" * 32, session=session)
    assert world.producer.flush()
    with Session(world.sync_engine) as session, session.begin():
        assert not world.producer.cancel(message_id, session=session)
    assert world.sent() == ["x"]


def test_a_cancelling_outside_a_transaction_has_one_of_its_own(world: World) -> None:
    message_id = left_behind(world)
    assert world.producer.cancel(message_id) is Cancellation.CANCELLED
    assert world.producer.cancel(message_id) is Cancellation.UNKNOWN
    assert (world.sent(), world.stored_ids()) == ([], set())


def test_D4_a_send_that_was_given_up_is_not_stored_when_it_arrives_after_the_cancellation(
    world: World,
) -> None:
    message_id = left_behind(world)
    assert world.producer.cancel(message_id) is Cancellation.CANCELLED
    world.broker.put(Message(SUBJECT, "late", message_id=message_id))
    assert world.sent() == []


def stored_but_not_told(world: World, **fields: Any) -> str:
    """A message that the broker has, while the outbox does not know it: the answer was lost."""
    world.broker.faults.lost_answers = 1
    message_id = world.producer.send_now(Message(SUBJECT, "x", **fields))
    assert world.producer.flush().left == 1
    return message_id


def test_D4_a_message_whose_answer_was_lost_is_cancelled_in_the_outbox_and_at_the_broker(
    world: World,
) -> None:
    message_id = stored_but_not_told(world, delay=HOUR_S)
    assert world.producer.cancel(message_id) is Cancellation.CANCELLED
    assert world.stored_ids() == set()
    world.clock.advance(2 * HOUR_S * 1000)
    assert world.sent() == []


def test_D4_it_is_said_when_the_broker_has_delivered_what_is_still_in_the_outbox(
    world: World,
) -> None:
    message_id = stored_but_not_told(world)
    assert world.producer.cancel(message_id) is Cancellation.TOO_LATE
    assert (world.sent(), world.stored_ids()) == (["x"], set())


def test_D4_O3_what_is_cancelled_at_the_broker_is_not_sent_again_by_whoever_has_its_row(
    world: World,
) -> None:
    message_id = stored_but_not_told(world, delay=HOUR_S)
    world.make_due()
    (row,) = world.store.claim(token=WATCHDOG, limit=10, lease_ms=60_000)
    assert world.producer.cancel(message_id) is Cancellation.CANCELLED
    assert world.stored_ids() == set()
    outcome = BatchOutcome(failed=(FailedRow(message_id=row.message_id, error="x", delay_ms=0),))
    assert world.store.settle(outcome, token=WATCHDOG) == 0


def test_D4_what_may_still_arrive_at_the_broker_after_its_time_is_not_called_cancelled(
    world: World,
) -> None:
    """Its owner waits longer for an answer than others wait before they take it over."""
    message_id = world.producer.send_now(Message(SUBJECT, "x", delay=HOUR_S))
    older = f"UPDATE {OUTBOX} SET due_at_ms = due_at_ms - 40000"
    world.change(older)
    with Session(world.sync_engine) as session, session.begin():
        assert not world.producer.cancel(message_id, session=session)
    assert world.producer.cancel(message_id) is Cancellation.UNKNOWN
    assert world.stored_ids() == {message_id}
    world.change(older)
    assert world.producer.cancel(message_id) is Cancellation.CANCELLED
    assert world.stored_ids() == set()


def test_D4_without_the_brokers_word_nothing_is_called_cancelled_and_nothing_is_sent_any_more(
    world: World,
) -> None:
    message_id = stored_but_not_told(world, delay=HOUR_S)
    world.broker.faults.is_unreachable = True
    with pytest.raises(TransportError):
        world.producer.cancel(message_id)
    assert world.stored_ids() == set()
    world.broker.faults.is_unreachable = False
    assert world.producer.cancel(message_id) is Cancellation.CANCELLED


def test_a_cancelling_needs_an_id(world: World) -> None:
    with Session(world.sync_engine) as session, pytest.raises(InvalidMessageError):
        world.producer.cancel("x", session=session)


def test_messages_sent_now_are_stored_together_or_not_at_all(world: World) -> None:
    ids = world.producer.send_now_many([Message(SUBJECT, "a"), Message(SUBJECT, "b")])
    assert world.stored_ids() == set(ids)
    assert world.producer.send_now_many([]) == []
    with pytest.raises(InvalidMessageError):
        world.producer.send_now_many([Message(SUBJECT, "c"), Message("no name")])
    assert world.stored_ids() == set(ids)


def test_rows_of_accepted_messages_are_kept_for_an_audit_and_purged_after_it(
    tmp_path: Path, a_database: Database
) -> None:
    with a_world(tmp_path, database=a_database, keep_sent_s=3600) as world:
        message_id = world.producer.send_now(Message(SUBJECT, "x"))
        assert world.producer.flush()
        ((state, kept_ms),) = world.read(f"SELECT state, due_at_ms - created_at_ms FROM {OUTBOX}")
        assert (state, world.stored_ids()) == (SENT, {message_id})
        assert 3_590_000 < kept_ms < 3_660_000
        world.make_due()
        assert sweep(world).sent == ()  # kept is not waiting
        assert world.store.purge_sent() == 1
        assert (world.stored_ids(), world.sent()) == (set(), ["x"])


def test_an_audited_row_that_was_taken_over_is_not_touched(tmp_path: Path) -> None:
    with a_world(tmp_path, keep_sent_s=3600) as world:
        world.producer.send_now(Message(SUBJECT, "x"))
        world.change(f"UPDATE {OUTBOX} SET token = ?", b"o" * 16)
        assert world.producer.flush().left == 1
        assert world.read(f"SELECT state, token FROM {OUTBOX}") == [(LIVE, b"o" * 16)]


def test_a_flush_is_true_when_everything_was_accepted_and_else_counts_what_was_not(
    tmp_path: Path,
) -> None:
    with a_world(tmp_path, queue_messages=3) as world:
        assert world.producer.flush() == Flushed(is_done=True, accepted=0, left=0, parked=0)
        ids = [world.producer.send_now(Message(SUBJECT, f"{i}")) for i in range(4)]
        world.broker.faults.refused_ids = {ids[0]}
        flushed = world.producer.flush()
        assert flushed == Flushed(is_done=True, accepted=2, left=1, parked=1)
        assert not flushed
        assert world.producer.flush()  # all since then were accepted: there were none
        world.broker.faults.is_unreachable = True
        world.producer.send_now(Message(SUBJECT, "4"))
        assert world.producer.flush() == Flushed(is_done=True, accepted=0, left=1, parked=0)


def test_a_flush_that_failed_between_two_flushes_is_not_forgotten(tmp_path: Path) -> None:
    with a_world(tmp_path) as world:
        world.broker.faults.is_unreachable = True
        world.producer.send_now(Message(SUBJECT, "x"))
        world.producer._publisher.step(0.0, is_hurried=True)  # what the thread does by itself
        world.broker.faults.is_unreachable = False
        assert not world.producer.flush()


@pytest.mark.parametrize(
    "setting", [{"keep_sent_s": 0}, {"keep_sent_s": 10**9}, {"keep_sent_s": "1"}]
)
def test_a_setting_of_the_audit_that_cannot_work_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="keep_sent_s"):
        ProducerOptions(**setting)


@pytest.mark.parametrize(
    "setting",
    [
        {"keep_sent_s": True},
        {"max_attempts": True},
        {"order_by_key": "no"},
        {"strict": 1},
        {"background": None},
        {"backoff": 5},
        {"limits": {"tags": 3}},
        {"on_sent": "print"},
        {"on_failed": 7},
    ],
    ids=str,
)
def test_a_setting_of_another_kind_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(setting))):
        ProducerOptions(**setting)


def test_the_help_of_a_producer_is_for_people() -> None:
    text = pydoc.plain(pydoc.render_doc(Producer))
    assert "tables: Tables | None = None" in text.replace("'", "")  # Python 3.14 quotes none
    assert "Table('" not in text
    assert " object at 0x" not in text
    assert max(len(line) for line in text.splitlines()) < 400
