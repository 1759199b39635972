"""O4: messages of one subject and key are accepted in the order in which they committed."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client.message import Message
from qmq_client.options import ProducerOptions
from qmq_client.outbox.database.dialect import order_slot
from qmq_client.outbox.row import OutboxRow
from qmq_client.outbox.table import DEFAULT_TABLES, SENT
from qmq_client.producer import Producer
from tests.client.publishing import sweep
from tests.client.world import OUTBOX, SUBJECT, World, a_world
from tests.kit.waiting import DEADLINE_S, wait_for
from tests.services.databases import Database

LOCKS = DEFAULT_TABLES.order_lock


def row_with(key: str) -> OutboxRow:
    return OutboxRow(message_id=bytes(16), subject=SUBJECT, ordering_key=key, record=b"")


@pytest.fixture
def world(tmp_path: Path, a_database: Database) -> Iterator[World]:
    with a_world(tmp_path, database=a_database, order_by_key=True) as made:
        yield made


def send(
    world: World, body: str, key: str | None = "k", *, producer: Producer | None = None
) -> str:
    with Session(world.sync_engine) as session, session.begin():
        return (producer or world.producer).send(Message(SUBJECT, body, key=key), session=session)


def sweep_all(world: World) -> None:
    """What watchdogs do until nothing is left."""
    for _ in range(50):
        if not world.stored_ids():
            return
        world.make_due()
        sweep(world)
    raise AssertionError(f"rows are left: {world.stored_ids()}")


def test_O4_messages_of_a_key_go_at_once_and_leave_nothing_in_the_way(world: World) -> None:
    for i in range(3):
        send(world, f"{i}")
        done = world.producer._publisher.step(i * 10.0)
        assert (done.sent, done.deleted) == (1, 1)  # deleted at once: others wait for that
    assert world.sent() == ["0", "1", "2"]
    assert world.producer.stats.held == 0


def test_O4_a_message_waits_for_an_earlier_one_of_another_process(world: World) -> None:
    other = world.make_producer(order_by_key=True)
    send(world, "first", producer=other)
    send(world, "second")
    send(world, "elsewhere", key="l")
    send(world, "free", key=None)
    publisher = world.producer._publisher
    waits = publisher.step(0.0)
    assert (waits.sent, waits.left, publisher.is_idle) == (2, 0, False)
    assert other.flush()
    assert publisher.step(0.03).sent == 1
    assert sorted(world.sent()[:2]) == ["elsewhere", "free"]
    assert world.sent()[2:] == ["first", "second"]
    other.close()


def test_O4_what_waited_too_long_is_left_and_sent_in_order_by_the_watchdog(world: World) -> None:
    dead = world.make_producer(order_by_key=True)
    send(world, "0", producer=dead)
    dead._publisher.leave_all()
    for i in range(1, 4):
        send(world, f"{i}")
    flushed = world.producer.flush()
    assert (flushed.is_done, flushed.left, world.sent()) == (True, 3, [])
    owned = [row.is_owned for row in world.store.list_rows()]
    assert owned.count(False) == 3, "whoever sends the first one may take them along"
    send(world, "4")
    sweep_all(world)
    assert world.sent() == ["0", "1", "2", "3", "4"]
    dead.close()


def test_O4_commits_enqueued_the_other_way_round_are_sorted(world: World) -> None:
    for i in range(3):
        send(world, f"{i}")
    queue = world.producer._publisher.queue
    handed = queue.take(10)
    for each in reversed(handed):
        queue.put(each)
    assert world.producer.flush()
    assert world.sent() == ["0", "1", "2"]
    assert world.producer.stats.held == 0


def test_O4_a_commit_enqueued_late_holds_the_next_one_back(world: World) -> None:
    send(world, "0")
    publisher = world.producer._publisher
    (late,) = publisher.queue.take(1)
    send(world, "1")
    assert publisher.step(0.0).sent == 0
    publisher.queue.put(late)
    assert publisher.step(0.001).sent == 1
    assert publisher.step(0.1).sent == 1
    assert world.sent() == ["0", "1"]


def test_O4_a_parked_message_stops_its_key_until_a_person_retries_it(world: World) -> None:
    bad = send(world, "0")
    for i in range(1, 4):
        send(world, f"{i}")
    send(world, "other", key="l")
    world.broker.faults.refused_ids = {bad}
    flushed = world.producer.flush()
    assert (flushed.parked, flushed.left, world.sent()) == (1, 3, ["other"])
    world.make_due()
    assert sweep(world).sent == ()
    send(world, "4")
    assert not world.producer.flush()
    world.broker.faults.refused_ids = set()
    assert world.store.retry() == 1
    sweep_all(world)
    assert world.sent() == ["other", "0", "1", "2", "3", "4"]


def test_O4_O6_a_key_with_very_many_waiting_rows_stops_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qmq_client.outbox.committed.waiting.WAITING_ROWS_MAX", 5)
    world.broker.faults.refused_ids = {send(world, "head")}
    assert world.producer.flush().parked == 1
    for i in range(12):
        send(world, f"{i}")
    keys = "lmn"
    for key in keys:
        send(world, f"1 of {key}", key)
        send(world, f"2 of {key}", key)
    done = world.producer._publisher.step(100.0, is_hurried=True)
    assert done.sent == 6
    for key in keys:
        assert [body for body in world.sent() if body.endswith(key)] == [
            f"1 of {key}", f"2 of {key}",
        ]  # fmt: skip
    world.broker.faults.refused_ids = set()
    world.store.retry()
    sweep_all(world)
    assert world.sent()[6:] == ["head", *(f"{i}" for i in range(12))]


def test_O4_the_same_key_of_another_subject_is_another(world: World) -> None:
    world.broker.faults.refused_ids = {send(world, "head")}
    assert world.producer.flush().parked == 1
    for subject in ("elsewhere", SUBJECT):
        with Session(world.sync_engine) as session, session.begin():
            world.producer.send(Message(subject, "x", key="k"), session=session)
    assert world.producer.flush().accepted == 1
    assert [message.body for message in world.broker.messages("elsewhere")] == ["x"]


def test_O4_a_purged_message_lets_the_next_one_pass(world: World) -> None:
    world.broker.faults.refused_ids = {send(world, "0")}
    assert world.producer.flush().parked == 1
    send(world, "1")
    assert world.producer.flush().left == 1
    assert world.store.purge() == 1
    send(world, "2")
    sweep_all(world)
    assert world.sent() == ["1", "2"]


def test_O4_held_rows_count_no_attempt_and_say_why_they_wait(world: World) -> None:
    world.broker.faults.refused_ids = {send(world, "0")}
    send(world, "1")
    world.producer.flush()
    world.make_due()
    sweep(world)
    ((attempts, error),) = world.read(f"SELECT attempts, last_error FROM {OUTBOX} WHERE state = 0")
    assert attempts == 0
    assert "earlier message of its ordering key" in error


#: Waits for locks: as short as each server can.
IMPATIENT = {
    "mysql": "SET innodb_lock_wait_timeout = 1",
    "postgresql": "SET LOCAL lock_timeout = '10ms'",
}


def test_O4_a_send_waits_for_an_earlier_row_of_its_key_that_is_not_committed(
    tmp_path: Path, a_server_database: Database
) -> None:
    """Or the row that was numbered second would be committed, and sent, first."""
    with a_world(tmp_path, database=a_server_database, order_by_key=True) as world:
        with Session(world.engine) as first:
            world.producer.send(Message(SUBJECT, "0", key="k"), session=first)
            for key, outcome in (
                ("k", pytest.raises(sa.exc.OperationalError, match=r"lock timeout|Lock wait")),
                ("another", nullcontext()),
            ):
                with Session(world.engine) as second:
                    second.execute(sa.text(IMPATIENT[world.kind]))
                    with outcome:
                        world.producer.send(Message(SUBJECT, key, key=key), session=second)
                        second.commit()
            first.commit()
        send(world, "1")
        assert world.producer.flush()
        assert sorted(world.sent()) == ["0", "1", "another"]


def test_O4_keys_are_locked_in_one_order_however_the_server_finds_their_locks(
    tmp_path: Path, postgresql_database: Database
) -> None:
    """Or two transactions that send to the same keys would each wait for the other.

    Other servers keep rows in the order of their keys and read them so.
    """
    slots = {order_slot(row_with(key)): key for key in "abc"}
    low, high = min(slots), max(slots)
    locks = sa.select(LOCKS.c.slot).with_for_update(nowait=True)
    waits = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    with a_world(tmp_path, database=postgresql_database, order_by_key=True) as world:
        world.change(f"TRUNCATE {LOCKS}")
        world.change(f"INSERT INTO {LOCKS} VALUES ({high}), ({low})")

        def commit() -> None:
            with Session(world.engine) as session, session.begin():
                session.execute(sa.text("SET LOCAL enable_indexscan = off"))
                session.execute(sa.text("SET LOCAL enable_bitmapscan = off"))
                world.producer.send_many(
                    [Message(SUBJECT, key, key=key) for key in (slots[high], slots[low])],
                    session=session,
                )

        second = threading.Thread(target=commit)
        with world.engine.connect() as first, world.engine.connect() as third:
            first.execute(locks.where(LOCKS.c.slot == low))
            second.start()
            wait_for(lambda: world.read(waits), "it does not wait")
            assert third.scalar(locks.where(LOCKS.c.slot == high)) == high
        second.join(DEADLINE_S)
        assert world.producer.flush()
        assert world.sent() == [slots[high], slots[low]]


def test_O4_an_outage_changes_no_order(world: World) -> None:
    world.broker.faults.is_unreachable = True
    for i in range(3):
        send(world, f"{i}")
    assert world.producer.flush().left == 3
    world.broker.faults.is_unreachable = False
    send(world, "3")
    assert world.producer.flush().accepted == 4, "with what was given back before it"
    assert world.sent() == ["0", "1", "2", "3"]


def test_O4_what_an_open_breaker_left_is_sent_with_the_next_of_its_key(world: World) -> None:
    """Without a watchdog, and before those rows would fall due."""
    world.broker.faults.is_unreachable = True
    for i in range(10):
        send(world, f"{i}")
        world.producer.flush()
    assert world.producer.stats.requests < 10, "the breaker is open"
    world.broker.faults.is_unreachable = False
    world.clock.sleep(world.producer.options.breaker_max_ms / 1000)
    send(world, "last")
    assert world.producer.flush().accepted == 11
    assert world.sent() == [*(f"{i}" for i in range(10)), "last"]


def test_O4_without_the_option_a_key_asks_for_no_order(tmp_path: Path) -> None:
    with a_world(tmp_path) as world:
        other = world.make_producer()
        send(world, "first", producer=other)
        send(world, "second")
        assert world.producer.flush()
        assert other.flush()
        assert world.sent() == ["second", "first"]
        other.close()


@pytest.mark.parametrize("seed", range(3))
def test_O4_whoever_publishes_when_accepted_order_is_commit_order(world: World, seed: int) -> None:
    chance = random.Random(seed)
    producers = [world.producer, *(world.make_producer(order_by_key=True) for _ in range(2))]
    sent: dict[str, list[str]] = {"k": [], "l": []}
    for i in range(60):
        key = chance.choice("kl")
        sent[key].append(f"{key}{i}")
        send(world, f"{key}{i}", key, producer=chance.choice(producers))
        if chance.random() < 0.3:
            world.broker.faults.lost_answers = int(chance.random() < 0.3)
            world.broker.faults.is_unreachable = chance.random() < 0.2
            chance.choice(producers)._publisher.step(i * 10.0)
            world.broker.faults.is_unreachable = False
        if chance.random() < 0.05:
            world.make_due()
            sweep(world)
    world.broker.faults.lost_answers = 0
    for producer in producers:
        producer.flush()
    sweep_all(world)
    for key, bodies in sent.items():
        assert [body for body in world.sent() if body[0] == key] == bodies, f"seed {seed}"
    for producer in producers[1:]:
        producer.close()


def test_O4_uncontended_messages_take_the_direct_path(world: World) -> None:
    """Of ordered messages whose key is used by one process, over 95 of 100 go directly."""
    threads_count, each_count = 4, 50
    options = ProducerOptions(order_by_key=True, keep_sent_s=3600)
    with Producer(world.sync_engine, world.transport, options=options) as producer:

        def work(name: int) -> None:
            for i in range(each_count):
                key = "shared" if i % 2 else f"own {name}"
                send(world, f"{name}.{i}", key, producer=producer)

        threads = [threading.Thread(target=work, args=(name,)) for name in range(threads_count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        producer.flush(DEADLINE_S)
        stats = producer.stats
    total = threads_count * each_count
    assert stats.enqueued == total
    assert stats.sent > 0.95 * total, stats
    assert stats.failed == stats.parked == stats.dropped == 0
    for key in {"shared", *(f"own {name}" for name in range(threads_count))}:
        committed = world.read(
            f"SELECT message_id FROM {OUTBOX} WHERE ordering_key = '{key}' AND state = {SENT} ORDER BY id"
        )
        accepted = [m.message_id for m in world.broker.messages(SUBJECT) if m.key == key]
        assert [bytes(row[0]).hex() for row in committed] == accepted
