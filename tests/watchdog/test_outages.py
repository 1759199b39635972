"""Databases that go away under a watchdog and come back: killed, frozen, or changed meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from qmq_client.database.engine import open_engine
from qmq_client.errors import OutboxMissingError
from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.outbox.table import create_tables
from qmq_client.retry import Backoff
from qmq_client.settings.sections import DatabaseSection, WatchdogSection
from qmq_client.transport.http import HttpTransport
from qmq_client.transport.memory import MemoryBroker, MemoryTransport
from qmq_watchdog.databases import Database, limit_in_time, open_database
from qmq_watchdog.options import DaemonOptions
from qmq_watchdog.outage import BrokerGate
from qmq_watchdog.sweep import Sweep, SweepOptions
from qmq_watchdog.sweep_job import SweepJob
from tests.client.transport.hostile_server import answer, hostile_server
from tests.conftest import MakeDatabase, MakeServer
from tests.kit import warm
from tests.kit.broker_process import BrokerProcess
from tests.kit.listening import listening
from tests.kit.waiting import DEADLINE_S
from tests.services.databases import KINDS
from tests.services.private import PrivateServer
from tests.watchdog.rows import left, make_database, make_due, put_rows, rows_of
from tests.watchdog.transports import HandClock, WatchedTransport, sent_ids

QUICK = WatchdogSection(connect_s_max=1.0, statement_s_max=1.0)


def never() -> bool:
    return False


def at(server: PrivateServer) -> Database:
    """A database as the daemon opens it, with the shortest bounds in time."""
    with_tables = sa.create_engine(server.url())
    create_tables(with_tables)
    with_tables.dispose()
    return open_database(DatabaseSection(name="shop", url=server.url()), {}, QUICK)


@pytest.fixture(params=["mysql", "postgresql"])
def server(request: pytest.FixtureRequest, make_private_server: MakeServer) -> PrivateServer:
    return make_private_server(request.param)


@pytest.fixture
def watched(server: PrivateServer, broker: MemoryBroker) -> Iterator[SweepJob]:
    database = at(server)
    yield SweepJob(Sweep(database, MemoryTransport(broker)), DaemonOptions(), lambda: 0.0)
    database.close()


def test_W8_a_server_that_is_killed_is_away_until_it_is_back_and_no_row_is_lost(
    server: PrivateServer, watched: SweepJob
) -> None:
    put_rows(watched.database, 2)
    assert watched.step(never).sent == 2
    ids = put_rows(watched.database, 3)
    server.kill()
    for _ in range(2):  # the connection that was open, and a new one
        assert watched.step(never).error is not None
    assert watched.is_in_trouble
    server.restart()
    assert watched.step(never).sent == 3
    assert not watched.is_in_trouble
    assert len(ids) == 3
    assert left(watched.database) == set()


def test_W3_a_server_that_is_frozen_holds_a_thread_for_a_bounded_time(
    server: PrivateServer, watched: SweepJob
) -> None:
    assert watched.step(never).error is None
    put_rows(watched.database, 2)
    watched.database.close()  # PostgreSQL's running sessions are not frozen
    server.freeze()
    try:
        assert watched.step(never).error is not None
    finally:
        server.thaw()
    assert watched.step(never).sent == 2


def test_W3_a_session_of_postgresql_that_is_frozen_after_a_look_holds_a_thread_for_a_bounded_time(
    make_private_server: MakeServer,
) -> None:
    """Nothing but the end of the transaction is left to be said then, and libpq knows no time-out."""
    database, frozen = at(make_private_server("postgresql")), list[int]()

    def freeze(connection: sa.Connection, _: object, statement: str, *__: object) -> None:
        if "min(" in statement and not frozen:
            driver: Any = connection.connection.driver_connection
            frozen.append(driver.info.backend_pid)
            os.kill(frozen[0], signal.SIGSTOP)

    def look() -> None:
        with suppress(sa.exc.OperationalError):
            database.store.oldest_unsent_age_ms()

    looking = threading.Thread(target=look, daemon=True)
    try:
        with listening(sa.Engine, after_cursor_execute=freeze):
            looking.start()
            looking.join(DEADLINE_S)
        assert frozen
        assert not looking.is_alive()
    finally:
        for process in frozen:
            os.kill(process, signal.SIGCONT)
    assert database.store.oldest_unsent_age_ms() is None
    database.close()


def test_W1_one_daemon_takes_over_rows_in_databases_of_all_kinds(
    make_database: MakeDatabase, broker_process: BrokerProcess
) -> None:
    command = ["qmq_client.cli", "watchdog", "run"]
    command += ["--broker", broker_process.url]
    databases = []
    for kind in KINDS:
        served = make_database(kind)
        engine = served.engine()
        create_tables(engine)
        databases.append(Database(name=kind, store=OutboxStore(engine), engine=engine))
        command += ["--database", served.url]
        put_rows(databases[-1], 2)
    daemon = warm.start(command, stderr=subprocess.PIPE)
    assert daemon.stderr is not None
    try:
        missing = len(databases)
        for line in daemon.stderr:
            missing -= "claimed=2 sent=2" in line
            if not missing:
                break
    finally:
        daemon.terminate()
        daemon.communicate(timeout=DEADLINE_S)
    assert daemon.returncode == 0
    for database in databases:
        assert left(database) == set()
        database.close()


def test_O2_what_was_accepted_counts_as_sent_also_where_the_database_could_not_take_note_of_it(
    tmp_path: Path, broker: MemoryBroker
) -> None:
    database = make_database(tmp_path / "shop.db")
    put_rows(database, 3)

    def rename(there: str, to: str) -> None:
        with database.engine.begin() as connection:
            connection.exec_driver_sql(f"ALTER TABLE {there} RENAME TO {to}")

    transport = WatchedTransport(broker, lambda: rename("qmq_outbox", "away"))
    job = SweepJob(Sweep(database, transport), DaemonOptions(), lambda: 0.0)
    counts = job.step(never)
    assert counts.error is not None
    assert (counts.claimed, counts.sent, job.totals.sent) == (3, 3, 3)
    rename("away", "qmq_outbox")
    assert len(left(database)) == 3
    make_due(database)
    assert Sweep(database, MemoryTransport(broker)).step().sent == 3
    assert len(sent_ids(broker)) == 3
    database.close()


def test_W7_tables_that_were_changed_during_an_outage_are_looked_at_again(tmp_path: Path) -> None:
    """What the next connection leads to may be another database, or of another version."""
    database = make_database(tmp_path / "shop.db")
    sweep = Sweep(database, MemoryTransport(MemoryBroker()))
    assert sweep.step().error is None
    put_rows(database, 2)
    with database.engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE qmq_outbox RENAME TO gone")
    assert sweep.step().error is not None
    with database.engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE gone RENAME TO qmq_outbox")
        connection.exec_driver_sql("CREATE TABLE qmq_version (version_num VARCHAR(32))")
        connection.exec_driver_sql("INSERT INTO qmq_version VALUES ('qmq9999')")
    counts = sweep.step()
    assert "qmq9999" in str(counts.error)
    assert counts.claimed == 0
    with database.engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE qmq_version")
    assert sweep.step().sent == 2
    database.close()


def restore(path: Path, backup: Path, *, is_moved: bool = True) -> None:
    """As an operator does it, with the side files of the old one removed: they are not the backup's."""
    for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        name.unlink(missing_ok=True)
    if is_moved:
        backup.rename(path)
    else:
        path.write_bytes(backup.read_bytes())


@pytest.mark.parametrize("is_moved", [True, False])
def test_W3_a_sqlite_file_that_was_replaced_is_seen_at_the_next_sweep(
    tmp_path: Path, broker: MemoryBroker, caplog: pytest.LogCaptureFixture, is_moved: bool
) -> None:
    """A restore puts another file in its place; connections that are kept stay with the old one."""
    path, backup = tmp_path / "shop.db", tmp_path / "backup.db"
    database, other = make_database(path), make_database(backup)
    put_rows(other, 3)
    other.close()
    sweep = Sweep(database, MemoryTransport(broker))
    put_rows(database)
    assert sweep.step().sent == 1
    restore(path, backup, is_moved=is_moved)
    counts = sweep.step()
    assert (counts.sent, counts.error) == (3, None)
    assert "was replaced or removed" in caplog.text
    path.unlink()
    error = sweep.step().error
    assert isinstance(error, OutboxMissingError)
    assert "no such table" in str(error)
    database.close()


def test_W3_the_metrics_of_a_sqlite_file_that_was_replaced_are_those_of_the_new_one(
    tmp_path: Path, broker: MemoryBroker
) -> None:
    path, backup = tmp_path / "shop.db", tmp_path / "backup.db"
    database, other = make_database(path), make_database(backup)
    put_rows(other, 3)
    other.close()
    clock = HandClock()
    gate = BrokerGate(Backoff(), lambda: 0.0, clock)
    job = SweepJob(
        Sweep(database, MemoryTransport(broker), clock=clock),
        DaemonOptions(sample_s=15.0),
        lambda: 0.0,
        clock=clock,
        gate=gate,
    )
    job.step(never)
    for _ in range(2):
        gate.on_failure(at_least_s=1_000.0)
    restore(path, backup)
    clock.elapsed_s += 15.0
    job.step(never)
    assert job.totals.rows is not None
    assert job.totals.rows.live == 3
    job.close()


@pytest.mark.parametrize(
    ("driver", "module", "given"),
    [
        ("mysql+pymysql", "pymysql", {"connect_timeout": 1, "read_timeout": 2}),
        ("mysql+mysqldb", "MySQLdb", {"connect_timeout": 1, "read_timeout": 2}),
        ("postgresql+psycopg", "psycopg", {"connect_timeout": 2, "tcp_user_timeout": 2_000}),
        ("postgresql+psycopg2", "psycopg2", {"connect_timeout": 2, "tcp_user_timeout": 2_000}),
        ("postgresql+pg8000", "pg8000", {"timeout": 2}),
    ],
)
def test_W3_every_connect_and_statement_of_each_driver_has_a_limit(
    driver: str, module: str, given: dict[str, int]
) -> None:
    pytest.importorskip(module)
    url = f"{driver}://a@127.0.0.1:1/b"
    engine = open_engine(DatabaseSection(name="shop", url=url), {})
    limit_in_time(engine, WatchdogSection(connect_s_max=1.0, statement_s_max=2.0))
    seen: dict[str, object] = {}

    def look(*arguments: dict[str, object]) -> None:
        seen.update(arguments[-1])

    sa.event.listen(engine, "do_connect", look)
    with pytest.raises(sa.exc.DBAPIError):
        engine.connect()
    engine.dispose()
    assert given.items() <= seen.items()


def test_O7_W8_what_a_proxy_answers_costs_no_attempt_and_parks_nothing(database: Database) -> None:
    waiting = put_rows(database, 2)
    page = answer(b"<html>", status="502 Bad Gateway", content_type="text/html")
    with hostile_server(page) as server, closing(HttpTransport(server.url)) as transport:
        counts = Sweep(database, transport, SweepOptions(max_attempts=1)).step()
    assert (counts.claimed, counts.failed, counts.parked, counts.unreachable) == (2, 2, 0, True)
    assert f"{server.url}/v1/send: status 502 of type 'text/html'" in counts.last_error
    assert [row.attempts for row in rows_of(database)] == [0, 0]
    assert left(database) == set(waiting)
