"""The publisher, one step at a time: what goes out, what is deleted, what is left to the watchdog."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from sqlalchemy.orm import Session

from qmq_client.errors import BrokerRefusedError
from qmq_client.message import Message
from qmq_client.outbox.row import BatchOutcome, RowFilter
from qmq_client.publishing.publish import publish_rows
from qmq_client.retry import Backoff
from qmq_client.testing import MemoryTransport
from qmq_client.wire.limits import SUBJECTS_PER_FRAME_MAX
from qmq_client.wire.requests import ErrorAnswer, SendAnswer
from tests.client.publishing import (
    WATCHDOG,
    Answers,
    send_each,
    sibling_statements,
    sweep,
    with_transport,
)
from tests.client.world import OUTBOX, SUBJECT, World, a_world


def test_S5_a_full_queue_drops_and_the_watchdog_sends(tmp_path: Path) -> None:
    with a_world(tmp_path, queue_messages=5) as world:
        send_each(world, 8)
        stats = world.producer.stats
        assert (stats.enqueued, stats.dropped, stats.queued) == (8, 3, 5)
        assert world.producer.flush().is_done
        assert world.sent() == ["0", "1", "2", "3", "4"]
        world.make_due()
        assert len(sweep(world).sent) == 3
        assert set(world.sent()) == {f"{i}" for i in range(8)}
        assert world.stored_ids() == set()


def test_S5_the_hook_needs_no_connection_and_no_broker(tmp_path: Path) -> None:
    with a_world(tmp_path) as world:
        world.engine.dispose()
        world.broker.faults.is_unreachable = True
        statements = sibling_statements(world)
        send_each(world, 3)
        assert world.checked_out() == 0
        assert (statements.texts, world.memory.calls["send"]) == ([], 0)


def test_O1_rows_of_a_dead_process_are_sent_by_another_owner(world: World) -> None:
    ids = send_each(world, 3)
    assert world.store.claim(token=WATCHDOG, limit=10, lease_ms=1) == []
    world.make_due()  # the process died before it sent anything
    assert {row.hex() for row in sweep(world).sent} == set(ids) == world.sent_ids()
    assert world.stored_ids() == set()


@pytest.mark.parametrize("fault", ["other frame", "fewer messages"])
def test_O2_an_answer_that_does_not_name_the_frame_removes_nothing(
    world: World, fault: str
) -> None:
    def alter(answer: SendAnswer) -> SendAnswer:
        return SendAnswer(
            frame_crc=answer.frame_crc ^ (fault == "other frame"),
            count=answer.count - (fault == "fewer messages"),
            duplicates=0,
            physical_offset=0,
            stored_at_ms=0,
            durability="durable",
        )

    publisher = with_transport(world, Answers(world, alter))
    ids = send_each(world, 2)
    done = publisher.step(0.0, is_hurried=True)
    assert (done.sent, done.failed, done.deleted) == (0, 2, 0)
    assert world.stored_ids() == set(ids)


def test_O2_nothing_is_deleted_when_the_broker_refuses_or_is_away(world: World) -> None:
    def refuse(_: SendAnswer) -> SendAnswer:
        raise BrokerRefusedError(404, ErrorAnswer(code="not_found", message="no such route"))

    ids = send_each(world, 2)
    assert with_transport(world, Answers(world, refuse)).step(0.0).failed == 2
    assert world.stored_ids() == set(ids)
    rows = world.read(f"SELECT attempts, token, last_error FROM {OUTBOX}")
    assert rows == [(0, None, "BrokerRefusedError: 404 not_found: no such route")] * 2


def test_O3_a_late_owner_changes_no_row(world: World) -> None:
    ids = [bytes.fromhex(text) for text in send_each(world, 4)]
    world.make_due()
    assert len(world.store.claim(token=WATCHDOG, limit=10, lease_ms=60_000)) == 4
    before = world.read(f"SELECT * FROM {OUTBOX}")
    token = world.producer._publisher.token
    outcome = publish_rows(
        [], transport=world.transport, backoff=Backoff(), max_attempts=1, random=lambda: 0.0
    )
    assert outcome == BatchOutcome()
    store = world.producer._store
    assert store.delete_sent(ids, token=token) == 0
    assert store.reclaim(ids, token=token, lease_ms=1) == set()
    done = world.producer._publisher.step(0.0, is_hurried=True)  # finds them to be another's
    assert (done.sent, done.left, done.deleted) == (0, 4, 0)
    assert world.read(f"SELECT * FROM {OUTBOX}") == before


def test_O3_only_what_is_due_is_claimed_and_only_once(world: World) -> None:
    send_each(world, 5)
    world.change(f"UPDATE {OUTBOX} SET due_at_ms = 0 WHERE id <= 3")
    world.change(f"UPDATE {OUTBOX} SET state = 1 WHERE id = 1")
    first = world.store.claim(token=WATCHDOG, limit=1, lease_ms=60_000)
    second = world.store.claim(token=b"v" * 16, limit=10, lease_ms=60_000)
    assert (len(first), len(second)) == (1, 1)
    assert {first[0].message_id} != {second[0].message_id}


def test_O5_a_lost_answer_leads_to_one_stored_message(world: World) -> None:
    world.broker.faults.lost_answers = 1
    send_each(world, 3)
    assert world.producer.flush().is_done
    assert (world.producer.stats.sent, world.producer.stats.failed) == (0, 3)
    world.make_due()
    assert len(sweep(world).sent) == 3
    assert sorted(world.sent()) == ["0", "1", "2"]
    assert world.stored_ids() == set()


def test_O5_a_process_that_dies_between_accept_and_delete_leads_to_one_stored_message(
    world: World,
) -> None:
    send_each(world, 2)
    assert world.producer._publisher.step(0.0).sent == 2
    assert len(world.stored_ids()) == 2
    world.make_due()
    assert len(sweep(world).sent) == 2
    assert sorted(world.sent()) == ["0", "1"]


def test_O6_a_bad_row_never_delays_its_neighbours(world: World) -> None:
    ids = send_each(world, 9)
    world.broker.faults.refused_ids = {ids[4]}
    done = world.producer._publisher.step(0.0, is_hurried=True)
    assert (done.sent, done.parked) == (8, 1)
    assert world.sent_ids() == set(ids) - {ids[4]}
    assert world.stored_ids() == {ids[4]}


def test_O6_rows_that_keep_failing_move_out_of_the_way(world: World) -> None:
    world.broker.faults.is_unreachable = True
    send_each(world, 60)
    assert world.producer.flush().is_done
    world.broker.faults.is_unreachable = False
    new = send_each(world, 1)
    world.change(f"UPDATE {OUTBOX} SET due_at_ms = 0 WHERE last_error IS NULL")
    rows = world.store.claim(token=WATCHDOG, limit=50, lease_ms=1000)
    assert [row.message_id.hex() for row in rows] == new


def test_O7_a_row_is_parked_after_its_attempts_logged_once_and_can_be_retried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with a_world(tmp_path, max_attempts=1) as world:
        world.broker.faults.garbage_answers = 1
        (message_id,) = send_each(world, 1)
        with caplog.at_level(logging.ERROR):
            assert world.producer.flush().is_done
        parked = [record for record in caplog.records if message_id in record.getMessage()]
        assert len(parked) == 1
        assert world.store.counts().parked == 1
        (row,) = world.store.list_rows(state=1)
        assert row.message_id.hex() == message_id
        assert "BrokerAnswerError" in (row.last_error or "")
        world.make_due()
        assert world.store.claim(token=WATCHDOG, limit=10, lease_ms=1) == []
        assert world.store.retry(RowFilter(message_ids=[row.message_id])) == 1
        assert {each.hex() for each in sweep(world).sent} == {message_id}


def test_O7_an_outage_of_any_length_parks_nothing(tmp_path: Path) -> None:
    with a_world(tmp_path, max_attempts=2) as world:
        world.broker.faults.is_unreachable = True
        send_each(world, 1)
        assert world.producer.flush().is_done
        for _ in range(5):
            world.make_due()
            sweep(world)
        assert world.store.counts().parked == 0
        ((attempts,),) = world.read(f"SELECT attempts FROM {OUTBOX}")
        assert attempts == 0
        world.broker.faults.is_unreachable = False
        world.broker.faults.garbage_answers = 1
        world.make_due()
        sweep(world)
        assert world.store.counts().parked == 0


def test_S9_a_record_damaged_in_the_database_is_parked_and_its_neighbours_continue(
    world: World,
) -> None:
    ids = send_each(world, 5)
    damages = {
        2: "record = CAST(record || x'00' AS BLOB)",
        3: "record = record || x'ff'",  # SQLite makes this a text, and one that is not UTF-8
        4: "subject = CAST(x'ff' AS TEXT)",
    }
    for row_id, damage in damages.items():
        world.change(f"UPDATE {OUTBOX} SET {damage} WHERE id = {row_id}")
    world.make_due()
    world.producer._publisher.leave_all()
    outcome = sweep(world)
    assert [row.message_id.hex() for row in outcome.parked] == ids[1:4]
    assert world.sent_ids() == {ids[0], ids[4]}


@pytest.mark.parametrize("error", [ValueError, KeyError, MemoryError])
def test_O6_O7_an_error_that_nobody_foresaw_keeps_to_its_row_and_parks_it_in_the_end(
    tmp_path: Path, error: type[Exception]
) -> None:
    class Poisoned(MemoryTransport):
        def send(self, frame: bytes) -> SendAnswer:
            if b"poison" in frame:
                raise error("unforeseen")
            return super().send(frame)

    with a_world(tmp_path) as world:
        world.transport = Poisoned(world.broker)
        with_transport(world, world.transport)
        with Session(world.engine) as session, session.begin():
            poison = world.send("poison", session)
        send_each(world, 9)
        assert world.producer.flush().is_done
        assert world.sent() == [f"{i}" for i in range(9)]
        assert world.producer.stats.failed == 1
        for _ in range(49):
            assert world.store.counts().parked == 0
            world.make_due()
            outcome = sweep(world)
        assert [row.message_id.hex() for row in outcome.parked] == [poison]
        assert "unforeseen" in outcome.parked[0].error


def test_O6_a_batch_whose_outcome_nobody_can_tell_is_left_and_the_next_one_goes(
    world: World,
) -> None:
    class Killed(MemoryTransport):
        def send(self, frame: bytes) -> SendAnswer:
            raise KeyboardInterrupt

    send_each(world, 3)
    with_transport(world, Killed(world.broker))
    with pytest.raises(KeyboardInterrupt):
        world.producer._publisher.step(1.0)
    assert (world.producer.stats.left, world.producer.stats.queued) == (3, 0)
    with_transport(world, world.transport)
    with Session(world.engine) as session, session.begin():
        world.send("next", session)
    assert world.producer.flush().is_done
    assert world.sent() == ["next"]


def test_S5_a_transaction_larger_than_the_queue_is_taken_by_an_empty_one(tmp_path: Path) -> None:
    with a_world(tmp_path, queue_messages=5) as world:
        with Session(world.engine) as session, session.begin():
            world.producer.send_many([Message(SUBJECT, f"{i}") for i in range(8)], session=session)
        send_each(world, 1)
        assert world.producer.stats.dropped == 1
        assert world.producer.flush().is_done
        assert world.sent() == [f"{i}" for i in range(8)]


def test_a_batch_has_no_more_messages_than_it_may(tmp_path: Path) -> None:
    with a_world(tmp_path, batch_messages=3) as world:
        with Session(world.engine) as session, session.begin():
            for number in range(10):
                world.send(f"{number}", session)
        sent = [world.producer._publisher.step(0.0, is_hurried=True).sent for _ in range(4)]
        assert sent == [3, 3, 3, 1]


def test_a_request_has_as_many_subjects_as_a_frame_can_name(world: World) -> None:
    with Session(world.engine) as session, session.begin():
        messages = [Message(f"order.n{n}") for n in range(4 * SUBJECTS_PER_FRAME_MAX)]
        world.producer.send_many(messages, session=session)
    rows = [
        row for each in world.producer._publisher.queue.take(len(messages)) for row in each.rows
    ]
    outcome = publish_rows(
        rows, transport=world.transport, backoff=Backoff(), max_attempts=1, random=lambda: 0.0
    )
    assert (len(outcome.sent), outcome.requests) == (len(messages), 4)
