"""Databases that go away under a watchdog and come back: killed, frozen, or changed meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import sqlalchemy as sa

from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.outbox.table import create_tables
from qmq_client.settings.sections import DatabaseSection, WatchdogSection
from qmq_client.transport.memory import MemoryBroker, MemoryTransport
from qmq_watchdog.databases import Database, open_database
from qmq_watchdog.options import DaemonOptions
from qmq_watchdog.sweep import Sweep
from qmq_watchdog.sweep_job import SweepJob
from tests.conftest import MakeDatabase, MakeServer
from tests.kit.broker_process import BrokerProcess
from tests.kit.listening import listening
from tests.kit.waiting import DEADLINE_S
from tests.services.databases import KINDS
from tests.services.private import PrivateServer
from tests.watchdog.rows import left, make_database, make_due, put_rows
from tests.watchdog.transports import WatchedTransport, sent_ids

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
            frozen.append(connection.connection.driver_connection.info.backend_pid)
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
    command = [sys.executable, "-m", "qmq_client.cli", "watchdog", "run"]
    command += ["--broker", broker_process.url]
    databases = []
    for kind in KINDS:
        served = make_database(kind)
        engine = served.engine()
        create_tables(engine)
        databases.append(Database(name=kind, store=OutboxStore(engine), engine=engine))
        command += ["--database", served.url]
        put_rows(databases[-1], 2)
    daemon = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
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
