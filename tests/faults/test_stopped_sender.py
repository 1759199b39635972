"""F14: a sender stands still for longer than its claim on a row, and then goes on."""

from __future__ import annotations

import signal
import subprocess

import pytest

from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.record import record_message_id
from qmq_watchdog.databases import Database as WatchedDatabase
from qmq_watchdog.sweep import Sweep
from tests.client.truth import Truth
from tests.client.world import OUTBOX, set_up
from tests.faults.shop_process import LAST
from tests.faults.test_killed_application import pull
from tests.kit import warm
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import DEADLINE_S
from tests.services.databases import Database
from tests.watchdog.processes import wait_until_stopped


@pytest.mark.parametrize("boundary", ["commit", "accept"])
def test_F14_O3_O5_a_sender_that_slept_through_its_claim_changes_no_row_and_doubles_nothing(
    a_database: Database, broker_process: BrokerProcess, boundary: str
) -> None:
    """Its row has another owner meanwhile; another row, made then, is there to be harmed."""
    set_up(a_database.url)
    group = f"f14-{a_database.kind}-{boundary}"
    pull(broker_process.url, group)
    where = ["tests.faults.shop_process", a_database.url, broker_process.url, boundary, "stop"]
    process = warm.start(where, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        while process.stdout.readline() != "here\n":
            assert process.poll() is None, "it ended by itself"
        process.send_signal(signal.SIGSTOP)
        wait_until_stopped(process)
        truth = Truth(a_database.url)
        assert truth.read(f"SELECT count(*) FROM {OUTBOX}") == [(1,)]
        take_over(a_database, broker_process.url, truth)
        assert truth.read(f"SELECT count(*) FROM {OUTBOX}") == [(0,)]
        process.send_signal(signal.SIGCONT)
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait(DEADLINE_S)
    assert truth.read(f"SELECT count(*) FROM {OUTBOX}") == [(0,)]
    ids = [record_message_id(each.record) for each in pull(broker_process.url, group)]
    assert (len(ids), len(set(ids))) == (LAST + 1, LAST + 1)


def take_over(database: Database, broker_url: str, truth: Truth) -> None:
    """What a watchdog does when the claim of the one who sleeps is over."""
    truth.change(f"UPDATE {OUTBOX} SET due_at_ms = 0")
    engine = database.engine()
    watched = WatchedDatabase(name=database.kind, store=OutboxStore(engine), engine=engine)
    transport = HttpTransport(broker_url)
    assert Sweep(watched, transport).step().sent == 1
    transport.close()
    watched.close()
