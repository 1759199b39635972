"""F1: the application is killed between any two of insert, commit, send and delete."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

import pytest

from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.deliveries import Delivered
from qmq_client.wire.record import record_message_id
from qmq_client.wire.requests import PullRequest
from qmq_watchdog.databases import Database as WatchedDatabase
from qmq_watchdog.sweep import Sweep
from tests.client.truth import Truth
from tests.client.world import OUTBOX, SUBJECT, set_up
from tests.faults.shop_process import BOUNDARIES, LAST
from tests.kit import warm
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import DEADLINE_S
from tests.services.databases import Database

ROOT: Final = Path(__file__).resolve().parents[2]


def run_until_killed(url: str, broker_url: str, boundary: str) -> list[str]:
    """Start the application, kill it where it waits; what it said before."""
    command = ["tests.faults.shop_process", url, broker_url, boundary]
    process = warm.start(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    said = []
    while (line := process.stdout.readline()) not in ("here\n", ""):
        said.append(line.strip())
    assert line, f"it ended by itself, after {said}"
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    return said


def pull(broker_url: str, group: str, subject: str = SUBJECT) -> list[Delivered]:
    """Everything new for this group."""
    transport = HttpTransport(broker_url)
    request = PullRequest(
        subject=subject,
        group=group,
        consumer="test",
        start="latest",
        max_messages=1_000,
        wait_ms=0,
    )
    try:
        return list(transport.pull(request).messages)
    finally:
        transport.close()


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_F1_S1_S2_O1_O5_an_application_killed_at_any_boundary_loses_and_doubles_nothing(
    a_database: Database, broker_process: BrokerProcess, boundary: str
) -> None:
    set_up(a_database.url)
    group = f"f1-{a_database.kind}-{boundary}"
    pull(broker_process.url, group)
    run_until_killed(a_database.url, broker_process.url, boundary)
    truth = Truth(a_database.url)
    count = LAST if boundary in ("send", "insert") else LAST + 1
    assert truth.read("SELECT count(*) FROM business_order") == [(count,)]
    left = truth.read(f"SELECT message_id FROM {OUTBOX}")
    assert len(left) == count - LAST
    truth.change(f"UPDATE {OUTBOX} SET due_at_ms = 0")
    engine = a_database.engine()
    watched = WatchedDatabase(name=a_database.kind, store=OutboxStore(engine), engine=engine)
    transport = HttpTransport(broker_process.url)
    sweep = Sweep(watched, transport)
    assert sweep.step().sent == count - LAST
    transport.close()
    watched.close()
    assert truth.read(f"SELECT count(*) FROM {OUTBOX}") == [(0,)]
    ids = [record_message_id(each.record) for each in pull(broker_process.url, group)]
    assert (len(ids), len(set(ids))) == (count, count)
