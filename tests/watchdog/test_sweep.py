"""One sweep: what it takes, what it leaves, where it ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from qmq_client.errors import DatabaseUnavailableError, OutboxMissingError
from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.outbox.row import RowFilter
from qmq_client.outbox.table import LIVE, PARKED, create_tables
from qmq_client.transport.memory import MemoryBroker, MemoryTransport
from qmq_client.wire.message_id import format_message_id
from qmq_watchdog.databases import Database
from qmq_watchdog.sweep import BATCH_BYTES_AIM, PROBE_ROWS, Sweep, SweepOptions
from tests.watchdog.rows import (
    DEAD_SENDER,
    damage,
    executed,
    left,
    make_due,
    put_rows,
    rows_of,
)
from tests.watchdog.transports import HandClock, PickyTransport, WatchedTransport, sent_ids

DAY_MS = 86_400_000


def test_what_is_due_is_sent_and_deleted_and_the_rest_is_left(
    database: Database, broker: MemoryBroker
) -> None:
    due = put_rows(database, 3)
    waiting = put_rows(database, 2, due_in_ms=60_000)
    counts = Sweep(database, MemoryTransport(broker)).step()
    assert (counts.claimed, counts.sent, counts.failed, counts.parked) == (3, 3, 0, 0)
    assert sent_ids(broker) == [format_message_id(each) for each in due]
    assert left(database) == set(waiting)


def test_an_empty_outbox_costs_no_request(database: Database, broker: MemoryBroker) -> None:
    transport = MemoryTransport(broker)
    assert Sweep(database, transport).step().claimed == 0
    assert transport.calls["send"] == 0


def test_full_batches_are_followed_by_more_and_the_records_arrive_once(
    database: Database, broker: MemoryBroker
) -> None:
    put_rows(database, 1_000)
    transport = MemoryTransport(broker)
    counts = Sweep(database, transport, SweepOptions(batch_rows=300)).step()
    assert (counts.claimed, counts.sent, counts.is_cut_short) == (1_000, 1_000, False)
    assert len(sent_ids(broker)) == len(set(sent_ids(broker))) == 1_000
    # Claims of 100, 200, 300, 300, 100: they grow while nothing speaks against it.
    assert transport.calls["send"] == 5


def test_a_sweep_ends_at_its_bound_of_rows(database: Database, broker: MemoryBroker) -> None:
    put_rows(database, 30)
    options = SweepOptions(batch_rows=10, rows_max=25)
    counts = Sweep(database, MemoryTransport(broker), options).step()
    assert (counts.claimed, counts.is_cut_short) == (25, True)
    assert len(left(database)) == 5


def test_a_sweep_ends_at_its_bound_of_seconds(database: Database, broker: MemoryBroker) -> None:
    put_rows(database, 30)
    clock = HandClock()
    transport = WatchedTransport(broker, on_send=lambda: setattr(clock, "elapsed_s", 99.0))
    options = SweepOptions(batch_rows=10, seconds_max=60.0)
    counts = Sweep(database, transport, options, clock=clock).step()
    assert (counts.sent, counts.is_cut_short) == (10, True)


def test_a_sweep_ends_after_its_batch_when_told_to_stop(
    database: Database, broker: MemoryBroker
) -> None:
    put_rows(database, 30)
    counts = Sweep(database, MemoryTransport(broker), SweepOptions(batch_rows=10)).step(
        lambda: True
    )
    assert (counts.sent, counts.is_cut_short) == (10, True)


def test_large_records_make_the_next_claim_smaller(
    database: Database, broker: MemoryBroker
) -> None:
    body = bytes(BATCH_BYTES_AIM // 10)
    # However slow this machine is, no claim ends before it is sent.
    options = SweepOptions(batch_rows=40, lease_ms=600_000)
    sweep = Sweep(database, MemoryTransport(broker), options)
    for claims in ([40, 0], [9, 9, 9, 9, 4, 0]):
        put_rows(database, 40, body=body)
        with executed() as statements:
            assert sweep.step().sent == 40
        taken = sum(each.verb == "UPDATE" for each in statements)
        assert taken == len(claims), claims


def test_W5_no_transaction_is_open_while_a_request_is_under_way(
    database: Database, broker: MemoryBroker, tmp_path: Path
) -> None:
    put_rows(database, 3)
    other = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}", connect_args={"timeout": 0})

    def write_meanwhile() -> None:
        with other.connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    assert Sweep(database, WatchedTransport(broker, write_meanwhile)).step().sent == 3
    other.dispose()


def test_W5_a_claim_is_one_statement_in_one_transaction(
    database: Database, broker: MemoryBroker
) -> None:
    put_rows(database, 3)
    sweep = Sweep(database, MemoryTransport(broker))
    sweep.step()  # looks at the tables once
    put_rows(database, 3)
    with executed() as statements:
        sweep.step()
    assert [each.verb for each in statements] == [
        *("BEGIN", "UPDATE", "COMMIT"),
        *("BEGIN", "DELETE", "COMMIT"),
    ]


def test_no_statement_walks_through_the_rows_that_wait(
    database: Database, broker: MemoryBroker
) -> None:
    put_rows(database, 1_000)
    with executed() as statements:
        sweep = Sweep(database, MemoryTransport(broker))
        assert sweep.step().sent == 1_000
        database.store.reclaim(put_rows(database, 500), token=DEAD_SENDER, lease_ms=1)
    plans: dict[str, set[str]] = {"UPDATE": set(), "DELETE": set()}
    with database.engine.connect() as connection:
        for each in statements:
            if each.verb in plans:
                explain = f"EXPLAIN QUERY PLAN {each.text}"
                found = connection.exec_driver_sql(explain, each.parameters).all()
                plans[each.verb] |= {
                    step.detail.replace("victim", "qmq_outbox").replace("main.", "")
                    for step in found
                    if "qmq_outbox" in step.detail or "victim" in step.detail
                }
    by_id = "SEARCH qmq_outbox USING INDEX sqlite_autoindex_qmq_outbox_1 (message_id=?)"
    assert plans["DELETE"] == {by_id}
    assert plans["UPDATE"] == {
        by_id,
        "SEARCH qmq_outbox USING INTEGER PRIMARY KEY (rowid=?)",
        "SEARCH qmq_outbox USING INDEX qmq_outbox_state_due (state=? AND due_at_ms<?)",
    }


@pytest.mark.parametrize("off_ms", [-DAY_MS, DAY_MS])
def test_W4_an_application_clock_that_is_a_day_off_changes_nothing(
    database: Database, broker: MemoryBroker, off_ms: int
) -> None:
    due = put_rows(database, 2)
    put_rows(database, 2, due_in_ms=60_000)
    clock = HandClock(now_ms=1_700_000_000_000 + off_ms)
    with executed() as statements:
        counts = Sweep(database, PickyTransport(broker, due[:1]), clock=clock).step()
    assert (counts.claimed, counts.sent, counts.failed) == (2, 1, 1)
    given = [value for each in statements for value in each.parameters]
    assert given
    assert not [value for value in given if isinstance(value, int) and value > 10**11], (
        "a time of the application went to the database"
    )


def test_W9_a_lower_id_that_is_committed_later_is_found(
    database: Database, broker: MemoryBroker
) -> None:
    put_rows(database, 1, first_id=10)
    sweep = Sweep(database, MemoryTransport(broker))
    assert sweep.step().sent == 1
    put_rows(database, 1, first_id=5)
    assert sweep.step().sent == 1
    assert left(database) == set()


def test_O6_bad_rows_with_the_lowest_ids_do_not_delay_the_good_ones(
    database: Database, broker: MemoryBroker
) -> None:
    bad = put_rows(database, 60)
    good = put_rows(database, 20)
    sweep = Sweep(database, PickyTransport(broker, bad), SweepOptions(batch_rows=50))
    counts = sweep.step()
    assert (counts.sent, counts.failed, counts.parked) == (20, 60, 0)
    assert left(database) == set(bad)
    assert set(sent_ids(broker)) == {format_message_id(each) for each in good}
    assert sweep.step().claimed == 0, "each bad row waits for a time of its own"


def test_O6_a_damaged_record_is_parked_and_its_neighbours_continue(
    database: Database, broker: MemoryBroker
) -> None:
    ids = put_rows(database, 5)
    damage(database, ids[2])
    counts = Sweep(database, MemoryTransport(broker)).step()
    assert (counts.sent, counts.parked) == (4, 1)
    assert left(database) == {ids[2]}


def test_O7_a_row_is_parked_after_its_attempts_and_retry_arms_it_again(
    database: Database, broker: MemoryBroker
) -> None:
    (message_id,) = put_rows(database, 1)
    transport = PickyTransport(broker, [message_id])
    sweep = Sweep(database, transport, SweepOptions(max_attempts=3))
    outcomes = []
    for _ in range(3):
        counts = sweep.step()
        outcomes.append((counts.failed, counts.parked))
        make_due(database)
    assert outcomes == [(1, 0), (1, 0), (0, 1)]
    (row,) = rows_of(database)
    assert (row.state, row.attempts, row.token) == (PARKED, 3, None)
    assert "something is odd" in row.last_error
    assert sweep.step().claimed == 0, "a parked row waits for a person"

    transport.bad.clear()
    assert database.store.retry(RowFilter(message_ids=[message_id])) == 1
    (row,) = rows_of(database)
    assert (row.state, row.attempts) == (LIVE, 0)
    assert sweep.step().sent == 1
    assert left(database) == set()


def test_O2_rows_whose_answer_was_lost_stay_and_are_stored_once(
    database: Database, broker: MemoryBroker
) -> None:
    ids = put_rows(database, 3)
    broker.faults.lost_answers = 1
    sweep = Sweep(database, MemoryTransport(broker))
    counts = sweep.step()
    assert (counts.sent, counts.failed, counts.unreachable) == (0, 3, True)
    assert left(database) == set(ids)
    make_due(database)
    assert sweep.step().sent == 3
    assert len(sent_ids(broker)) == 3


def test_an_absent_broker_ends_the_sweep_after_one_small_batch(
    database: Database, broker: MemoryBroker
) -> None:
    put_rows(database, 500)
    broker.faults.is_unreachable = True
    transport = MemoryTransport(broker)
    counts = Sweep(database, transport).step()
    assert (counts.claimed, counts.failed, counts.unreachable) == (PROBE_ROWS, PROBE_ROWS, True)
    assert transport.calls["send"] == 1


def test_a_watchdog_that_slept_through_its_claim_does_not_send(
    database: Database, broker: MemoryBroker
) -> None:
    put_rows(database, 3)
    clock = HandClock()
    clock.step_s = 6.0  # longer than the lease, whenever anybody looks
    transport = MemoryTransport(broker)
    counts = Sweep(database, transport, clock=clock).step()
    assert (counts.claimed, counts.lost, counts.sent) == (3, 3, 0)
    assert transport.calls["send"] == 0
    assert len(left(database)) == 3


def test_W2_a_late_owner_changes_no_row_and_the_broker_stores_once(
    database: Database, broker: MemoryBroker
) -> None:
    ids = put_rows(database, 4)
    other = Sweep(database, MemoryTransport(broker))
    others = []

    def another_takes_over() -> None:
        make_due(database)
        others.append(other.step())

    counts = Sweep(database, WatchedTransport(broker, another_takes_over)).step()
    assert others[0].sent == 4
    assert (counts.sent, counts.lost) == (4, 4), "accepted again, but no row was ours any more"
    assert len(sent_ids(broker)) == len(ids)


def test_W2_a_late_owner_does_not_park_or_delay_what_another_claimed(
    database: Database, broker: MemoryBroker
) -> None:
    ids = put_rows(database, 2)
    damage(database, ids[0])
    token = b"the other one's!"

    def another_claims() -> None:
        make_due(database)
        assert len(database.store.claim(token=token, limit=10, lease_ms=60_000)) == 2

    counts = Sweep(database, WatchedTransport(broker, another_claims)).step()
    assert counts.lost == 2
    assert [(row.state, row.token) for row in rows_of(database)] == [(LIVE, token)] * 2


def test_W7_a_database_without_the_tables_is_refused_until_they_are_there(
    tmp_path: Path, broker: MemoryBroker
) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'new.db'}")
    database = Database(name="new", store=OutboxStore(engine), engine=engine)
    sweep = Sweep(database, MemoryTransport(broker))
    error = sweep.step().error
    assert isinstance(error, OutboxMissingError)
    assert "qmq_outbox is missing" in str(error)
    create_tables(engine)
    put_rows(database, 1)
    assert sweep.step().sent == 1
    database.close()


def test_W7_a_table_that_lacks_a_column_is_refused_by_name(
    tmp_path: Path, broker: MemoryBroker
) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'old.db'}")
    create_tables(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE qmq_outbox DROP COLUMN last_error")
    database = Database(name="old", store=OutboxStore(engine), engine=engine)
    error = Sweep(database, MemoryTransport(broker)).step().error
    assert isinstance(error, OutboxMissingError)
    assert "qmq_outbox.last_error" in str(error)
    database.close()


def test_a_database_that_is_no_database_is_an_error_in_the_counts(
    tmp_path: Path, broker: MemoryBroker
) -> None:
    path = tmp_path / "poison.db"
    path.write_bytes(b"not a database at all, but long enough to be read as one" * 100)
    engine = sa.create_engine(f"sqlite:///{path}")
    database = Database(name="poison", store=OutboxStore(engine), engine=engine)
    counts = Sweep(database, MemoryTransport(broker)).step()
    assert isinstance(counts.error, DatabaseUnavailableError)
    assert "database poison" in str(counts.error)
    database.close()


def test_the_rows_of_a_dead_sender_keep_its_token_until_they_are_due(
    database: Database, broker: MemoryBroker
) -> None:
    put_rows(database, 1, due_in_ms=5_000)
    assert Sweep(database, MemoryTransport(broker)).step().claimed == 0
    assert rows_of(database)[0].token == DEAD_SENDER


@pytest.mark.parametrize("bad_id", ["a" * 16, "é", 7, b"short"])
def test_O6_O7_a_row_whose_id_has_the_wrong_type_is_parked_and_its_neighbours_go(
    database: Database, broker: MemoryBroker, bad_id: object
) -> None:
    ids = put_rows(database, 20)
    with database.engine.begin() as connection:
        connection.exec_driver_sql(
            "UPDATE qmq_outbox SET message_id = ?, attempts = 'x' WHERE message_id = ?",
            (bad_id, ids[7]),
        )
    assert len(database.store.list_rows()) == 20
    counts = Sweep(database, MemoryTransport(broker)).step()
    assert (counts.claimed, counts.sent, counts.parked, counts.lost) == (20, 19, 1, 0)
    make_due(database)
    assert Sweep(database, MemoryTransport(broker)).step().claimed == 0
    (row,) = rows_of(database)
    assert (row.state, row.attempts, row.token) == (PARKED, 1, None)
    assert "another message id" in row.last_error
    assert len(sent_ids(broker)) == 19


def test_no_parameter_of_the_outbox_is_in_an_error(database: Database) -> None:
    with database.engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE qmq_outbox")
    with pytest.raises(sa.exc.OperationalError) as caught:
        database.store.delete_sent([b"i" * 16], token=DEAD_SENDER)
    assert "parameters hidden" in str(caught.value)


def test_O3_what_was_claimed_ahead_and_is_not_sent_is_due_again_without_an_attempt(
    database: Database, broker: MemoryBroker
) -> None:
    put_rows(database, 60)
    sent: list[bytes] = []
    transport = WatchedTransport(broker, on_send=lambda: sent.append(b""))
    sweep = Sweep(database, transport, SweepOptions(batch_rows=10))
    counts = sweep.step(lambda: len(sent) == 3)
    assert (counts.sent, counts.claimed, counts.is_cut_short) == (30, 30, True)
    assert len(left(database)) == 30
    assert {row.attempts for row in database.store.list_rows()} == {0}
    assert database.store.counts().due == 30
    assert sweep.step().sent == 30
