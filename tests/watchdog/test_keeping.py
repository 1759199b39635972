"""What a sweep keeps: the order of a key, sent rows for an audit; and what maintenance deletes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from qmq_client.ids import MESSAGE_IDS
from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.outbox.row import OutboxCounts, RowFilter
from qmq_client.outbox.table import DEFAULT_TABLES, PARKED, SENT, create_tables
from qmq_client.settings.sections import DatabaseSection
from qmq_client.transport.memory import MemoryBroker, MemoryTransport
from qmq_client.wire.message_id import format_message_id
from qmq_watchdog.databases import Database, open_database
from qmq_watchdog.options import DaemonOptions
from qmq_watchdog.sweep import KEYS_FOLLOWED_MAX, Sweep, SweepOptions
from qmq_watchdog.sweep_job import ROWS_PER_TRANSACTION, SweepJob, maintain
from tests.kit.listening import listening
from tests.services.databases import Database as ServedDatabase
from tests.watchdog.rows import OUTBOX, SUBJECT, left, make_due, put_rows, rows_of
from tests.watchdog.transports import HandClock, PickyTransport

INBOX = DEFAULT_TABLES.inbox
HOUR_MS = 3_600_000


@pytest.fixture
def kept(a_database: ServedDatabase) -> Iterator[Database]:
    """On each kind of database; keeps sent rows and inbox ids for an hour."""
    engine = a_database.engine()
    create_tables(engine)
    made = Database(
        name="shop",
        store=OutboxStore(engine),
        engine=engine,
        keep_sent_ms=HOUR_MS,
        keep_inbox_ms=HOUR_MS,
    )
    yield made
    made.close()


def with_key(database: Database, ids: list[bytes], key: str) -> None:
    with database.engine.begin() as connection:
        change = sa.update(OUTBOX).where(OUTBOX.c.message_id.in_(ids)).values(ordering_key=key)
        connection.execute(change)


def stored(broker: MemoryBroker) -> list[str | None]:
    return [message.message_id for message in broker.messages(SUBJECT)]


def test_O4_rows_of_one_key_wait_for_an_earlier_one_that_somebody_else_has(
    kept: Database, broker: MemoryBroker
) -> None:
    ids = put_rows(kept, 4, due_in_ms=60_000)
    with_key(kept, ids[:3], "order-17")
    make_due(kept, ids[:1])
    assert len(kept.store.claim(token=b"the other one's!", limit=1, lease_ms=60_000)) == 1
    make_due(kept, ids[1:])
    counts = Sweep(kept, MemoryTransport(broker)).step()
    assert (counts.sent, counts.held, counts.failed) == (1, 2, 0)
    assert stored(broker) == [format_message_id(ids[3])], "no other row waits for that key"
    waiting = {row.message_id: row for row in rows_of(kept)}
    assert [waiting[each].attempts for each in ids[1:3]] == [0, 0], "held back is no attempt"
    assert [waiting[each].token for each in ids[1:3]] == [None, None], (
        "nobody has to wait for a lease"
    )

    make_due(kept, ids[:3])
    assert Sweep(kept, MemoryTransport(broker)).step().sent == 3
    assert stored(broker)[1:] == [format_message_id(each) for each in ids[:3]]


def test_O4_a_parked_row_stops_those_behind_it_until_a_person_removes_it(
    kept: Database, broker: MemoryBroker
) -> None:
    ids = put_rows(kept, 3)
    with_key(kept, ids, "order-17")
    sweep = Sweep(kept, PickyTransport(broker, ids[:1]), SweepOptions(max_attempts=1))
    for _ in range(2):
        sweep.step()
        make_due(kept, ids[1:])
    assert stored(broker) == []
    assert kept.store.purge(RowFilter(message_ids=ids[:1])) == 1
    assert sweep.step().sent == 2
    assert stored(broker) == [format_message_id(each) for each in ids[1:]]


def test_O4_those_behind_a_row_that_was_sent_need_not_wait_for_their_time(
    kept: Database, broker: MemoryBroker
) -> None:
    """A key with steady traffic would never catch up otherwise."""
    ids = put_rows(kept, 30, due_in_ms=60_000)
    with_key(kept, ids, "order-17")
    with kept.engine.begin() as connection:
        free = sa.update(OUTBOX).where(OUTBOX.c.message_id.in_(ids[:20]))
        connection.execute(free.values(token=None))  # given back; the others have an owner
    make_due(kept, ids[:1])
    counts = Sweep(kept, MemoryTransport(broker), SweepOptions(batch_rows=7)).step()
    assert (counts.sent, counts.held) == (20, 0)
    assert stored(broker) == [format_message_id(each) for each in ids[:20]]


def test_O4_those_behind_a_row_that_was_sent_are_not_forgotten_over_a_claim_that_is_ahead(
    kept: Database, broker: MemoryBroker
) -> None:
    """Two full batches without keys first: the next claim is then begun ahead of time."""
    put_rows(kept, 30)
    ids = put_rows(kept, 20, due_in_ms=60_000)
    with_key(kept, ids, "order-17")
    with kept.engine.begin() as connection:
        given_back = sa.update(OUTBOX).where(OUTBOX.c.message_id.in_(ids[1:]))
        connection.execute(given_back.values(token=None))
        # In the third batch, with others after it
        soon = sa.update(OUTBOX).where(OUTBOX.c.message_id == ids[0])
        connection.execute(soon.values(due_at_ms=2))
        rows = [row.message_id for row in rows_of(kept)][:30]
        for due_at_ms, some in ((1, rows[:20]), (3, rows[20:])):
            change = sa.update(OUTBOX).where(OUTBOX.c.message_id.in_(some))
            connection.execute(change.values(due_at_ms=due_at_ms))
    counts = Sweep(kept, MemoryTransport(broker), SweepOptions(batch_rows=7)).step()
    assert (counts.sent, counts.held, left(kept) - sent_rows(kept)) == (50, 0, set())
    assert [each for each in stored(broker) if each in set(map(format_message_id, ids))] == [
        format_message_id(each) for each in ids
    ]


def test_O4_more_keys_than_one_claim_asks_for_are_all_followed(
    kept: Database, broker: MemoryBroker
) -> None:
    count = KEYS_FOLLOWED_MAX + 5
    first, second = put_rows(kept, count), put_rows(kept, count, due_in_ms=60_000)
    with kept.engine.begin() as connection:
        keys = {each: f"order-{i % count}" for i, each in enumerate(first + second)}
        of_row = sa.case(keys, value=OUTBOX.c.message_id)
        connection.execute(sa.update(OUTBOX).values(ordering_key=of_row))
        given_back = sa.update(OUTBOX).where(OUTBOX.c.message_id.in_(second))
        connection.execute(given_back.values(token=None))
    assert Sweep(kept, MemoryTransport(broker)).step().sent == 2 * count


def test_a_long_tail_of_a_key_goes_in_order_over_many_batches(
    kept: Database, broker: MemoryBroker
) -> None:
    ids = put_rows(kept, 60)
    with_key(kept, ids, "order-17")
    sweep = Sweep(kept, MemoryTransport(broker), SweepOptions(batch_rows=7))
    while sweep.step().claimed:
        make_due(kept, left(kept) - sent_rows(kept))
    assert stored(broker) == [format_message_id(each) for each in ids]


def test_O7_parked_rows_are_chosen_by_id_subject_error_and_age_on_every_database(
    kept: Database,
) -> None:
    ids = put_rows(kept, 6)
    with kept.engine.begin() as connection:
        park = sa.update(OUTBOX).values(state=PARKED, last_error="409: 50% of it_self")
        connection.execute(park.where(OUTBOX.c.message_id.in_(ids[:4])))
        other = sa.update(OUTBOX).where(OUTBOX.c.message_id == ids[1])
        connection.execute(other.values(subject="stock.moved", last_error="409: 50 of itself"))
        old = sa.update(OUTBOX).where(OUTBOX.c.message_id == ids[2])
        connection.execute(old.values(created_at_ms=kept.store.now_ms - HOUR_MS))

    def found(chosen: RowFilter) -> list[bytes]:
        return [bytes(row.message_id) for row in kept.store.list_rows(chosen, state=PARKED)]

    assert found(RowFilter(subject="stock.moved")) == [ids[1]]
    assert set(found(RowFilter(error="50% of it_"))) == {ids[0], ids[2], ids[3]}
    assert found(RowFilter(older_than_ms=HOUR_MS // 2)) == [ids[2]]
    assert found(RowFilter(message_ids=ids[3:], error="409")) == [ids[3]]
    assert kept.store.counts(rows_max=3) == OutboxCounts(live=2, due=2, parked=3)
    assert kept.store.retry(RowFilter(older_than_ms=HOUR_MS // 2)) == 1
    assert kept.store.purge(RowFilter(subject="stock.moved")) == 1
    assert kept.store.purge(RowFilter(message_ids=ids[4:])) == 0, "they are not parked"
    assert left(kept) == {*ids} - {ids[1]}
    assert kept.store.counts() == OutboxCounts(live=3, due=3, parked=2)


def sent_rows(database: Database) -> set[bytes]:
    return {row.message_id for row in rows_of(database) if row.state == SENT}


def test_accepted_rows_are_kept_for_an_audit_and_deleted_when_their_time_is_over(
    kept: Database, broker: MemoryBroker
) -> None:
    ids = put_rows(kept, 5)
    sweep = Sweep(kept, MemoryTransport(broker))
    assert sweep.step().sent == 5
    assert sent_rows(kept) == set(ids)
    assert sweep.step().claimed == 0, "what was sent is not sent again"
    assert maintain(kept).sent_purged == 0
    make_due(kept, ids[:2])
    assert maintain(kept).sent_purged == 2
    assert left(kept) == set(ids[2:])
    assert kept.store.oldest_unsent_age_ms() is None


def put_inbox(database: Database, count: int, *, age_ms: int, group: str = "billing") -> None:
    rows = [{"consumer_group": group, "message_id": MESSAGE_IDS.next_id()} for _ in range(count)]
    values = {"received_at_ms": database.store.now_ms - age_ms}
    with database.engine.begin() as connection:
        connection.execute(sa.insert(INBOX).values(values), rows)


def inbox_count(database: Database) -> int:
    with database.engine.connect() as connection:
        return connection.scalar(sa.select(sa.func.count()).select_from(INBOX)) or 0


def test_C5_inbox_ids_of_all_groups_are_deleted_when_their_time_is_over_in_small_transactions(
    kept: Database,
) -> None:
    put_inbox(kept, ROWS_PER_TRANSACTION, age_ms=2 * HOUR_MS)
    put_inbox(kept, 30, age_ms=2 * HOUR_MS, group="mail")
    put_inbox(kept, 20, age_ms=0)
    assert maintain(kept, lambda: True).inbox_purged == ROWS_PER_TRANSACTION, "and then a stop"
    assert maintain(kept).inbox_purged == 30
    assert (maintain(kept).inbox_purged, inbox_count(kept)) == (0, 20)


def test_a_purge_that_a_deadlock_with_a_consumer_undid_is_done_again(kept: Database) -> None:
    put_inbox(kept, 3, age_ms=2 * HOUR_MS)
    met: list[str] = []

    def meet(*arguments: object) -> None:
        statement = str(arguments[2])
        if statement.startswith("DELETE") and INBOX.name in statement and not met:
            met.append(statement)
            victim = RuntimeError(1213, "Deadlock found when trying to get lock")
            raise sa.exc.OperationalError(statement, None, victim)

    with listening(sa.Engine, before_cursor_execute=meet):
        assert maintain(kept).inbox_purged == 3
    assert met
    assert inbox_count(kept) == 0


def test_inbox_ids_stay_forever_where_no_time_is_set(kept: Database) -> None:
    put_inbox(kept, 3, age_ms=1_000 * HOUR_MS)
    for_ever = Database(name="shop", store=kept.store, engine=kept.engine)
    assert maintain(for_ever).inbox_purged == 0
    assert inbox_count(kept) == 3


def test_the_daemon_does_maintenance_from_time_to_time(
    database: Database, broker: MemoryBroker, tmp_path: Path
) -> None:
    keeping = Database(name="shop", store=database.store, engine=database.engine, keep_sent_ms=1)
    clock = HandClock()
    job = SweepJob(
        Sweep(keeping, MemoryTransport(broker)), DaemonOptions(), lambda: 0.0, clock=clock
    )
    ids = put_rows(keeping, 3)
    job.step(lambda: False)
    make_due(keeping, ids)
    job.step(lambda: False)
    assert left(keeping) == set(ids)
    clock.elapsed_s += DaemonOptions().maintenance_s
    job.step(lambda: False)
    assert left(keeping) == set()


def test_maintenance_cut_short_by_a_stop_continues_with_the_next_sweep(
    database: Database, broker: MemoryBroker
) -> None:
    clock = HandClock()
    job = SweepJob(
        Sweep(database, MemoryTransport(broker)), DaemonOptions(), lambda: 0.0, clock=clock
    )
    put_rows(database, ROWS_PER_TRANSACTION + 1)
    with database.engine.begin() as connection:
        connection.execute(sa.update(OUTBOX).values(state=SENT))
    clock.elapsed_s += DaemonOptions().maintenance_s
    stops = iter((False, True))
    job.step(lambda: next(stops))
    assert len(left(database)) == 1
    job.step(lambda: False)
    assert left(database) == set()


def test_maintenance_says_that_more_is_left_of_the_ids_of_an_inbox_too(kept: Database) -> None:
    put_inbox(kept, ROWS_PER_TRANSACTION + 1, age_ms=2 * HOUR_MS)
    assert maintain(kept, lambda: True).is_cut_short
    assert not maintain(kept).is_cut_short
    assert inbox_count(kept) == 0


def test_how_long_rows_are_kept_is_configured_in_seconds(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    section = DatabaseSection(name="shop", url=url, keep_sent_s=1.5, keep_inbox_s=60)
    made = open_database(section, {})
    assert (made.keep_sent_ms, made.keep_inbox_ms) == (1_500, 60_000)
    made = open_database(DatabaseSection(name="shop", url=url), {})
    assert (made.keep_sent_ms, made.keep_inbox_ms) == (None, None)
