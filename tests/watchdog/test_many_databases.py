"""F20, W3: two hundred databases, some dead, some hanging, some poisoned; the others never notice.

What hangs here hangs for as long as the test wants, so nothing depends on how fast this machine is.
"""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from qmq_client.errors import DatabaseUnavailableError, OutboxMissingError
from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.settings.sections import DatabaseSection, WatchdogSection
from qmq_client.transport.memory import MemoryBroker, MemoryTransport
from qmq_client.wire.requests import SendAnswer
from qmq_watchdog.daemon import Daemon
from qmq_watchdog.databases import ConnectionBudget, Database, open_database
from qmq_watchdog.once import sweep_all
from qmq_watchdog.options import DaemonOptions
from qmq_watchdog.sweep import Sweep
from qmq_watchdog.sweep_job import SweepJob
from tests.kit.listening import listening
from tests.watchdog.rows import left, make_database, put_rows
from tests.watchdog.transports import HandClock

DEADLINE_S = 60.0
OPTIONS = DaemonOptions(poll_s=3_600.0, workers=4, isolated_workers=12)
#: The shortest bounds that drivers take.
QUICK = WatchdogSection(connect_s_max=1.0, statement_s_max=1.0, workers=4, isolated_workers=12)


class CountingTransport(MemoryTransport):
    """Tells when a database has had its rows accepted so often."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.accepted = threading.Semaphore(0)

    def send(self, frame: bytes) -> SendAnswer:
        answer = super().send(frame)
        self.accepted.release()
        return answer


def copies(template: Path, directory: Path, count: int) -> list[Database]:
    """Databases with both tables; one is made and copied, because making takes longer."""
    found = []
    for number in range(count):
        path = directory / f"shop-{number}.db"
        shutil.copy(template, path)
        engine = sa.create_engine(f"sqlite:///{path}")
        found.append(Database(name=path.stem, store=OutboxStore(engine), engine=engine))
    return found


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "template.db"
    make_database(path).close()
    return path


def hanging_databases(
    directory: Path,
    count: int,
    let_go: threading.Event,
    hangs: threading.Semaphore | None = None,
) -> list[Database]:
    """Each on a server of its own that takes a connection and never says a word."""

    def hang(*_: Any) -> None:
        if hangs is not None:
            hangs.release()
        let_go.wait(DEADLINE_S)

    found = []
    for number in range(count):
        engine = sa.create_engine(f"sqlite:///{directory / f'hanging-{number}.db'}")
        event.listen(engine, "do_connect", hang)
        name = f"hanging-{number}"
        found.append(Database(name=name, store=OutboxStore(engine), engine=engine))
    return found


def broken_databases(directory: Path, count: int) -> list[Database]:
    """Files that are no databases, and directories that are not there."""
    found = []
    for number in range(count):
        poisoned = directory / f"poisoned-{number}.db"
        poisoned.write_bytes(b"this is no database of any kind " * 200)
        for path in (poisoned, directory / "nowhere" / f"dead-{number}.db"):
            engine = sa.create_engine(f"sqlite:///{path}")
            found.append(Database(name=path.stem, store=OutboxStore(engine), engine=engine))
    return found


@contextmanager
def running(jobs: list[SweepJob], clock: HandClock) -> Iterator[Daemon]:
    daemon = Daemon(options=OPTIONS, clock=clock)
    for job in jobs:
        daemon.add(job)
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.stop(DEADLINE_S)


def all_running_are_slow(daemon: Daemon, clock: HandClock) -> None:
    clock.elapsed_s += 10.0
    clock.wall_ms += 10_000
    daemon.step()


def test_F20_W3_hundreds_of_databases_go_round_while_ten_hang_and_twenty_are_broken(
    tmp_path: Path, template: Path, broker: MemoryBroker
) -> None:
    let_go, hangs = threading.Event(), threading.Semaphore(0)
    good = copies(template, tmp_path, 170)
    bad = hanging_databases(tmp_path, 10, let_go, hangs) + broken_databases(tmp_path, 10)
    transport = CountingTransport(broker)
    clock = HandClock(now_ms=4_000_000_000_000)
    budget = ConnectionBudget(50)
    jobs = [
        SweepJob(Sweep(each, transport), OPTIONS, lambda: 0.0, budget=budget)
        for each in [*bad, *good]  # the worst order
    ]
    with running(jobs, clock) as daemon:
        for _ in range(10):  # four at a time are found to hang, until all ten are known
            assert hangs.acquire(timeout=DEADLINE_S)
            all_running_are_slow(daemon, clock)
        for _ in range(2):
            for database in good:
                put_rows(database, 1)
            swept_again(daemon, transport, len(good))
            assert budget.kept <= 50
        assert not hangs.acquire(blocking=False), "those that hang still do, and no other does"
        assert daemon.under_way()[1] >= 10
        let_go.set()
    assert not any(left(database) for database in good)
    hanging_jobs = jobs[:10]
    assert all(job.totals.sweeps == 1 for job in hanging_jobs), "none was tried anew meanwhile"
    assert all(job.is_in_trouble for job in jobs[10:30])
    for database in [*bad, *good]:
        database.close()


def swept_again(daemon: Daemon, transport: CountingTransport, count: int) -> None:
    """Let everything that waits run, until so many databases have had their row accepted."""
    end_s = time.monotonic() + DEADLINE_S
    for _ in range(count):
        while not transport.accepted.acquire(timeout=0.1):
            assert time.monotonic() < end_s
            daemon.wake_all()


def silent_server(cleanup: ExitStack) -> int:
    """A port that takes connections and never says a word."""
    listener = cleanup.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
    port: int = listener.getsockname()[1]
    return port


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def test_W3_unreachable_servers_of_all_kinds_end_by_themselves_and_the_others_are_swept(
    tmp_path: Path, template: Path, broker: MemoryBroker
) -> None:
    good = copies(template, tmp_path, 20)
    for database in good:
        put_rows(database, 1)
    with ExitStack() as cleanup:
        urls = {}
        for kind in ("mysql+pymysql", "postgresql+psycopg"):
            for number in range(3):
                silent = silent_server(cleanup)
                urls[f"{kind[:5]}-silent-{number}"] = f"{kind}://app@127.0.0.1:{silent}/shop"
                urls[f"{kind[:5]}-refused-{number}"] = f"{kind}://app@127.0.0.1:{closed_port()}/x"
        dead = [
            open_database(DatabaseSection(name=name, url=url), {}, QUICK)
            for name, url in urls.items()
        ]
        sweeps = [Sweep(each, MemoryTransport(broker)) for each in [*dead, *good]]
        results, are_all_ended = sweep_all(sweeps, DEADLINE_S, limits=QUICK)
    assert are_all_ended
    for database in dead:
        assert isinstance(results[database.name].error, DatabaseUnavailableError), database.name
    assert [results[database.name].sent for database in good] == [1] * 20


def test_a_pass_ends_at_its_deadline_and_names_what_was_not_reached(
    tmp_path: Path, template: Path, broker: MemoryBroker
) -> None:
    let_go = threading.Event()
    hanging = hanging_databases(tmp_path, 3, let_go)
    (good,) = copies(template, tmp_path, 1)
    put_rows(good, 1)
    limits = WatchdogSection(workers=2, isolated_workers=2)
    clock = HandClock()
    clock.step_s = 0.5  # each look takes so long
    sweeps = [Sweep(each, MemoryTransport(broker)) for each in [*hanging, good]]
    try:
        results, are_all_ended = sweep_all(sweeps, 8.0, limits=limits, clock=clock)
    finally:
        let_go.set()
    assert not are_all_ended
    assert results["shop-0"].sent == 1
    for database in hanging:
        assert "did not end within 8 s" in str(results[database.name].error)


def test_a_daemon_of_many_databases_has_a_bounded_number_of_connections(
    tmp_path: Path, template: Path, broker: MemoryBroker
) -> None:
    databases = copies(template, tmp_path, 60)
    open_now: set[Any] = set()
    budget = ConnectionBudget(10)
    clock = HandClock(now_ms=4_000_000_000_000)
    jobs = [
        SweepJob(
            Sweep(each, MemoryTransport(broker)), OPTIONS, lambda: 0.0, clock=clock, budget=budget
        )
        for each in databases
    ]
    counting = listening(
        sa.Pool,
        connect=lambda connection, _: open_now.add(id(connection)),
        close=lambda connection, _: open_now.discard(id(connection)),
    )
    with counting, running(jobs, clock) as daemon:
        assert daemon.wait_idle(DEADLINE_S)
        assert budget.kept == 10
        assert len(open_now) <= 10
    assert all(job.totals.sweeps == 1 for job in jobs)
    assert not open_now, "all are closed after a stop"


def test_W7_a_database_without_tables_is_reported_and_costs_the_others_nothing(
    tmp_path: Path, template: Path, broker: MemoryBroker
) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'bare.db'}")
    bare = Database(name="bare", store=OutboxStore(engine), engine=engine)
    (good,) = copies(template, tmp_path, 1)
    put_rows(good, 2)
    sweeps = [Sweep(each, MemoryTransport(broker)) for each in (bare, good)]
    results, _ = sweep_all(sweeps, DEADLINE_S)
    assert isinstance(results["bare"].error, OutboxMissingError)
    assert results["shop-0"].sent == 2
