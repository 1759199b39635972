"""F13: the line between a consumer and its broker is cut, flaps, or is open in one direction only."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import pytest

from qmq_client.ids import MESSAGE_IDS
from qmq_client.message import Message, message_to_record
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.frame import build_message_frame
from qmq_client.wire.record import encode_record
from tests.client.truth import Truth
from tests.client.world import SUBJECT, set_up
from tests.conftest import MakeDatabase
from tests.faults.proxy import Proxy
from tests.faults.test_partitioned_watchdog import break_line
from tests.kit import warm
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import DEADLINE_S, wait_for

ROOT: Final = Path(__file__).resolve().parents[2]
#: How often the line is broken, each time after some effects more.
TIMES: Final = 2
MESSAGES: Final = 40
#: So many calls have ended without an answer that the lease of what was in hand has ended, too.
CONNECTIONS_GIVEN_UP: Final = 6


@contextmanager
def a_consumer(database_url: str, broker_url: str) -> Iterator[None]:
    """It handles messages inside the block, and ends well."""
    command = ["tests.faults.consumer_process", database_url, broker_url]
    process = warm.start(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


def send(broker_url: str, labels: list[str]) -> None:
    records = [
        encode_record(
            message_to_record(Message(SUBJECT, each), new_id=MESSAGE_IDS.next_id(), now_ms=1)
        )
        for each in labels
    ]
    with closing(HttpTransport(broker_url)) as transport:
        transport.send(build_message_frame({SUBJECT: records}))


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """One without other messages: this group begins with the earliest."""
    with BrokerProcess(tmp_path / "data") as process:
        yield process


@pytest.mark.parametrize(
    ("kind", "fault"), [("sqlite", "cut"), ("mysql", "requests"), ("postgresql", "answers")]
)
def test_F13_C1_C3_C5_a_consumer_cut_off_from_the_broker_has_every_effect_once(
    kind: str, fault: str, make_database: MakeDatabase, broker: BrokerProcess
) -> None:
    """What it pulled before is delivered again after the lease; what it said then comes late."""
    database = make_database(kind)
    set_up(database.url)
    truth = Truth(database.url)
    truth.change("CREATE TABLE effect (label VARCHAR(100) NOT NULL)")

    def effects() -> list[str]:
        return sorted(str(row[0]) for row in truth.read("SELECT label FROM effect"))

    def has_come_to(count: int) -> bool:
        return len(effects()) >= count

    labels: list[str] = []
    with (
        Proxy(urlsplit(broker.url).port or 0) as line,
        a_consumer(database.url, f"http://127.0.0.1:{line.port}"),
    ):
        for time in range(TIMES):
            before = len(labels)
            labels += [f"{time}.{number}" for number in range(MESSAGES)]
            send(broker.url, labels[before:])
            wait_for(partial(has_come_to, before + MESSAGES // 4))
            break_line(line, fault)
            send(broker.url, [f"{time}.late"])
            labels.append(f"{time}.late")
            if fault != "cut":
                wait_for(lambda: line.held_count >= CONNECTIONS_GIVEN_UP)
            line.heal()
            wait_for(partial(has_come_to, len(labels)), effects)
    assert effects() == sorted(labels)
