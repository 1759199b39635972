"""The daemon: every database at its own pace, bounded noise, a clean stop."""

from __future__ import annotations

import logging
import re
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.transport.memory import MemoryBroker, MemoryTransport
from qmq_client.transport.port import Transport
from qmq_watchdog.daemon import Daemon
from qmq_watchdog.databases import Database
from qmq_watchdog.options import DaemonOptions
from qmq_watchdog.sweep import PROBE_ROWS, Sweep, SweepOptions
from qmq_watchdog.sweep_job import SweepJob
from tests.kit.listening import listening
from tests.watchdog.rows import left, make_database, make_due, put_rows
from tests.watchdog.transports import HandClock, WatchedTransport

DEADLINE_S = 60.0
#: So long that within a test a database is swept at the start and then only when told to.
NEVER = DaemonOptions(poll_s=3_600.0)


def never_stopped() -> bool:
    return False


@contextmanager
def running(daemon: Daemon) -> Iterator[Daemon]:
    daemon.start()
    try:
        yield daemon
    finally:
        assert daemon.stop(DEADLINE_S)


def test_every_database_is_swept_at_the_start(tmp_path: Path, broker: MemoryBroker) -> None:
    databases = [make_database(tmp_path / f"{name}.db") for name in ("a", "b", "c")]
    transports = [WatchedTransport(broker) for _ in databases]
    for database in databases:
        put_rows(database, 2)
    sweeps = [Sweep(*pair) for pair in zip(databases, transports, strict=True)]
    with running(Daemon(sweeps, NEVER)):
        assert all(transport.accepted.wait(DEADLINE_S) for transport in transports)
    assert [left(database) for database in databases] == [set()] * 3
    for database in databases:
        database.close()


def test_rows_that_fall_due_later_are_found_by_the_next_poll(
    database: Database, broker: MemoryBroker
) -> None:
    transport = WatchedTransport(broker)
    with running(Daemon([Sweep(database, transport)], DaemonOptions(poll_s=0.01))):
        put_rows(database, 1)
        assert transport.accepted.wait(DEADLINE_S)
        transport.accepted.clear()
        put_rows(database, 1)
        assert transport.accepted.wait(DEADLINE_S)


def test_sweeps_that_end_in_no_time_follow_each_other_forever(
    database: Database, broker: MemoryBroker
) -> None:
    verbs = []
    enough = threading.Event()

    def count(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        verbs.append(statement[:6])
        if verbs.count("UPDATE") == 200:
            enough.set()

    daemon = Daemon([Sweep(database, MemoryTransport(broker))], DaemonOptions(poll_s=0.0))
    with listening(sa.Engine, before_cursor_execute=count), running(daemon):
        assert enough.wait(DEADLINE_S)


def test_a_sweep_that_was_cut_short_continues_at_once(
    database: Database, broker: MemoryBroker
) -> None:
    put_rows(database, 30)
    done = threading.Event()

    class LastTransport(MemoryTransport):
        def send(self, frame: bytes) -> Any:
            answer = super().send(frame)
            if self.calls["send"] == 3:
                done.set()
            return answer

    options = SweepOptions(batch_rows=10, rows_max=10)
    with running(Daemon([Sweep(database, LastTransport(broker), options)], NEVER)):
        assert done.wait(DEADLINE_S)
    assert left(database) == set()


def broken_databases(tmp_path: Path) -> list[Database]:
    """One that is not there, one that is no database, one without tables."""
    (tmp_path / "poison.db").write_bytes(b"this is no database of any kind " * 200)
    found = []
    for name, path in (
        ("dead", tmp_path / "no such folder" / "dead.db"),
        ("poisoned", tmp_path / "poison.db"),
        ("empty", tmp_path / "empty.db"),
    ):
        engine = sa.create_engine(f"sqlite:///{path}")
        found.append(Database(name=name, store=OutboxStore(engine), engine=engine))
    return found


def test_W3_dead_and_poisoned_databases_do_not_delay_another(
    tmp_path: Path, broker: MemoryBroker
) -> None:
    good = make_database(tmp_path / "good.db")
    put_rows(good, 3)
    transport = WatchedTransport(broker)
    sweeps = [Sweep(each, MemoryTransport(broker)) for each in broken_databases(tmp_path)]
    with running(Daemon([*sweeps, Sweep(good, transport)], NEVER)):
        assert transport.accepted.wait(DEADLINE_S)


def hanging_database(path: Path, hangs: threading.Event, let_go: threading.Event) -> Database:
    """A database whose server takes the connection and never says a word."""
    engine = sa.create_engine(f"sqlite:///{path}")

    def hang(*_: Any) -> None:
        hangs.set()
        let_go.wait()

    event.listen(engine, "do_connect", hang)
    return Database(name="hanging", store=OutboxStore(engine), engine=engine)


def test_W3_a_database_that_hangs_delays_neither_another_nor_the_stop(
    tmp_path: Path, broker: MemoryBroker
) -> None:
    good = make_database(tmp_path / "good.db")
    transport = WatchedTransport(broker)
    hangs, let_go = threading.Event(), threading.Event()
    hanging = hanging_database(tmp_path / "hanging.db", hangs, let_go)
    sweeps: list[Sweep] = [
        Sweep(hanging, MemoryTransport(broker)),
        Sweep(good, transport),
    ]
    daemon = Daemon(sweeps, DaemonOptions(poll_s=0.01))
    daemon.start()
    try:
        for _ in range(2):
            put_rows(good, 1)
            assert transport.accepted.wait(DEADLINE_S)
            transport.accepted.clear()
        assert hangs.wait(DEADLINE_S)
        assert not daemon.stop(0.05), "one sweep still hangs, and it is said"
    finally:
        let_go.set()
    assert daemon.stop(DEADLINE_S), "a stop may be asked for twice"


def test_a_locked_database_is_swept_when_the_lock_is_gone(
    tmp_path: Path, broker: MemoryBroker
) -> None:
    database = make_database(tmp_path / "busy.db")
    put_rows(database, 1)
    job = SweepJob(Sweep(database, MemoryTransport(broker)), NEVER, lambda: 0.0)
    with closing(sqlite3.connect(tmp_path / "busy.db")) as stranger:
        stranger.execute("BEGIN IMMEDIATE")
        assert job.step(never_stopped).error is not None
        assert job.delay_s == 1.0
    assert job.step(never_stopped).sent == 1
    assert job.delay_s == NEVER.poll_s
    database.close()


@pytest.mark.parametrize("outage_s_max", [0.01, 0.2, 1.0, 30.0])
def test_W8_no_wait_for_what_is_away_is_longer_than_asked_for(outage_s_max: float) -> None:
    backoff = DaemonOptions(outage_s_max=outage_s_max).backoff
    waits_ms = [backoff.delay_ms(tries, 0.0) for tries in range(1, 20)]
    assert max(waits_ms) == outage_s_max * 1000


def test_W8_an_outage_of_the_broker_has_a_bounded_rate_of_tries_and_lines(
    database: Database, broker: MemoryBroker, caplog: pytest.LogCaptureFixture
) -> None:
    put_rows(database, 150)
    broker.faults.is_unreachable = True
    transport = MemoryTransport(broker)
    options = DaemonOptions(outage_s_max=30.0)
    job = SweepJob(Sweep(database, transport), options, lambda: 0.5)
    elapsed_s, passes = 0.0, 0
    with caplog.at_level(logging.INFO, logger="qmq_watchdog"):
        while elapsed_s < 3_600:
            make_due(database)
            counts = job.step(never_stopped)
            assert counts.claimed <= PROBE_ROWS
            elapsed_s += job.delay_s
            passes += 1
    assert passes == transport.calls["send"]
    assert passes < elapsed_s / 20, "after the first minute one try in 27 s"
    assert len(caplog.records) <= 8, "lines grow with the logarithm of the failures"
    assert len(left(database)) == 150

    broker.faults.is_unreachable = False
    make_due(database)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="qmq_watchdog"):
        assert job.step(never_stopped).sent == 150
    recovered, done = (record.message for record in caplog.records)
    assert recovered == f"sweep.recovered database=shop failures={passes}"
    assert done == "sweep.done database=shop claimed=150 sent=150"


def test_W8_an_outage_of_the_broker_is_over_when_it_took_something_not_when_nothing_was_due(
    database: Database, broker: MemoryBroker, caplog: pytest.LogCaptureFixture
) -> None:
    put_rows(database, 1)
    broker.faults.is_unreachable = True
    job = SweepJob(Sweep(database, MemoryTransport(broker)), DaemonOptions(), lambda: 0.0)
    with caplog.at_level(logging.INFO, logger="qmq_watchdog"):
        job.step(never_stopped)
        assert job.step(never_stopped).claimed == 0, "the row is put off"
        make_due(database)
        job.step(never_stopped)
    assert job.delay_s == 2.0
    assert "sweep.recovered" not in caplog.text
    assert "last_error=" in caplog.text


def test_W8_an_outage_of_the_broker_is_over_when_another_has_sent_what_waited_for_it(
    database: Database, broker: MemoryBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is left for this watchdog to send: it would call the broker away until there is."""
    put_rows(database, 1)
    clock = HandClock()
    job = SweepJob(
        Sweep(database, MemoryTransport(broker)), DaemonOptions(), lambda: 0.0, clock=clock
    )
    broker.faults.is_unreachable = True
    job.step(never_stopped)
    assert job.trouble == "broker_unreachable"
    broker.faults.is_unreachable = False
    make_due(database)
    assert Sweep(database, MemoryTransport(broker)).step().sent == 1
    put_rows(database, 1, due_in_ms=60_000)  # of a sender that is at it
    clock.elapsed_s += 5.0
    with caplog.at_level(logging.INFO, logger="qmq_watchdog"):
        assert job.step(never_stopped).claimed == 0
    assert (job.trouble, job.is_in_trouble) == ("", False)
    assert "sweep.recovered database=shop failures=1" in caplog.text


def test_W8_an_outage_of_a_database_is_reported_with_its_reason_and_then_seldom(
    tmp_path: Path, broker: MemoryBroker, caplog: pytest.LogCaptureFixture
) -> None:
    dead = broken_databases(tmp_path)[0]
    job = SweepJob(Sweep(dead, MemoryTransport(broker)), DaemonOptions(), lambda: 0.0)
    waits_s = []
    with caplog.at_level(logging.INFO, logger="qmq_watchdog"):
        for _ in range(8):
            job.step(never_stopped)
            waits_s.append(job.delay_s)
    assert waits_s == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    said = [re.findall(r"failures=(\d+)", record.message) for record in caplog.records]
    assert said == [["1"], ["2"], ["4"], ["8"]]
    assert "unable to open database file" in caplog.records[0].message


def test_the_broker_is_left_alone_for_as_long_as_it_asks(
    database: Database, broker: MemoryBroker
) -> None:
    put_rows(database, 1)
    broker.faults.busy_retry_after_s = 77.0
    job = SweepJob(Sweep(database, MemoryTransport(broker)), DaemonOptions(), lambda: 0.0)
    job.step(never_stopped)
    assert job.delay_s == 77.0


def test_an_idle_daemon_says_nothing_and_a_pass_says_one_line(
    database: Database, broker: MemoryBroker, caplog: pytest.LogCaptureFixture
) -> None:
    job = SweepJob(Sweep(database, MemoryTransport(broker)), DaemonOptions(), lambda: 0.0)
    with caplog.at_level(logging.INFO, logger="qmq_watchdog"):
        job.step(never_stopped)
        assert caplog.records == []
        put_rows(database, 500)
        job.step(never_stopped)
    assert [record.message for record in caplog.records] == [
        "sweep.done database=shop claimed=500 sent=500"
    ]


def test_O7_parking_is_reported_with_what_to_do(
    database: Database, broker: MemoryBroker, caplog: pytest.LogCaptureFixture
) -> None:
    (message_id,) = put_rows(database, 1)
    broker.faults.refused_ids.add(message_id.hex())
    job = SweepJob(Sweep(database, MemoryTransport(broker)), DaemonOptions(), lambda: 0.0)
    with caplog.at_level(logging.INFO, logger="qmq_watchdog"):
        assert job.step(never_stopped).parked == 1
    assert caplog.records[-1].levelno == logging.ERROR
    assert caplog.records[-1].message == (
        'rows.parked database=shop parked=1 remedy="qmq outbox list --state parked"'
    )


def test_polls_are_spread_by_jitter(database: Database, broker: MemoryBroker) -> None:
    waits_s = []
    shares = iter((0.0, 0.5, 0.999))
    job = SweepJob(Sweep(database, MemoryTransport(broker)), DaemonOptions(), lambda: next(shares))
    for _ in range(3):
        job.step(never_stopped)
        waits_s.append(round(job.delay_s, 3))
    assert waits_s == [1.0, 0.9, 0.8]


@pytest.mark.parametrize("jump_ms", [-86_400_000, 86_400_000])
def test_a_wall_clock_that_is_set_does_not_stall_the_sweeps(
    database: Database, broker: MemoryBroker, jump_ms: int
) -> None:
    transport = WatchedTransport(broker)
    put_rows(database, 1)
    clock = HandClock(now_ms=4_000_000_000_000)  # far ahead: nothing is run again by itself
    with running(Daemon([Sweep(database, transport)], NEVER, clock=clock)) as daemon:
        assert transport.accepted.wait(DEADLINE_S)
        transport.accepted.clear()
        assert daemon.wait_idle(DEADLINE_S)
        put_rows(database, 1)
        assert not daemon.step()
        clock.wall_ms += jump_ms
        assert daemon.step()
        assert transport.accepted.wait(DEADLINE_S)


def test_a_fault_of_our_own_ends_one_sweep_and_not_the_daemon(
    database: Database, broker: MemoryBroker, caplog: pytest.LogCaptureFixture
) -> None:
    put_rows(database, 1)
    seen = threading.Event()

    class FaultyTransport(MemoryTransport):
        def send(self, frame: bytes) -> Any:
            seen.set()
            raise ZeroDivisionError

    faulty: Transport = FaultyTransport(broker)
    daemon = Daemon([Sweep(database, faulty)], NEVER)
    with running(daemon):
        assert seen.wait(DEADLINE_S)
    assert "ZeroDivisionError" in caplog.text
    assert len(left(database)) == 1


def test_start_and_stop_many_times_loses_nothing(database: Database, broker: MemoryBroker) -> None:
    ids = put_rows(database, 200)
    options = SweepOptions(batch_rows=5, rows_max=10)
    for _ in range(15):
        transport = WatchedTransport(broker)
        with running(Daemon([Sweep(database, transport, options)], DaemonOptions(poll_s=0.01))):
            transport.accepted.wait(0.02)
    make_due(database)
    while Sweep(database, MemoryTransport(broker)).step().claimed:
        make_due(database)
    stored = {message.message_id for message in broker.messages("orders.created")}
    assert stored == {each.hex() for each in ids}


def test_a_jump_of_the_wall_clock_is_noticed_once() -> None:
    clock = HandClock()
    daemon = Daemon(clock=clock)
    clock.wall_ms -= 3_600_000
    assert [daemon.step(), daemon.step()] == [True, False]
