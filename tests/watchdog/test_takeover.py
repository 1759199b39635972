"""Real processes, really killed and stopped: what the watchdog makes of it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from qmq_client.transport.http import HttpTransport
from qmq_client.wire.deliveries import Delivered
from qmq_client.wire.record import record_message_id
from qmq_client.wire.requests import PullRequest
from qmq_watchdog.databases import Database
from qmq_watchdog.sweep import Sweep
from tests.kit import warm
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import DEADLINE_S
from tests.watchdog.processes import resume, start, wait_until_stopped
from tests.watchdog.rows import SUBJECT, left, make_due, put_rows

DUE_AND_TAKEN_MS = 10_000


@pytest.fixture
def path(database: Database) -> Path:
    assert database.engine.url.database is not None
    return Path(database.engine.url.database)


@pytest.fixture
def stored(broker_process: BrokerProcess, request: pytest.FixtureRequest) -> Iterator[Stored]:
    group = "".join(c if c.isalnum() else "-" for c in request.node.name)
    found = Stored(broker_process.url, group=group[:100])
    yield found
    found.close()


class Stored:
    """What the broker has, as a consumer group of this test sees it."""

    def __init__(self, broker_url: str, group: str) -> None:
        self._transport = HttpTransport(broker_url)
        self._group = group
        self.pull()  # what other tests stored is not ours

    def pull(self, wait_ms: int = 0) -> list[Delivered]:
        request = PullRequest(
            subject=SUBJECT,
            group=self._group,
            consumer="test",
            start="latest",
            max_messages=10_000,
            wait_ms=wait_ms,
        )
        return list(self._transport.pull(request).messages)

    def close(self) -> None:
        self._transport.close()

    def ids(self) -> list[bytes]:
        """Message ids that were stored since the test began, in order, doubles and all."""
        return [record_message_id(each.record) for each in self.pull(wait_ms=0)]


@pytest.fixture
def sweep(database: Database, broker_process: BrokerProcess) -> Iterator[Sweep]:
    """Of this process."""
    with closing(HttpTransport(broker_process.url)) as transport:
        yield Sweep(database, transport)


def dead_producer(path: Path, broker_url: str) -> None:
    """A process commits one message and is killed before the send."""
    process = start("producer", path, broker_url)
    assert process.stdout is not None
    assert process.stdout.readline() == "sending\n"
    process.kill()
    process.communicate(timeout=DEADLINE_S)


def test_W1_rows_of_a_killed_producer_are_taken_over_as_soon_as_they_are_due(
    database: Database, path: Path, broker_process: BrokerProcess, stored: Stored, sweep: Sweep
) -> None:
    dead_producer(path, broker_process.url)
    (message_id,) = left(database)
    assert sweep.step().claimed == 0, "until it is due the row belongs to its sender"
    make_due(database)
    assert sweep.step().sent == 1
    assert left(database) == set()
    assert stored.ids() == [message_id]


def test_W1_a_running_watchdog_takes_over_within_ten_seconds_at_defaults(
    database: Database, path: Path, broker_process: BrokerProcess, stored: Stored
) -> None:
    command = ["qmq_client.cli", "watchdog", "run"]
    command += ["--database", f"sqlite:///{path}", "--broker", broker_process.url]
    watchdog = warm.start(command, stderr=subprocess.PIPE)
    try:
        assert watchdog.stderr is not None
        assert "watchdog.started" in watchdog.stderr.readline()
        dead_producer(path, broker_process.url)
        assert len(stored.pull(wait_ms=DUE_AND_TAKEN_MS)) == 1
    finally:
        watchdog.send_signal(signal.SIGTERM)
        _, log = watchdog.communicate(timeout=DEADLINE_S)
    assert watchdog.returncode == 0
    assert "sweep.done database=shop claimed=1 sent=1" in log
    assert "watchdog.stopped" in log
    assert left(database) == set()


@pytest.mark.parametrize("moment", ["before_send", "after_send"])
def test_W2_a_watchdog_stopped_inside_its_claim_does_no_harm(
    moment: str,
    database: Database,
    path: Path,
    broker_process: BrokerProcess,
    stored: Stored,
    sweep: Sweep,
) -> None:
    ids = put_rows(database, 20)
    first = start(moment, path, broker_process.url)
    wait_until_stopped(first)
    assert sweep.step().claimed == 0, "the claim of the stopped one still holds"
    make_due(database)  # its lease has ended
    assert sweep.step().sent == 20

    late = put_rows(database, 3, due_in_ms=60_000)
    counts = resume(first)
    assert (counts["claimed"], counts["sent"], counts["lost"]) == (20, 20, 20)
    assert left(database) == set(late), "the late owner changed no row"
    found = stored.ids()
    assert sorted(found) == sorted(ids), "nothing lost, and nothing stored twice"


def test_W2_a_watchdog_killed_inside_its_claim_loses_nothing(
    database: Database, path: Path, broker_process: BrokerProcess, stored: Stored, sweep: Sweep
) -> None:
    ids = put_rows(database, 20)
    first = start("after_send", path, broker_process.url)
    wait_until_stopped(first)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate(timeout=DEADLINE_S)
    make_due(database)
    assert sweep.step().sent == 20
    assert sorted(stored.ids()) == sorted(ids)
    assert left(database) == set()


def test_W2_four_watchdogs_at_once_send_every_row_once(
    database: Database, path: Path, broker_process: BrokerProcess, stored: Stored, sweep: Sweep
) -> None:
    ids = put_rows(database, 2_000)
    command = ["qmq_client.cli", "watchdog", "sweep", "--json"]
    command += ["--database", f"sqlite:///{path}", "--broker", broker_process.url]
    command += ["--batch-rows", "50"]
    watchdogs = [warm.start(command, stdout=subprocess.PIPE) for _ in range(4)]
    for watchdog in watchdogs:
        watchdog.communicate(timeout=DEADLINE_S)
    # One that finds the database locked for two seconds leaves its rows to whoever comes after.
    assert {watchdog.returncode for watchdog in watchdogs} <= {0, 3}
    make_due(database)
    assert sweep.step().error is None
    assert left(database) == set()
    found = stored.ids()
    assert len(found) == len(ids)
    assert set(found) == set(ids)
