"""The fault matrix on real databases: contention, late commits, clocks, poison, replicas."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import make_url

from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.outbox.table import LIVE, PARKED, create_tables
from qmq_client.transport.memory import MemoryBroker, MemoryTransport
from qmq_client.wire.message_id import format_message_id
from qmq_watchdog.databases import Database
from qmq_watchdog.options import DaemonOptions
from qmq_watchdog.outage import READ_ONLY
from qmq_watchdog.sweep import Sweep, SweepOptions
from qmq_watchdog.sweep_job import SweepJob
from tests.conftest import MakeServer, give_up, require
from tests.kit import warm
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import DEADLINE_S
from tests.services.databases import Database as ServedDatabase
from tests.services.postgresql import PostgresqlRecipe
from tests.services.private import PrivateServer, as_user
from tests.services.shifted import PACKAGE, find_library
from tests.watchdog.processes import resume, start, wait_until_stopped
from tests.watchdog.rows import OUTBOX, SUBJECT, damage, left, make_due, new_rows, put_rows, rows_of

BUSINESS = sa.Table("shop_orders", sa.MetaData(), sa.Column("id", sa.Integer(), primary_key=True))


def as_database(engine: sa.Engine) -> Database:
    return Database(name="shop", store=OutboxStore(engine), engine=engine)


@pytest.fixture
def shop(a_database: ServedDatabase) -> Iterator[Database]:
    engine = a_database.engine()
    create_tables(engine)
    made = as_database(engine)
    yield made
    made.close()


def stored(broker: MemoryBroker) -> list[str | None]:
    return [message.message_id for message in broker.messages(SUBJECT)]


class Contenders:
    """Threads that do something until it is done, and what went wrong in them."""

    def __init__(self) -> None:
        self.faults: list[BaseException] = []
        self._threads: list[threading.Thread] = []

    def add(self, work: Any, *arguments: Any) -> None:
        def run() -> None:
            try:
                work(*arguments)
            except BaseException as fault:
                self.faults.append(fault)

        self._threads.append(threading.Thread(target=run))

    def finish(self) -> None:
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join(DEADLINE_S)
        assert not any(thread.is_alive() for thread in self._threads)
        assert self.faults == []


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "READ COMMITTED"])
def test_F15_W2_W5_three_watchdogs_and_three_senders_meet_no_deadlock_and_claim_no_row_twice(
    a_server_database: ServedDatabase, broker: MemoryBroker, isolation: str
) -> None:
    """F15. Every claim of a row is settled by its owner: none is lost to another."""
    create_tables(a_server_database.engine())
    BUSINESS.create(a_server_database.engine())
    sent: list[int] = []
    are_senders_done = threading.Event()
    senders, transactions = 3, 60

    def send(number: int) -> None:
        engine = a_server_database.engine(isolation_level=isolation)
        store = OutboxStore(engine)
        for count in range(transactions):
            with engine.begin() as connection:
                connection.execute(sa.insert(BUSINESS), {"id": (number + 1) * 1_000 + count})
                connection.execute(*new_rows(store, 2))
        store.close()

    def watch() -> None:
        database = as_database(a_server_database.engine())
        sweep = Sweep(database, MemoryTransport(broker), SweepOptions(batch_rows=20))
        while True:
            is_last = are_senders_done.is_set()
            counts = sweep.step()
            assert counts.error is None, counts.error
            assert (counts.lost, counts.failed) == (0, 0)
            sent.append(counts.sent)
            if is_last and not counts.claimed:
                break
        database.close()

    at_work = Contenders()
    watching = Contenders()
    for number in range(senders):
        at_work.add(send, number)
    for _ in range(3):
        watching.add(watch)
    watchers = threading.Thread(target=watching.finish)
    watchers.start()
    try:
        at_work.finish()
    finally:
        are_senders_done.set()
        watchers.join(DEADLINE_S)
    assert watching.faults == []
    assert sum(sent) == senders * transactions * 2
    assert len(set(stored(broker))) == sum(sent)


@pytest.mark.parametrize("moment", ["before_send", "after_send"])
def test_F14_W2_a_watchdog_stopped_in_its_claim_changes_no_row_when_it_comes_back(
    moment: str, a_server_database: ServedDatabase, broker_process: BrokerProcess
) -> None:
    """F14."""
    engine = a_server_database.engine()
    create_tables(engine)
    database = as_database(engine)
    ids = put_rows(database, 20)
    first = start(moment, a_server_database.url, broker_process.url)
    wait_until_stopped(first)
    assert Sweep(database, MemoryTransport(MemoryBroker())).step().claimed == 0
    make_due(database, ids[:10])  # its lease has ended for these
    taken = database.store.claim(token=b"the other one's!", limit=100, lease_ms=60_000)
    assert len(taken) == 10
    counts = resume(first)
    assert (counts["claimed"], counts["sent"], counts["lost"]) == (20, 20, 10)
    assert left(database) == set(ids[:10]), "the rows of the second owner are as they were"
    database.close()


def test_W9_a_lower_id_that_is_committed_later_is_found_and_a_rollback_leaves_no_trace(
    shop: Database, broker: MemoryBroker
) -> None:
    """F18."""
    if shop.engine.dialect.name == "sqlite":
        pytest.skip("SQLite has one writer: ids are committed in their order")
    sweep = Sweep(shop, MemoryTransport(broker))
    with shop.engine.connect() as late, shop.engine.connect() as undone:
        statement, rows = new_rows(shop.store, 1)
        late.execute(statement, rows)
        undone.execute(*new_rows(shop.store, 1))
        (early,) = put_rows(shop, 1)
        assert sweep.step().sent == 1
        assert stored(broker) == [format_message_id(early)]
        undone.rollback()
        late.commit()
    assert sweep.step().sent == 1
    assert stored(broker)[1:] == [format_message_id(rows[0]["message_id"])]
    assert left(shop) == set()


@pytest.mark.parametrize("zone", ["+13:00", "-11:00"])
def test_W4_the_time_zone_of_a_session_changes_nothing(
    a_server_database: ServedDatabase, broker: MemoryBroker, zone: str
) -> None:
    """F16."""
    options = {
        "mysql": {"init_command": f"SET time_zone='{zone}'"},
        "postgresql": {"options": f"-c timezone=UTC{zone}"},
    }[a_server_database.kind]
    engine = a_server_database.engine()
    create_tables(engine)
    database = as_database(engine)
    elsewhere = as_database(a_server_database.engine(connect_args=options))
    due = put_rows(database, 2)
    put_rows(elsewhere, 2, due_in_ms=60_000)
    put_rows(database, 2, due_in_ms=60_000)
    assert Sweep(elsewhere, MemoryTransport(broker)).step().sent == 2
    assert stored(broker) == [format_message_id(each) for each in due]
    more = put_rows(elsewhere, 2)
    assert Sweep(database, MemoryTransport(broker)).step().sent == 2
    assert len(more) == 2
    age_ms = elsewhere.store.oldest_unsent_age_ms()
    assert age_ms is not None
    assert age_ms < 3_600_000
    database.close()
    elsewhere.close()


@pytest.mark.parametrize("off", ["-1d", "+1d"])
def test_W4_a_watchdog_whose_machine_is_a_day_off_takes_what_is_due_and_nothing_else(
    a_server_database: ServedDatabase,
    broker_process: BrokerProcess,
    off: str,
) -> None:
    """F16. The whole process lives a day ahead or behind; the server does not."""
    library = require(PACKAGE, find_library)
    engine = a_server_database.engine()
    create_tables(engine)
    database = as_database(engine)
    put_rows(database, 3)
    waiting = put_rows(database, 2, due_in_ms=60_000)
    command = ["qmq_client.cli", "watchdog", "sweep", "--database"]
    command += [a_server_database.url, "--broker", broker_process.url]
    faked = {"LD_PRELOAD": str(library), "FAKETIME": off, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    done = warm.run(command, env=os.environ | faked, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert "claimed=3 sent=3" in done.stdout
    assert left(database) == set(waiting)
    database.close()


def test_F19_W3_O6_O7_poison_rows_are_parked_with_a_reason_and_their_neighbours_go(
    shop: Database, broker: MemoryBroker
) -> None:
    """F19."""
    ids = put_rows(shop, 12)
    damage(shop, ids[1])
    with shop.engine.begin() as connection:
        for message_id, record in ((ids[4], b""), (ids[7], b"\xff" * 50)):
            change = sa.update(OUTBOX).where(OUTBOX.c.message_id == message_id)
            connection.execute(change.values(record=record))
        change = sa.update(OUTBOX).where(OUTBOX.c.message_id == ids[9])
        connection.execute(change.values(subject="other.subject"))
    counts = Sweep(shop, MemoryTransport(broker)).step()
    assert (counts.sent, counts.parked, counts.failed) == (8, 4, 0)
    states = {row.message_id: row for row in rows_of(shop)}
    assert set(states) == {ids[1], ids[4], ids[7], ids[9]}
    assert {row.state for row in states.values()} == {PARKED}
    assert all(row.last_error for row in states.values())


def job_of(database: Database, broker: MemoryBroker) -> SweepJob:
    return SweepJob(Sweep(database, MemoryTransport(broker)), DaemonOptions(), lambda: 0.0)


def never() -> bool:
    return False


def test_F21_W6_a_mysql_server_that_becomes_read_only_is_refused_and_taken_again_as_a_primary(
    make_private_server: MakeServer, broker: MemoryBroker
) -> None:
    """F21. Under a live connection too, and for a user who may not write past `read_only`."""
    server = make_private_server("mysql")
    administrator = sa.create_engine(server.url(), isolation_level="AUTOCOMMIT")
    with administrator.connect() as connection:
        for statement in (
            "CREATE DATABASE shop",
            "CREATE USER app@'%%' IDENTIFIED BY 'app'",
            "GRANT ALL ON shop.* TO app@'%%'",
            "FLUSH PRIVILEGES",
        ):
            connection.exec_driver_sql(statement)
        url = make_url(server.url("shop")).set(username="app", password="app")
        database = as_database(sa.create_engine(url))
        create_tables(database.engine)
        put_rows(database, 1)
        job = job_of(database, broker)
        assert job.step(never).sent == 1
        ids = put_rows(database, 2)
        connection.exec_driver_sql("SET GLOBAL read_only = 1")
        for _ in range(2):  # the connection that was open, and a new one
            counts = job.step(never)
            assert "read-only" in str(counts.error)
            assert (counts.sent, job.trouble) == (0, READ_ONLY)
        connection.exec_driver_sql("SET GLOBAL read_only = 0")
        assert job.step(never).sent == 2
        assert not job.is_in_trouble
        assert len(ids) == 2
    database.close()
    administrator.dispose()


def test_F21_W6_a_mysql_replica_is_refused_also_for_a_user_who_may_write_past_read_only(
    make_private_server: MakeServer, broker: MemoryBroker
) -> None:
    """F21. On such a connection no statement fails, and rows that are gone on the primary are here."""
    database = as_database(sa.create_engine(make_private_server("mysql").url()))
    create_tables(database.engine)
    ids = put_rows(database, 2)
    with database.engine.connect() as connection:
        connection.exec_driver_sql("SET GLOBAL read_only = 1")
    job = job_of(database, broker)
    counts = job.step(never)
    assert "read-only" in str(counts.error)
    assert (counts.claimed, job.trouble) == (0, READ_ONLY)
    with database.engine.connect() as connection:
        connection.exec_driver_sql("SET GLOBAL read_only = 0")
    assert job.step(never).sent == len(ids)
    database.close()


def test_F21_W6_a_postgresql_database_that_is_read_only_is_refused_and_taken_again(
    postgresql_database: ServedDatabase, broker: MemoryBroker
) -> None:
    """F21."""
    engine = postgresql_database.engine(isolation_level="AUTOCOMMIT")
    create_tables(engine)
    database = as_database(postgresql_database.engine())
    put_rows(database, 1)
    setting = f'ALTER DATABASE "{postgresql_database.name}" SET default_transaction_read_only'
    with engine.connect() as connection:
        connection.exec_driver_sql(f"{setting} = on")
        watched = as_database(postgresql_database.engine())
        job = job_of(watched, broker)
        counts = job.step(never)
        assert "read-only" in str(counts.error)
        assert job.trouble == READ_ONLY
        assert rows_of(database)[0].state == LIVE
        connection.exec_driver_sql(f"{setting} = off")
        assert job.step(never).sent == 1
    watched.close()
    database.close()


def standby_of(primary: PrivateServer, standby: PrivateServer) -> None:
    """Make one private server the hot standby of another."""
    recipe = standby._recipe
    assert isinstance(recipe, PostgresqlRecipe)
    standby.stop()
    shutil.rmtree(standby._data)
    command = [str(recipe._programs / "pg_basebackup"), "-h", "127.0.0.1", "-U", "qmq", "-R"]
    command += ["-p", str(primary.port), "-D", str(standby._data), "--checkpoint=fast", "--no-sync"]
    # The directory is for it to make, and the folder around it is not its own.
    standby.folder.chmod(0o777)
    as_user(recipe.user(), command)
    standby.start()


def test_F21_W6_a_hot_standby_is_refused_and_taken_up_when_it_is_promoted(
    make_private_server: MakeServer, broker: MemoryBroker
) -> None:
    """F21, with a real replica and a real failover."""
    primary, standby = (make_private_server("postgresql") for _ in range(2))
    if not (standby._recipe._programs / "pg_basebackup").exists():  # type: ignore[attr-defined]  # a PostgreSQL server's recipe
        give_up("pg_basebackup is not beside the server's programs", os.environ)
    first = as_database(sa.create_engine(primary.url()))
    create_tables(first.engine)
    put_rows(first, 3)
    first.close()
    standby_of(primary, standby)
    second = as_database(sa.create_engine(standby.url()))
    job = job_of(second, broker)
    counts = job.step(never)
    assert "replica" in str(counts.error)
    assert (counts.sent, job.trouble) == (0, READ_ONLY)
    primary.kill()
    with second.engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT pg_promote()").scalar_one() is True
    assert job.step(never).sent == 3
    second.close()


@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_a_stop_gives_back_nothing_half_settled(
    a_server_database: ServedDatabase, broker_process: BrokerProcess, number: signal.Signals
) -> None:
    engine = a_server_database.engine()
    create_tables(engine)
    database = as_database(engine)
    put_rows(database, 3_000)
    command = ["qmq_client.cli", "watchdog", "run", "--batch-rows", "100"]
    command += ["--database", a_server_database.url, "--broker", broker_process.url]
    daemon = warm.start(command, stderr=subprocess.PIPE)
    assert daemon.stderr is not None
    daemon.stderr.readline()
    daemon.send_signal(number)
    _, log = daemon.communicate(timeout=DEADLINE_S)
    assert daemon.returncode == 0, log
    with engine.connect() as connection:
        owned = sa.select(sa.func.count()).where(OUTBOX.c.token != b"a dead sender's!")
        assert connection.scalar(owned) == 0, "every claim was settled before the end"
    database.close()
