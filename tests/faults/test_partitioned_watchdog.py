"""F13: the line between a watchdog and its broker, or a database, is cut or open in one direction only.

A real watchdog behind a forwarder. What was held back arrives after the line is healed, when the lease
of the rows has long ended and others have sent them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Final
from urllib.parse import urlsplit

import pytest
import sqlalchemy as sa

from qmq_client.outbox.table import create_tables
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.record import record_message_id
from qmq_watchdog.databases import Database
from qmq_watchdog.sweep import Sweep
from tests.faults.proxy import Proxy, Way
from tests.faults.test_killed_application import pull
from tests.kit import warm
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import wait_for
from tests.services.databases import Database as ServedDatabase
from tests.watchdog.rows import SUBJECT, left, put_rows, rows_of
from tests.watchdog.test_servers import as_database

DEADLINE_S: Final = 60.0
#: What the line does: cut, or open in the other direction only.
FAULTS: Final = ("cut", "requests", "answers")
#: So short that a test can wait for them to end.
PATIENCE: Final = {
    "QMQ_WATCHDOG_STATEMENT_S_MAX": "1",
    "QMQ_WATCHDOG_CONNECT_S_MAX": "1",
    "QMQ_WATCHDOG_OUTAGE_S_MAX": "0.1",
    "QMQ_WATCHDOG_POLL_S": "0.1",
    "QMQ_WATCHDOG_LEASE_MS": "1000",
}
#: Pieces of a sweep that go one way over the line: more than there are, so that the last cut is none.
PIECES_MAX: Final = 60


class Log:
    """Lines of a daemon, read as they come, so that its pipe never fills."""

    def __init__(self, daemon: warm.Process) -> None:
        self._daemon = daemon
        self._lines: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._daemon.stderr is not None
        for line in self._daemon.stderr:
            self._lines.append(line)

    def wait_for(self, text: str) -> None:
        wait_for(lambda: any(text in line for line in self._lines), self.__str__)

    def __str__(self) -> str:
        return "".join(self._lines[-20:])


@contextmanager
def a_watchdog(database_url: str, broker_url: str) -> Iterator[Log]:
    """`qmq watchdog run`, which ends well when it is told to."""
    command = ["qmq_client.cli", "watchdog", "run"]
    command += ["--database", database_url, "--broker", broker_url]
    daemon = warm.start(command, stderr=subprocess.PIPE, env={**os.environ, **PATIENCE})
    log = Log(daemon)
    try:
        log.wait_for("watchdog.started")
        yield log
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(DEADLINE_S) == 0, log
    finally:
        daemon.kill()
        daemon.wait(DEADLINE_S)
        log._thread.join(DEADLINE_S)
        assert daemon.stderr is not None
        daemon.stderr.close()


def break_line(line: Proxy, fault: str) -> None:
    if fault == "cut":
        line.cut()
    else:
        line.hold("requests" if fault == "requests" else "answers")


def behind(url: str, line: Proxy) -> str:
    """The same address by way of the forwarder."""
    return sa.make_url(url).set(port=line.port).render_as_string(hide_password=False)


@contextmanager
def a_shop(served: ServedDatabase) -> Iterator[Database]:
    """Reached straight, whatever becomes of the line."""
    engine = served.engine()
    create_tables(engine)
    made = as_database(engine)
    yield made
    made.close()


@pytest.fixture
def shop(a_server_database: ServedDatabase) -> Iterator[Database]:
    with a_shop(a_server_database) as made:
        yield made


def stored(broker: BrokerProcess, group: str) -> list[bytes]:
    """Ids that the broker has stored since the last look of this group."""
    return [record_message_id(each.record) for each in pull(broker.url, group, SUBJECT)]


@pytest.mark.parametrize("fault", FAULTS)
def test_F13_O1_O5_W2_a_watchdog_cut_off_from_the_broker_doubles_nothing_when_it_is_back(
    postgresql_database: ServedDatabase, broker_process: BrokerProcess, fault: str
) -> None:
    """Its rows are sent by another watchdog meanwhile; its own requests may arrive after that."""
    group = f"w-b-{fault}"
    stored(broker_process, group)
    with (
        a_shop(postgresql_database) as shop,
        Proxy(urlsplit(broker_process.url).port or 0) as line,
        a_watchdog(postgresql_database.url, f"http://127.0.0.1:{line.port}") as log,
        closing(HttpTransport(broker_process.url)) as transport,
    ):
        ids = put_rows(shop, 5)
        wait_for(lambda: not left(shop), log.__str__)
        break_line(line, fault)
        ids += put_rows(shop, 20)
        if fault == "cut":
            log.wait_for("sweep.failed")
        else:
            assert line.held.wait(DEADLINE_S)
        other = Sweep(shop, transport)
        wait_for(lambda: other.step().error is None and not left(shop), lambda: rows_of(shop))
        ids += put_rows(shop, 5)
        line.heal()
        wait_for(lambda: not left(shop), log.__str__)
    assert sorted(stored(broker_process, group)) == sorted(ids)


@pytest.mark.parametrize("fault", FAULTS)
def test_F13_O1_O5_W8_a_watchdog_cut_off_from_a_database_is_back_when_the_line_is(
    a_server_database: ServedDatabase, shop: Database, broker_process: BrokerProcess, fault: str
) -> None:
    group = f"w-d-{a_server_database.kind}-{fault}"
    stored(broker_process, group)
    with (
        Proxy(sa.make_url(a_server_database.url).port or 0) as line,
        a_watchdog(behind(a_server_database.url, line), broker_process.url) as log,
    ):
        ids = put_rows(shop, 5)
        wait_for(lambda: not left(shop), log.__str__)
        break_line(line, fault)
        ids += put_rows(shop, 20)
        log.wait_for("sweep.failed")
        ids += put_rows(shop, 5)
        line.heal()
        wait_for(lambda: not left(shop), log.__str__)
    assert sorted(stored(broker_process, group)) == sorted(ids)


@pytest.mark.parametrize("way", ["requests", "answers"])
def test_F13_O1_O2_O5_a_line_to_the_database_cut_at_any_piece_of_a_sweep_loses_and_doubles_nothing(
    a_server_database: ServedDatabase, shop: Database, broker_process: BrokerProcess, way: Way
) -> None:
    """At every one in turn: before it arrives, or when it was done and only the answer is missing."""
    group = f"any-{a_server_database.kind}-{way}"
    stored(broker_process, group)
    ids: list[bytes] = []
    with (
        Proxy(sa.make_url(a_server_database.url).port or 0) as line,
        closing(HttpTransport(broker_process.url)) as transport,
    ):
        a_server_database.url = behind(a_server_database.url, line)
        watched = as_database(a_server_database.engine())
        sweep = Sweep(watched, transport)
        for piece in range(PIECES_MAX):
            ids += put_rows(shop, 3)
            line.cut_at(way, piece)
            sweep.step()
            line.heal()
            if not line.held.is_set():
                break
            with shop.engine.begin() as connection:  # the lease of what it claimed has ended
                connection.exec_driver_sql("UPDATE qmq_outbox SET due_at_ms = 0")
            assert sweep.step().error is None
            assert not left(shop)
        else:
            raise AssertionError("a sweep has more pieces than that")
        watched.close()
    assert piece > 4, "nothing was cut"
    assert sorted(stored(broker_process, group)) == sorted(ids)
