"""A subject that the watchdog's token must not send to."""

from __future__ import annotations

import logging

import pytest

from qmq_client.transport.memory import MemoryBroker
from qmq_watchdog.databases import Database
from qmq_watchdog.sweep import Sweep
from tests.watchdog.rows import SUBJECT, make_due, put_rows
from tests.watchdog.transports import ForbiddingTransport


def test_W8_it_is_reported_less_and_less_often_over_sweeps_and_its_end_once(
    database: Database, broker: MemoryBroker, caplog: pytest.LogCaptureFixture
) -> None:
    put_rows(database)
    transport = ForbiddingTransport(broker)
    sweep = Sweep(database, transport)
    caplog.set_level(logging.INFO, "qmq.publish")
    for _ in range(5):
        assert sweep.step().failed == 1
        make_due(database)
    transport.forbids = False
    assert sweep.step().sent == 1
    lines = [record.getMessage().partition(":")[0] for record in caplog.records]
    waits = [f"messages of subject {SUBJECT} wait, refusals={count}" for count in (1, 2, 4)]
    assert lines == [*waits, f"messages of subject {SUBJECT} are accepted again, refusals=5"]
