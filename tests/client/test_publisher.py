"""The publisher, one step at a time: what goes out, what is deleted, what is left to the watchdog."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

from qmq_client.errors import BrokerRefusedError
from qmq_client.message import Message
from qmq_client.outbox.row import BatchOutcome
from qmq_client.publish import publish_rows
from qmq_client.publisher import Publisher
from qmq_client.retry import Backoff
from qmq_client.transactional import transaction
from qmq_client.wire.requests import ErrorAnswer, SendAnswer
from tests.client.world import OUTBOX, SUBJECT, Statements, World, a_world

WATCHDOG = b"w" * 16


def send_each(world: World, count: int) -> list[str]:
    """Messages, each in a transaction of its own."""
    ids = []
    for i in range(count):
        with Session(world.engine) as session, session.begin():
            ids.append(world.send(f"{i}", session))
    return ids


def sibling_statements(world: World) -> Statements:
    return Statements(world.producer._store._sibling)


def sweep(world: World) -> BatchOutcome:
    """What a watchdog does with whatever is due."""
    rows = world.store.claim(token=WATCHDOG, limit=1000, lease_ms=5000)
    outcome = publish_rows(
        rows,
        transport=world.transport,
        backoff=Backoff(),
        max_attempts=50,
        random=lambda: 0.0,
    )
    world.store.settle(outcome, token=WATCHDOG)
    return outcome


class Answers:
    """A transport that answers each send as told."""

    def __init__(self, world: World, change: Any) -> None:
        self.world = world
        self.change = change

    def send(self, frame: bytes) -> SendAnswer:
        answer: SendAnswer = self.change(self.world.transport.send(frame))
        return answer

    def pull(self, request: Any) -> Any:
        raise NotImplementedError

    settle = pull

    def close(self) -> None:
        pass


def with_transport(world: World, transport: Any) -> Publisher:
    world.producer.publisher._transport = transport
    return world.producer.publisher


def test_S5_a_full_queue_drops_and_the_watchdog_sends(tmp_path: Path) -> None:
    with a_world(tmp_path, queue_messages=5) as world:
        send_each(world, 8)
        stats = world.producer.stats
        assert (stats.handed_over, stats.dropped, stats.queued) == (8, 3, 5)
        assert world.producer.flush()
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
        assert (statements.texts, world.transport.calls["send"]) == ([], 0)


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
    assert rows == [(1, None, "BrokerRefusedError: 404 not_found: no such route")] * 2


def test_O3_a_late_owner_changes_no_row(world: World) -> None:
    ids = [bytes.fromhex(text) for text in send_each(world, 4)]
    world.make_due()
    assert len(world.store.claim(token=WATCHDOG, limit=10, lease_ms=60_000)) == 4
    before = world.read(f"SELECT * FROM {OUTBOX}")
    token = world.producer.publisher.token
    outcome = publish_rows(
        [], transport=world.transport, backoff=Backoff(), max_attempts=1, random=lambda: 0.0
    )
    assert outcome == BatchOutcome()
    store = world.producer._store
    assert store.delete_sent(ids, token=token) == 0
    assert store.reclaim(ids, token=token, lease_ms=1) == set()
    done = world.producer.publisher.step(0.0, is_hurried=True)  # sends: O5 makes it one message
    assert (done.sent, done.deleted) == (4, 0)
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
    assert world.producer.flush()
    assert (world.producer.stats.sent, world.producer.stats.failed) == (0, 3)
    world.make_due()
    assert len(sweep(world).sent) == 3
    assert sorted(world.sent()) == ["0", "1", "2"]
    assert world.stored_ids() == set()


def test_O5_a_process_that_dies_between_accept_and_delete_leads_to_one_stored_message(
    world: World,
) -> None:
    send_each(world, 2)
    assert world.producer.publisher.step(0.0).sent == 2
    assert len(world.stored_ids()) == 2
    world.make_due()
    assert len(sweep(world).sent) == 2
    assert sorted(world.sent()) == ["0", "1"]


def test_O6_a_bad_row_never_delays_its_neighbours(world: World) -> None:
    ids = send_each(world, 9)
    world.broker.faults.refused_ids = {ids[4]}
    done = world.producer.publisher.step(0.0, is_hurried=True)
    assert (done.sent, done.parked) == (8, 1)
    assert world.sent_ids() == set(ids) - {ids[4]}
    assert world.stored_ids() == {ids[4]}


def test_O6_rows_that_keep_failing_move_out_of_the_way(world: World) -> None:
    world.broker.faults.is_unreachable = True
    send_each(world, 60)
    assert world.producer.flush()
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
            assert world.producer.flush()
        parked = [record for record in caplog.records if message_id in record.getMessage()]
        assert len(parked) == 1
        assert world.store.counts().parked == 1
        (row,) = world.store.list_rows(state=1)
        assert row.message_id.hex() == message_id
        assert "BrokerAnswerError" in (row.last_error or "")
        world.make_due()
        assert world.store.claim(token=WATCHDOG, limit=10, lease_ms=1) == []
        assert world.store.retry([row.message_id]) == 1
        assert {each.hex() for each in sweep(world).sent} == {message_id}


def test_O7_an_outage_of_any_length_parks_nothing(tmp_path: Path) -> None:
    with a_world(tmp_path, max_attempts=2) as world:
        world.broker.faults.is_unreachable = True
        send_each(world, 1)
        assert world.producer.flush()
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


def test_S9_a_record_damaged_in_the_database_is_parked_and_its_neighbours_go_on(
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
    world.producer.publisher.leave_all()
    outcome = sweep(world)
    assert [row.message_id.hex() for row in outcome.parked] == ids[1:4]
    assert world.sent_ids() == {ids[0], ids[4]}


def test_a_thousand_waiting_messages_are_one_request_and_two_deletes(world: World) -> None:
    statements = sibling_statements(world)
    for _ in range(10):
        with Session(world.engine) as session, session.begin():
            messages = [Message(SUBJECT, "x")] * 100
            world.producer.send_many(messages, session=session)
    assert world.producer.flush()
    assert world.transport.calls["send"] == 1
    assert len([text for text in statements.texts if text.startswith("DELETE")]) == 2
    assert len(statements.of_outbox()) == 2
    assert world.stored_ids() == set()


def test_deletes_under_load_are_at_most_one_for_a_hundred_messages(world: World) -> None:
    statements = sibling_statements(world)
    publisher = world.producer.publisher
    total = now_ms = 0
    while total < 2_000:  # two messages a millisecond, stepped as the thread would
        send_each(world, 2)
        total += 2
        publisher.step(now_ms / 1000)
        now_ms += 1
    publisher.step(now_ms / 1000 + 1)
    publisher.step(now_ms / 1000 + 2)
    deletes = [text for text in statements.texts if text.startswith("DELETE")]
    assert publisher.stats.deleted == total
    assert len(deletes) <= total * 0.01
    assert publisher.stats.requests <= total / 10


def test_an_idle_publisher_sends_at_once_and_a_busy_one_gathers(world: World) -> None:
    publisher = world.producer.publisher
    send_each(world, 1)
    assert publisher.step(1.0).sent == 1
    send_each(world, 1)
    waiting = publisher.step(1.004)
    assert (waiting.sent, waiting.wake_at_messages) == (0, 1_000)
    assert waiting.wait_s == pytest.approx(0.006)
    assert publisher.step(1.011).sent == 1
    assert publisher.step(1.2).deleted == 2
    send_each(world, 1)
    assert publisher.step(1.3).sent == 1


def test_a_batch_ends_at_its_bytes(tmp_path: Path) -> None:
    with a_world(tmp_path, batch_bytes=250_000) as world:
        for _ in range(3):
            world.producer.send_now(Message(SUBJECT, bytes(100_000)))
        assert world.producer.publisher.step(0.0, is_hurried=True).sent == 2
        assert world.producer.publisher.step(0.0, is_hurried=True).sent == 1


def test_a_transaction_longer_than_the_takeover_is_claimed_anew_before_the_send(
    world: World,
) -> None:
    with Session(world.engine) as session, session.begin():
        world.producer.send_many([Message(SUBJECT, "a")] * 101, session=session)
        world.clock.advance(60_000)
    with Session(world.engine) as session, session.begin():
        world.send("taken over", session)
    with Session(world.engine) as session, session.begin():
        world.send("late", session)
    world.clock.advance(60_000)
    world.change(
        f"UPDATE {OUTBOX} SET token = :other WHERE id = (SELECT max(id) - 1 FROM {OUTBOX})",
        WATCHDOG,
    )
    assert world.producer.flush()
    assert sorted(world.sent()) == ["a"] * 101 + ["late"]
    stats = world.producer.stats
    assert (stats.sent, stats.left) == (102, 1)
    assert len(world.stored_ids()) == 1


def test_broker_down_then_up_goes_on_and_loses_nothing(world: World) -> None:
    publisher = world.producer.publisher
    world.broker.faults.is_unreachable = True
    for second in range(3):
        send_each(world, 1)
        assert publisher.step(float(second)).failed == 1
    send_each(world, 5)
    left = publisher.step(2.5)
    assert (left.left, left.failed) == (5, 0)  # the breaker is open: nobody asks the broker
    assert world.transport.calls["send"] == 3
    send_each(world, 1)
    assert publisher.step(3.5).failed == 1  # half open: one try
    world.broker.faults.is_unreachable = False
    send_each(world, 1)
    assert publisher.step(4.0).left == 1
    send_each(world, 1)
    assert publisher.step(6.0).sent == 1
    send_each(world, 1)
    assert publisher.step(6.1).sent == 1
    assert publisher.stats.deleted == 2
    world.make_due()
    sweep(world)
    assert len(world.sent()) == 3 + 5 + 1 + 1 + 2
    assert world.stored_ids() == set()


def test_a_busy_broker_is_left_alone_for_as_long_as_it_asks(world: World) -> None:
    publisher = world.producer.publisher
    world.broker.faults.busy_retry_after_s = 20.0
    send_each(world, 1)
    assert publisher.step(0.0).failed == 1
    ((delay_ms,),) = world.read(f"SELECT due_at_ms - unixepoch() * 1000 FROM {OUTBOX}")
    assert delay_ms > 15_000
    world.broker.faults.busy_retry_after_s = None
    send_each(world, 1)
    assert publisher.step(19.0).left == 1
    send_each(world, 1)
    assert publisher.step(21.0).sent == 1


def test_a_locked_database_delays_deletes_and_settles_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qmq_client.outbox.sqlite.BUSY_MS_MAX", 1)
    with a_world(tmp_path) as world:
        publisher = world.producer.publisher
        ids = send_each(world, 2)
        world.broker.faults.refused_ids = {ids[0]}
        with transaction(world.engine):
            locked = publisher.step(0.0, is_hurried=True)
            assert (locked.sent, locked.deleted) == (1, 0)
            assert publisher.stats.database_errors == 2
            assert locked.wait_s == pytest.approx(0.1)
            assert publisher.step(0.2).deleted == 0
        assert publisher.step(0.4).deleted == 1
        assert world.stored_ids() == {ids[0]}  # not parked, so it falls due and is parked later
        world.make_due()
        assert len(sweep(world).parked) == 1


def test_callbacks_tell_what_became_of_each_message(tmp_path: Path) -> None:
    sent: list[str] = []
    failed: list[tuple[str, str]] = []
    options: dict[str, Any] = {
        "on_sent": sent.extend,
        "on_failed": lambda message_id, error: failed.append((message_id, error)),
    }
    with a_world(tmp_path, **options) as world:
        ids = send_each(world, 2)
        world.broker.faults.refused_ids = {ids[1]}
        assert world.producer.flush()
        assert sent == [ids[0]]
        assert [message_id for message_id, _ in failed] == [ids[1]]


def test_rows_stored_before_a_fork_are_left_to_the_parent(world: World) -> None:
    send_each(world, 2)
    inherited = world.producer.publisher
    world.producer.after_fork()
    fresh = world.producer.publisher
    for handed in inherited.queue.take(10):
        fresh.queue.put(handed)
    assert fresh.step(0.0).left == 2
    assert world.sent() == []


def test_the_store_refuses_a_table_with_a_missing_column(world: World) -> None:
    from qmq_client.errors import OutboxMissingError

    world.change(f"ALTER TABLE {OUTBOX} RENAME COLUMN last_error TO other")
    with pytest.raises(OutboxMissingError, match=r"qmq_outbox\.last_error is missing"):
        world.store.check_schema()


def test_the_store_counts_and_purges_what_a_person_asks_for(world: World) -> None:
    assert world.store.oldest_unsent_age_ms() is None
    ids = send_each(world, 5)
    world.change(f"UPDATE {OUTBOX} SET created_at_ms = created_at_ms - 60000 WHERE id = 3")
    age_ms = world.store.oldest_unsent_age_ms()
    assert age_ms is not None
    assert 60_000 <= age_ms < 70_000
    world.change(f"UPDATE {OUTBOX} SET state = 1 WHERE id >= 3")
    counts = world.store.counts()
    assert (counts.live, counts.due, counts.parked) == (2, 0, 3)
    assert len(world.store.list_rows(limit=4)) == 4
    (row,) = world.store.list_rows(message_ids=[bytes.fromhex(ids[0])])
    assert (row.is_owned, row.subject, row.state) == (True, SUBJECT, 0)
    assert world.store.purge(older_than_ms=30_000) == 1
    assert world.store.purge(message_ids=[bytes.fromhex(ids[4])]) == 1
    assert world.store.purge(limit=1) == 1
    assert world.store.purge() == 0
    assert world.stored_ids() == set(ids[:2])


def test_a_closed_store_may_be_used_again(world: World) -> None:
    world.store.close()
    assert world.store.counts().live == 0
