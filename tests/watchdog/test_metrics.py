"""What the daemon tells machines: numbers that are true, few labels, no work for the databases."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from qmq_client.errors import ConfigurationError
from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.retry import Backoff
from qmq_client.settings.sections import BrokerSection, Config, DatabaseSection, WatchdogSection
from qmq_client.signal_flag import SignalFlag
from qmq_client.transport.memory import MemoryBroker, MemoryTransport
from qmq_watchdog.collector import WatchdogCollector
from qmq_watchdog.daemon import Daemon
from qmq_watchdog.databases import Database
from qmq_watchdog.endpoint import _CONNECTIONS_MAX, BEAT_S_MAX, Endpoint, Health
from qmq_watchdog.options import DaemonOptions
from qmq_watchdog.outage import BrokerGate
from qmq_watchdog.service import Service
from qmq_watchdog.sweep import Sweep
from qmq_watchdog.sweep_job import SweepJob
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import wait_for
from tests.watchdog.rows import damage, executed, make_database, put_rows
from tests.watchdog.transports import HandClock

OPTIONS = DaemonOptions(sample_s=15.0)
DEADLINE_S = 60.0


class Watched:
    """A daemon that is not started, and its numbers; each job is stepped by hand."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.clock = HandClock()
        self.daemon = Daemon(clock=self.clock)
        self._broker = broker
        self._registry = CollectorRegistry()
        self._registry.register(WatchdogCollector(self.daemon, clock=self.clock))

    def add(self, database: Database) -> SweepJob:
        sweep = Sweep(database, MemoryTransport(self._broker))
        job = SweepJob(sweep, OPTIONS, lambda: 0.0, clock=self.clock)
        self.daemon.add(job)
        return job

    def value(self, name: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(f"qmq_watchdog_{name}", labels)


@pytest.fixture
def watched(broker: MemoryBroker) -> Watched:
    return Watched(broker)


def never() -> bool:
    return False


def test_rows_that_the_database_keeps_are_counted_once_however_often_they_are_tried(
    database: Database, watched: Watched
) -> None:
    with database.engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE TRIGGER veto BEFORE DELETE ON qmq_outbox BEGIN SELECT RAISE(IGNORE); END"
        )
    job = watched.add(database)
    put_rows(database, 3)
    job.step(never)
    assert watched.value("undeleted_total", database="shop") == 3
    job.step(never)
    assert watched.value("undeleted_total", database="shop") == 3
    with database.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE qmq_outbox SET due_at_ms = 0")
    assert database.store.purge_sent() == 3
    assert watched.value("undeleted_total", database="shop") == 3
    put_rows(database, 2)
    job.step(never)
    assert watched.value("undeleted_total", database="shop") == 5


def test_counts_and_ages_are_those_of_the_outbox(database: Database, watched: Watched) -> None:
    job = watched.add(database)
    ids = put_rows(database, 3)
    put_rows(database, 2, due_in_ms=3_600_000)
    damage(database, ids[0])
    job.step(never)
    assert watched.value("sent_total", database="shop") == 2
    assert watched.value("parked_total", database="shop") == 1
    assert watched.value("rows", database="shop", state="live") == 2
    assert watched.value("rows", database="shop", state="due") == 0
    assert watched.value("rows", database="shop", state="parked") == 1
    assert watched.value("sweeps_total", database="shop") == 1
    assert watched.value("undeleted_total", database="shop") == 0
    assert watched.value("breaker_open", database="shop") == 0
    assert watched.value("databases") == 1


def test_the_age_of_the_oldest_unsent_row_grows_between_two_looks_and_while_nobody_can_look(
    database: Database, watched: Watched
) -> None:
    job = watched.add(database)
    put_rows(database, 1, due_in_ms=3_600_000)
    job.step(never)
    first = watched.value("oldest_unsent_age_seconds", database="shop")
    assert first is not None
    watched.clock.elapsed_s += 100.0
    assert watched.value("oldest_unsent_age_seconds", database="shop") == first + 100.0
    assert watched.value("last_success_age_seconds", database="shop") == 100.0


def test_the_age_is_looked_at_also_while_the_broker_is_away_and_nobody_claims(
    database: Database, watched: Watched, broker: MemoryBroker
) -> None:
    gate = BrokerGate(Backoff(jitter=0.0), lambda: 0.0, watched.clock)
    job = SweepJob(
        Sweep(database, MemoryTransport(broker)),
        OPTIONS,
        lambda: 0.0,
        clock=watched.clock,
        gate=gate,
    )
    watched.daemon.add(job)
    job.step(never)
    assert watched.value("rows", database="shop", state="live") == 0
    gate.on_failure()
    gate.on_failure(at_least_s=3_600.0)
    put_rows(database, 2)
    watched.clock.elapsed_s += OPTIONS.sample_s
    assert job.step(never).claimed == 0
    assert watched.value("rows", database="shop", state="live") == 2
    assert (watched.value("oldest_unsent_age_seconds", database="shop") or 0.0) >= 0.0
    assert job.totals.oldest_unsent_ms is not None
    assert job.delay_s == OPTIONS.sample_s


def test_a_look_is_taken_only_as_often_as_configured_and_a_scrape_asks_no_database(
    database: Database, watched: Watched
) -> None:
    job = watched.add(database)
    put_rows(database, 1, due_in_ms=3_600_000)

    def selects() -> int:
        with executed() as statements:
            job.step(never)
        return sum("min(" in each.text for each in statements)

    assert [selects(), selects()] == [1, 0]
    watched.clock.elapsed_s += OPTIONS.sample_s
    assert selects() == 1
    with executed() as statements:
        assert watched.value("rows", database="shop", state="live") == 1
    assert statements == []


def test_troubles_are_reported_by_kind_and_a_removed_database_leaves_no_series(
    tmp_path: Path, watched: Watched
) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'nowhere' / 'dead.db'}")
    job = watched.add(Database(name="dead", store=OutboxStore(engine), engine=engine))
    job.step(never)
    job.step(never)
    labels = {"database": "dead", "kind": "database_unavailable"}
    assert watched.value("errors_total", **labels) == 2
    assert watched.value("breaker_open", database="dead") == 1
    watched.daemon.remove("dead")
    assert watched.value("breaker_open", database="dead") is None
    assert watched.value("databases") == 0


def test_health_names_the_oldest_row_and_the_troubles_and_fails_only_for_the_daemon_itself(
    tmp_path: Path, database: Database, watched: Watched
) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'nowhere' / 'dead.db'}")
    jobs = [watched.add(database)]
    jobs.append(watched.add(Database(name="dead", store=OutboxStore(engine), engine=engine)))
    put_rows(database, 1, due_in_ms=3_600_000)
    for job in jobs:
        job.step(never)
    health = Health(watched.daemon, watched.clock)
    is_well, found = health.look()
    assert is_well
    assert (found["oldest_unsent_in"], found["troubles"]) == (
        "shop",
        {"dead": "database_unavailable"},
    )
    watched.clock.elapsed_s += BEAT_S_MAX + 1
    assert health.look()[0] is False
    health.beat()
    assert health.look()[0] is True


@contextmanager
def serving(database: Database, broker_url: str) -> Iterator[str]:
    """A whole watchdog with metrics on a port that the kernel chose."""
    config = Config(
        broker=BrokerSection(url=broker_url),
        databases=(DatabaseSection(name="shop", url=str(database.engine.url)),),
        watchdog=WatchdogSection(metrics_listen="127.0.0.1:0", poll_s=0.01),
    )
    service = Service(config, {})
    assert service.endpoint is not None
    stopping = SignalFlag()
    thread = threading.Thread(target=service.run, args=(stopping, SignalFlag(), lambda: config))
    thread.start()
    try:
        yield f"http://{service.endpoint.address}"
    finally:
        stopping.set()
        thread.join(DEADLINE_S)


def test_metrics_and_health_are_served_over_http(
    database: Database, broker_process: BrokerProcess
) -> None:
    put_rows(database, 2)
    with serving(database, broker_process.url) as url:
        with urllib.request.urlopen(f"{url}/metrics", timeout=DEADLINE_S) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        with urllib.request.urlopen(f"{url}/healthz", timeout=DEADLINE_S) as answer:
            assert json.load(answer)["status"] == "ok"
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{url}/secrets", timeout=DEADLINE_S)
        caught.value.close()
    names = {family.name for family in families}
    assert {"qmq_watchdog_sent", "qmq_watchdog_databases", "qmq_watchdog_breaker_open"} <= names
    labels = {name for family in families for sample in family.samples for name in sample.labels}
    assert labels <= {"database", "state", "kind"}


def test_slow_clients_hold_up_neither_others_nor_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qmq_watchdog.endpoint._REQUEST_S_MAX", 1.0)
    daemon = Daemon()
    endpoint = Endpoint("127.0.0.1:0", daemon, Health(daemon))
    endpoint.start()
    host, _, port = endpoint.address.partition(":")
    slow = [socket.create_connection((host, int(port))) for _ in range(8)]
    for each in slow:
        each.sendall(b"GET /metr")
    with urllib.request.urlopen(f"http://{endpoint.address}/healthz", timeout=DEADLINE_S) as answer:
        assert answer.status == 200
    closing = threading.Thread(target=endpoint.close)
    closing.start()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    for each in slow:
        each.settimeout(DEADLINE_S)
        assert each.recv(1) == b"", "its time is over, whatever it goes on to write"
        each.close()


def test_a_machine_without_threads_to_give_leaves_no_place_of_a_client_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    daemon = Daemon()
    endpoint = Endpoint("127.0.0.1:0", daemon, Health(daemon))
    endpoint.start()
    host, _, port = endpoint.address.partition(":")
    with monkeypatch.context() as without_threads:
        without_threads.setattr(threading.Timer, "start", refuse)
        for _ in range(_CONNECTIONS_MAX):
            with socket.create_connection((host, int(port)), DEADLINE_S) as unanswered:
                assert unanswered.recv(1) == b""
    wait_for(lambda: endpoint._server._room._value == _CONNECTIONS_MAX)
    with urllib.request.urlopen(f"http://{endpoint.address}/healthz", timeout=DEADLINE_S) as answer:
        assert answer.status == 200
    endpoint.close()


def test_it_listens_on_an_address_of_the_sixth_version_too() -> None:
    daemon = Daemon()
    try:
        endpoint = Endpoint("[::1]:0", daemon, Health(daemon))
    except ConfigurationError:
        pytest.skip("this machine has no such addresses")
    endpoint.start()
    assert endpoint.address.startswith("[::1]:")
    with urllib.request.urlopen(f"http://{endpoint.address}/healthz", timeout=DEADLINE_S) as answer:
        assert answer.status == 200
    endpoint.close()


def test_an_address_that_is_taken_is_a_wrong_setting(database: Database) -> None:
    with serving(database, "http://127.0.0.1:1") as url:
        section = WatchdogSection(metrics_listen=url.removeprefix("http://"))
        with pytest.raises(ConfigurationError, match="metrics_listen"):
            Service(Config(watchdog=section), {})


def test_fewer_connections_than_two_for_each_worker_is_a_wrong_setting() -> None:
    for connections_max in (10, 63):
        with pytest.raises(ConfigurationError, match="Give at least 64"):
            Service(Config(watchdog=WatchdogSection(connections_max=connections_max)), {})
    Service(Config(watchdog=WatchdogSection(connections_max=64)), {})


def test_W1_the_waits_of_an_idle_database_leave_room_in_ten_seconds() -> None:
    section = WatchdogSection()
    from qmq_client.options import ProducerOptions

    takeover_s = ProducerOptions().takeover_ms / 1000
    assert takeover_s + max(section.poll_s, section.idle_poll_s) + section.share_s < 10.0


def test_W1_a_database_that_had_nothing_for_a_while_is_asked_less_often_and_then_again(
    tmp_path: Path, broker: MemoryBroker
) -> None:
    database, clock = make_database(tmp_path / "idle.db"), HandClock()
    job = SweepJob(
        Sweep(database, MemoryTransport(broker)), DaemonOptions(), lambda: 0.0, clock=clock
    )
    waits_s = []
    for passed_s in (0.0, 59.0, 1.0, 100.0):
        clock.elapsed_s += passed_s
        job.step(never)
        waits_s.append(job.delay_s)
    put_rows(database, 1)
    job.step(never)
    waits_s.append(job.delay_s)
    assert waits_s == [1.0, 1.0, 3.0, 3.0, 1.0]
    database.close()
