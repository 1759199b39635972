"""The publisher under load, beside a slow broker and a locked database, and its store."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client.message import Message
from qmq_client.outbox.row import RowFilter
from qmq_client.publishing.publisher import Deletes
from qmq_client.transactional import transaction
from tests.client.publishing import (
    WATCHDOG,
    send_each,
    sibling_statements,
    sweep,
)
from tests.client.world import OUTBOX, SUBJECT, World, a_world


def test_a_thousand_waiting_messages_are_one_look_one_request_and_two_deletes(world: World) -> None:
    statements = sibling_statements(world)
    for _ in range(10):
        with Session(world.engine) as session, session.begin():
            messages = [Message(SUBJECT, "x")] * 100
            world.producer.send_many(messages, session=session)
    assert world.producer.flush()
    assert world.memory.calls["send"] == 1
    assert len([text for text in statements.texts if text.startswith("DELETE")]) == 2
    assert len(statements.of_outbox()) == 3
    assert world.stored_ids() == set()


def test_deletes_under_load_are_at_most_one_for_a_hundred_messages(world: World) -> None:
    statements = sibling_statements(world)
    publisher = world.producer._publisher
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


@pytest.mark.parametrize("committed_at_ms", [3, 30, 300, None])
def test_S6_a_row_that_is_not_there_is_looked_for_after_5_50_and_500_ms_and_then_left(
    world: World, committed_at_ms: int | None
) -> None:
    """The hint of a connection comes before its COMMIT, which hangs here, or never comes."""

    def hang(_: Any) -> None:
        raise sqlite3.OperationalError

    statements, publisher = sibling_statements(world), world.producer._publisher
    began_s, looks = world.clock.monotonic_s(), list[int]()
    with world.engine.connect() as connection:
        connection.begin()
        world.send("a", connection)
        world.commits.now = hang
        with pytest.raises(sa.exc.OperationalError):
            connection.commit()
        for at_ms in range(600):
            if at_ms == committed_at_ms:
                world.commits.real(connection.connection)
            before = len(statements.of_outbox())
            publisher.step(began_s + at_ms / 1000)
            looks += [at_ms] * (publisher.stats.sent == 0 and len(statements.of_outbox()) > before)
        world.commits.now = world.commits.real
    all_looks = [1, 6, 56, 556]
    assert looks == [each for each in all_looks if each < (committed_at_ms or 600)]
    assert publisher.stats.sent == len(world.sent()) == (committed_at_ms is not None)
    assert publisher.stats.gone == (committed_at_ms is None)


def test_an_idle_publisher_sends_at_once_and_a_busy_one_gathers(world: World) -> None:
    publisher = world.producer._publisher
    send_each(world, 1)
    assert publisher.step(1.0).sent == 1
    send_each(world, 1)
    waiting = publisher.step(1.004)
    assert (waiting.sent, waiting.wake_at_messages) == (0, 4_000)
    assert waiting.wait_s == pytest.approx(0.016)
    assert publisher.step(1.021).sent == 1
    assert publisher.step(1.3).deleted == 2
    send_each(world, 1)
    assert publisher.step(1.4).sent == 1


def test_rows_that_are_looked_for_again_later_fill_no_batch(tmp_path: Path) -> None:
    """Else a message that is gathered for would be waited for without a wait."""

    def hang(_: Any) -> None:
        raise sqlite3.OperationalError

    with a_world(tmp_path, batch_messages=2) as world:
        publisher, began_s = world.producer._publisher, world.clock.monotonic_s()
        world.commits.now = hang
        with pytest.raises(sa.exc.OperationalError), world.engine.begin() as connection:
            world.producer.send_many([Message(SUBJECT, "x")] * 2, session=connection)
        world.commits.now = world.commits.real
        for at_s in (0.001, 0.006):  # again after 5 ms, and after 50
            assert publisher.step(began_s + at_s).sent == 0
        send_each(world, 1)
        assert publisher.step(began_s + 0.007).sent == 1
        send_each(world, 1)
        waiting = publisher.step(began_s + 0.011)
        assert waiting.sent == 0
        assert waiting.wait_s == pytest.approx(0.016)
        assert publisher.step(began_s + 0.027).sent == 1


def test_deletes_that_are_hurried_while_they_are_put_off_are_waited_for() -> None:
    deletes = Deletes(delay_ms=250)
    deletes.add([b"a"], 1.0)
    deletes.put_off(1.3)
    deletes.hurry(1.1)
    assert not deletes.is_due(1.1, is_hurried=False)
    assert deletes.wait_s(1.1) == pytest.approx(0.2)
    assert deletes.is_due(1.3, is_hurried=False)


def test_a_batch_ends_at_its_bytes(tmp_path: Path) -> None:
    with a_world(tmp_path, batch_bytes=250_000) as world:
        for _ in range(3):
            world.producer.send_now(Message(SUBJECT, bytes(100_000)))
        assert world.producer._publisher.step(0.0, is_hurried=True).sent == 2
        assert world.producer._publisher.step(0.0, is_hurried=True).sent == 1


def test_a_transaction_longer_than_the_takeover_is_claimed_again_before_the_send(
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
        f"UPDATE {OUTBOX} SET token = ? WHERE id = (SELECT max(id) - 1 FROM {OUTBOX})",
        WATCHDOG,
    )
    assert world.producer.flush().is_done
    assert sorted(world.sent()) == ["a"] * 101 + ["late"]
    stats = world.producer.stats
    assert (stats.sent, stats.left) == (102, 1)
    assert len(world.stored_ids()) == 1


@pytest.mark.parametrize(("waited_s", "reclaimed"), [(2.4, 0), (2.6, 1)])
def test_O5_a_row_that_waited_half_its_takeover_is_claimed_again_before_the_send(
    world: World, waited_s: float, reclaimed: int
) -> None:
    """What is left of it is for the request: a watchdog must not take the row meanwhile."""
    send_each(world, 1)
    publisher = world.producer._publisher
    assert publisher.step(world.clock.monotonic_s() + waited_s).sent == 1
    assert publisher.stats.reclaimed == reclaimed


def test_broker_down_then_up_continues_and_loses_nothing(world: World) -> None:
    publisher = world.producer._publisher
    world.broker.faults.is_unreachable = True
    for second in range(3):
        send_each(world, 1)
        assert publisher.step(float(second)).failed == 1
    send_each(world, 5)
    left = publisher.step(2.25)
    assert (left.left, left.failed) == (5, 0)  # the breaker is open: nobody asks the broker
    assert world.memory.calls["send"] == 3
    send_each(world, 1)
    assert publisher.step(2.75).failed == 1  # half open: one try
    world.broker.faults.is_unreachable = False
    send_each(world, 1)
    assert publisher.step(3.5).left == 1
    send_each(world, 1)
    assert publisher.step(4.0).sent == 1
    send_each(world, 1)
    assert publisher.step(4.3).sent == 1
    assert publisher.stats.deleted == 2
    world.make_due()
    sweep(world)
    assert len(world.sent()) == 3 + 5 + 1 + 1 + 2
    assert world.stored_ids() == set()


def test_a_busy_broker_is_left_alone_for_as_long_as_it_asks(world: World) -> None:
    publisher = world.producer._publisher
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
    monkeypatch.setattr("qmq_client.outbox.database.sqlite.BUSY_MS_MAX", 1)
    with a_world(tmp_path) as world:
        publisher = world.producer._publisher
        ids = send_each(world, 2)
        world.broker.faults.refused_ids = {ids[0]}
        with transaction(world.engine) as connection:
            connection.exec_driver_sql("SELECT 1")
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
        assert world.producer.flush().is_done
        assert sent == [ids[0]]
        assert [message_id for message_id, _ in failed] == [ids[1]]


def test_an_error_in_a_callback_is_logged_and_keeps_nothing_from_anybody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Any] = []

    def fail(*given: Any) -> None:
        told.append(given)
        raise ZeroDivisionError

    with a_world(tmp_path, on_sent=fail, on_failed=fail) as world:
        ids = send_each(world, 3)
        world.broker.faults.refused_ids = set(ids[1:])
        flushed = world.producer.flush()
        assert (flushed.is_done, flushed.accepted) == (True, 1)
        assert [given[0] for given in told] == [[ids[0]], *ids[1:]]
        assert caplog.text.count("callback failed") == len(told)
        assert world.stored_ids() == set(ids[1:])


def test_rows_stored_before_a_fork_are_left_to_the_parent(world: World) -> None:
    send_each(world, 2)
    inherited = world.producer._publisher
    world.producer._after_fork()
    fresh = world.producer._publisher
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
    (row,) = world.store.list_rows(RowFilter(message_ids=[bytes.fromhex(ids[0])]))
    assert (row.is_owned, row.subject, row.state) == (True, SUBJECT, 0)
    assert world.store.purge(RowFilter(older_than_ms=30_000)) == 1
    assert world.store.purge(RowFilter(message_ids=[bytes.fromhex(ids[4])])) == 1
    assert world.store.purge() == 1
    assert world.store.purge() == 0
    assert world.stored_ids() == set(ids[:2])


def test_a_closed_store_may_be_used_again(world: World) -> None:
    world.store.close()
    assert world.store.counts().live == 0
