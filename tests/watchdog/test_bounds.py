"""Bounds that one database or a dead broker meets: rate, connections, the gate, time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from qmq_client.outbox.table import create_tables
from qmq_client.retry import Backoff
from qmq_client.settings.sections import DatabaseSection, WatchdogSection
from qmq_client.transport.memory import MemoryBroker, MemoryTransport
from qmq_watchdog.claiming import RowRate
from qmq_watchdog.databases import CONNECTIONS_PER_RUN, ConnectionBudget, Database, open_database
from qmq_watchdog.once import sweep_all
from qmq_watchdog.options import DaemonOptions
from qmq_watchdog.outage import BrokerGate
from qmq_watchdog.sweep import PROBE_ROWS, Sweep, SweepOptions
from qmq_watchdog.sweep_job import SweepJob
from tests.kit.waiting import DEADLINE_S, wait_for
from tests.services.databases import Database as ServedDatabase
from tests.watchdog.rows import left, make_database, make_due, put_rows
from tests.watchdog.transports import HandClock, WatchedTransport


def never() -> bool:
    return False


def limited(path: Path, rows_per_s: int) -> Database:
    made = make_database(path)
    return Database(name="shop", store=made.store, engine=made.engine, rows_per_s=rows_per_s)


def test_the_rate_of_a_database_is_bounded_and_it_comes_back_when_more_may_go(
    tmp_path: Path, broker: MemoryBroker
) -> None:
    database, clock = limited(tmp_path / "shop.db", 10), HandClock()
    put_rows(database, 100)
    job = SweepJob(
        Sweep(database, MemoryTransport(broker), clock=clock),
        DaemonOptions(),
        lambda: 0.0,
        clock=clock,
    )
    sent = 0
    while left(database):
        sent += job.step(never).sent
        clock.elapsed_s += job.delay_s
        assert sent <= 10 + clock.elapsed_s * 10
    assert 9.9 <= clock.elapsed_s <= 11.5, "the first row, and ten a second"
    assert job.totals.sweeps < 60, "a few rows each time, not one"
    database.close()


def test_a_single_pass_continues_at_the_rate_of_a_database_until_nothing_is_due(
    tmp_path: Path, broker: MemoryBroker
) -> None:
    database = limited(tmp_path / "shop.db", 400)
    put_rows(database, 600)
    sweep = Sweep(database, MemoryTransport(broker))
    results, are_all_ended = sweep_all([sweep], DEADLINE_S)
    counts = results["shop"]
    assert (counts.sent, counts.is_cut_short, counts.parked_total) == (600, False, 0)
    assert are_all_ended
    assert left(database) == set()
    database.close()


def test_a_single_pass_whose_time_is_over_leaves_the_rest_and_says_so(
    tmp_path: Path, broker: MemoryBroker
) -> None:
    database = limited(tmp_path / "shop.db", 1)
    put_rows(database, 50)
    sweep = Sweep(database, MemoryTransport(broker))
    limits = WatchdogSection(sweep_s_max=0.5)
    results, are_all_ended = sweep_all([sweep], DEADLINE_S, limits=limits)
    assert (results["shop"].sent, results["shop"].is_cut_short) == (1, True)
    assert are_all_ended


def test_a_pause_earns_no_burst() -> None:
    rate = RowRate(10, 0.0)
    assert rate.allowed(1_000.0) == 10
    rate.take(10)
    assert rate.allowed(1_000.0) == 0
    assert rate.wait_s() == 0.25


def test_a_watchdog_that_is_started_again_and_again_keeps_the_rate() -> None:
    sent, now_s = 0, 0.0
    while now_s < 60.0:
        rate = RowRate(100, now_s)
        for _ in range(8):  # two seconds, and it is killed
            allowed = rate.allowed(now_s) or 0
            rate.take(allowed)
            sent += allowed
            now_s += rate.wait_s()
    assert 0.8 <= sent / (100 * now_s) <= 1.0


def test_without_a_rate_nothing_is_bounded() -> None:
    rate = RowRate(0, 0.0)
    rate.take(1_000_000)
    assert (rate.allowed(0.0), rate.wait_s()) == (None, 0.0)


def test_one_row_a_second_is_sent_one_at_a_time() -> None:
    rate = RowRate(1, 0.0)
    rate.take(1)
    assert rate.allowed(0.99) == 0
    assert rate.allowed(1.0) == 1


def test_a_database_at_rest_keeps_one_connection_also_after_claims_ahead(
    a_server_database: ServedDatabase, broker: MemoryBroker
) -> None:
    engine = a_server_database.engine()
    create_tables(engine)
    count = {
        "mysql": "SELECT count(*) FROM information_schema.processlist WHERE db = DATABASE()",
        "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()",
    }[a_server_database.kind]
    database = open_database(DatabaseSection(name="shop", url=a_server_database.url), {})
    most = [0]

    def connections() -> int:
        with engine.connect() as connection:
            found: int = connection.exec_driver_sql(count).scalar_one() - 1
            return found

    put_rows(database, 6 * PROBE_ROWS)
    database.engine.dispose()
    watched = WatchedTransport(broker, lambda: most.append(connections()))
    try:
        assert Sweep(database, watched).step().sent == 6 * PROBE_ROWS
        assert max(most) <= CONNECTIONS_PER_RUN
        # The server counts one that was closed until its process has ended.
        wait_for(lambda: connections() == 1, lambda: f"connections at rest: {connections()}")
    finally:
        database.close()


def test_servers_that_are_named_in_the_query_are_told_apart() -> None:
    """One that is away must not set those of another aside."""
    urls = (
        "postgresql://app@/shop?host=/run/one",
        "postgresql://app@/shop?host=/run/two",
        "mysql://app@/shop?unix_socket=/run/my",
        "postgresql://app@db/shop",
        "postgresql://app@db:5433/shop",
    )
    servers = {open_database(DatabaseSection(name="shop", url=url), {}).server for url in urls}
    assert len(servers) == len(urls)


def used(budget: ConnectionBudget, database: Database, *, was_busy: bool) -> None:
    with database.lock:
        budget.take(database)
        database.store.oldest_unsent_age_ms()
    budget.give_back(database, was_busy=was_busy)


def open_connections(database: Database) -> int:
    pool: Any = database.store._own.engine.pool
    return int(pool.checkedin())


def test_connections_are_kept_while_there_is_room_and_for_those_with_work(tmp_path: Path) -> None:
    databases = [make_database(tmp_path / f"{number}.db") for number in range(4)]
    budget = ConnectionBudget(2)
    for database in databases[:3]:
        used(budget, database, was_busy=False)
    assert [open_connections(each) for each in databases] == [1, 1, 0, 0]
    used(budget, databases[3], was_busy=True)
    assert [open_connections(each) for each in databases] == [0, 1, 0, 1]
    used(budget, databases[2], was_busy=True)
    assert [open_connections(each) for each in databases] == [0, 0, 1, 1]
    used(budget, databases[0], was_busy=True)
    assert [open_connections(each) for each in databases] == [0, 0, 1, 1], "all have work"
    assert budget.kept == 2
    for database in databases:
        database.close()


def test_a_database_in_use_is_not_closed_to_make_room(tmp_path: Path) -> None:
    idle, busy = (make_database(tmp_path / f"{name}.db") for name in ("idle", "busy"))
    budget = ConnectionBudget(1)
    used(budget, idle, was_busy=False)
    with idle.lock:  # about to be swept again
        used(budget, busy, was_busy=True)
        assert open_connections(idle) == 1
    idle.close()
    busy.close()


def gates(clock: HandClock) -> BrokerGate:
    return BrokerGate(Backoff(first_ms=1_000, max_ms=30_000, jitter=0.0), lambda: 0.0, clock)


def test_W8_a_dead_broker_is_tried_by_one_of_many_databases_at_a_time(
    tmp_path: Path, broker: MemoryBroker
) -> None:
    clock = HandClock()
    gate, transport = gates(clock), MemoryTransport(broker)
    databases = [make_database(tmp_path / f"{number}.db") for number in range(10)]
    for database in databases:
        put_rows(database, 1)
    jobs = [
        SweepJob(Sweep(each, transport), DaemonOptions(), lambda: 0.0, clock=clock, gate=gate)
        for each in databases
    ]
    due_s = [0.0] * len(jobs)
    broker.faults.is_unreachable = True
    claimed = 0
    while clock.elapsed_s < 300:
        number = due_s.index(min(due_s))
        clock.elapsed_s = max(clock.elapsed_s, due_s[number])
        make_due(databases[number])
        claimed += jobs[number].step(never).claimed
        due_s[number] = clock.elapsed_s + jobs[number].delay_s
    assert claimed == transport.calls["send"]
    assert transport.calls["send"] <= 18, "2, and then 1, 2, 4, 8, 16, 30, 30, … s apart"
    assert gate.is_shut
    broker.faults.is_unreachable = False
    end_s = clock.elapsed_s + 90
    while any(left(each) for each in databases):
        number = due_s.index(min(due_s))
        clock.elapsed_s = max(clock.elapsed_s, due_s[number])
        assert clock.elapsed_s < end_s
        make_due(databases[number])
        jobs[number].step(never)
        due_s[number] = clock.elapsed_s + jobs[number].delay_s
    assert not gate.is_shut
    for database in databases:
        database.close()


def test_the_gate_stays_open_when_one_batch_fails_among_others_that_do_not() -> None:
    gate = gates(HandClock())
    for _ in range(5):
        gate.on_failure()
        assert gate.wait_s() == 0.0
        gate.on_success()


def test_one_that_has_nothing_to_send_lets_the_next_try_at_once() -> None:
    clock = HandClock()
    gate = gates(clock)
    gate.on_failure()
    gate.on_failure()
    assert gate.wait_s() == 1.0
    clock.elapsed_s += 1.0
    assert gate.wait_s() == 0.0
    assert gate.wait_s() == 2.0, "one tries, the others wait"
    gate.on_nothing()
    assert gate.wait_s() == 0.0
    gate.on_failure(at_least_s=77.0)
    assert gate.wait_s() == 77.0
    gate.on_nothing()
    assert gate.wait_s() == 77.0, "what one had to send is no news of the broker"


def test_W8_what_fails_together_with_others_is_no_further_try() -> None:
    """Or a moment's outage, met by eight at once, would be waited for like one of minutes."""
    clock = HandClock()
    gate = gates(clock)
    for _ in range(8):
        gate.on_failure()
    assert gate.wait_s() == 1.0
    clock.elapsed_s += 1.0
    assert gate.wait_s() == 0.0
    gate.on_failure()
    assert gate.wait_s() == 2.0
    gate.on_failure(at_least_s=77.0)
    gate.on_failure(at_least_s=5.0)
    assert gate.wait_s() == 77.0, "the broker asked one of them to be left alone for long"
    gate.on_success()
    assert gate.wait_s() == 0.0
    gate.on_failure()
    assert gate.wait_s() == 0.0
    gate.on_failure()
    assert gate.wait_s() == 1.0, "another trouble"


def test_W8_while_one_waits_for_a_silent_broker_no_other_does() -> None:
    clock = HandClock()
    gate = gates(clock)
    gate.on_failure()
    gate.on_failure()
    clock.elapsed_s += 1.0
    assert gate.wait_s() == 0.0
    clock.elapsed_s += 30.0
    assert gate.wait_s() == 2.0, "a request may take that long"
    clock.elapsed_s += 30.0
    assert gate.wait_s() == 0.0, "the one that tried was killed, or stopped"


def test_W8_a_broker_that_is_back_is_known_to_all_after_one_batch(
    tmp_path: Path, broker: MemoryBroker
) -> None:
    clock = HandClock()
    gate = gates(clock)
    database = make_database(tmp_path / "shop.db")
    put_rows(database, 3 * PROBE_ROWS)
    sweep = Sweep(database, MemoryTransport(broker), clock=clock)
    job = SweepJob(sweep, DaemonOptions(), lambda: 0.0, clock=clock, gate=gate)
    gate.on_failure()
    gate.on_failure()
    clock.elapsed_s += 1.0
    assert job.step(never).sent == PROBE_ROWS
    assert not gate.is_shut
    assert job.delay_s == 0.0, "there is more"
    assert job.step(never).sent == 2 * PROBE_ROWS
    database.close()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("mysql+pymysql://a@b/c", {"connect_timeout": 3, "read_timeout": 7, "write_timeout": 7}),
        (
            "postgresql+psycopg://a@b/c?options=-csearch_path%3Dx",
            {"connect_timeout": 3, "options": "-csearch_path=x", "tcp_user_timeout": 7000},
        ),
    ],
)
def test_every_connect_and_every_statement_ends_by_itself(
    url: str, expected: dict[str, Any]
) -> None:
    limits = WatchdogSection(connect_s_max=3.0, statement_s_max=7.0)
    database = open_database(DatabaseSection(name="a", url=url), {}, limits)
    dialect = database.engine.dialect
    _, options = dialect.create_connect_args(database.engine.url)
    for listener in dialect.dispatch.do_connect:
        assert listener(dialect, None, (), options) is None
    assert expected.items() <= options.items()


def test_a_postgresql_gives_up_each_statement_and_nothing_of_that_stays_in_its_session(
    postgresql_database: ServedDatabase,
) -> None:
    """Behind a pooler the session is somebody else's a moment later."""
    limits = WatchdogSection(statement_s_max=7.0)
    section = DatabaseSection(name="a", url=postgresql_database.url)
    database = open_database(section, {}, limits)
    create_tables(database.engine)
    look = "SHOW statement_timeout"

    def limit(connection: sa.Connection) -> str:
        return str(connection.exec_driver_sql(look).scalar_one())

    assert database.store._own.read(limit) == "7s"
    assert database.store._own.look(limit) == "0"
    assert database.store.write(limit) == "7s"
    with database.engine.begin() as plain:
        assert plain.exec_driver_sql(look).scalar_one() == "7s"
    database.close()


def test_one_batch_is_all_that_a_first_claim_gives_back(
    broker: MemoryBroker, tmp_path: Path
) -> None:
    database = make_database(tmp_path / "shop.db")
    put_rows(database, 3 * PROBE_ROWS)
    broker.faults.is_unreachable = True
    assert Sweep(database, MemoryTransport(broker)).step().claimed == PROBE_ROWS
    database.close()


def test_the_first_claim_of_a_sweep_takes_no_more_than_the_sweep_may_send(
    database: Database, broker: MemoryBroker
) -> None:
    put_rows(database, 30)
    counts = Sweep(database, MemoryTransport(broker), SweepOptions(rows_max=25)).step()
    assert (counts.claimed, counts.is_cut_short) == (25, True)


def test_W8_claims_that_had_grown_are_small_again_while_the_broker_is_away(
    database: Database, broker: MemoryBroker
) -> None:
    sweep = Sweep(database, MemoryTransport(broker))
    put_rows(database, 8 * PROBE_ROWS)
    assert sweep.step().sent == 8 * PROBE_ROWS
    put_rows(database, 8 * PROBE_ROWS)
    broker.faults.is_unreachable = True
    assert sweep.step().unreachable
    make_due(database)
    assert sweep.step().claimed == PROBE_ROWS
