"""C7 on real processes: consumers of an ordered group while their broker is killed under them."""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import closing
from pathlib import Path

from qmq_client.errors import TransportError
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.frame import build_message_frame
from qmq_client.wire.record import decode_record
from qmq_client.wire.requests import Backoff, Settlement
from tests.contract.asking import pull, record_of, settle
from tests.kit.broker_process import BrokerProcess

SUBJECT = "account.changed"
KEYS = 8
NUMBERS = 40
WAIT_S = 60.0
#: Lost hand-outs come again soon.
LEASE_MS = 1_000
BACKOFF = Backoff(first_ms=50, factor=1.0, max_ms=50)


class Ledger:
    """What the consumers saw; tells what was out of order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._highest: dict[str, int] = defaultdict(int)
        self._settled: set[tuple[str, int]] = set()
        self.faults: list[str] = []
        self.is_third = [threading.Event(), threading.Event(), threading.Event()]

    def given(self, key: str, number: int) -> None:
        with self._lock:
            if number and (key, number - 1) not in self._settled:
                self.faults.append(f"{key} {number} came before {number - 1} was settled")
            if number < self._highest[key]:
                self.faults.append(f"{key} {number} came again behind {self._highest[key]}")
            self._highest[key] = number

    def settling(self, key: str, number: int) -> None:
        with self._lock:
            self._settled.add((key, number))
            done = len(self._settled)
        for third, event in enumerate(self.is_third, start=1):
            if done >= KEYS * NUMBERS * third // 3:
                event.set()


def consume(url: str, name: str, ledger: Ledger, stopped: threading.Event) -> None:
    """One consumer: takes what comes, acks it one by one, and minds no outage."""
    transport = HttpTransport(url)
    while not stopped.is_set():
        try:
            got = pull(
                transport,
                SUBJECT,
                consumer=name,
                max_messages=3,
                wait_ms=200,
                lease_ms=LEASE_MS,
                max_attempts=1_000,
                ordered=True,
                backoff=BACKOFF,
            )
            for one in got.messages:
                record = decode_record(SUBJECT, one.record)
                assert record.key is not None
                ledger.given(record.key, int(record.body))
                ledger.settling(record.key, int(record.body))
                ack = (one.pull_sequence, one.pull_sequence + 1)
                settle(
                    transport,
                    SUBJECT,
                    Settlement(token=got.head.token, acks=(ack,)),
                    consumer=name,
                )
        except TransportError:
            stopped.wait(0.05)
    transport.close()


def send_numbers(url: str) -> None:
    with closing(HttpTransport(url)) as transport:
        for number in range(NUMBERS):
            records = [
                record_of(SUBJECT, b"%d" % number, key=f"account {key}") for key in range(KEYS)
            ]
            transport.send(build_message_frame({SUBJECT: records}))


def test_C7_the_order_of_each_key_holds_while_the_broker_is_killed(tmp_path: Path) -> None:
    ledger, stopped = Ledger(), threading.Event()
    with BrokerProcess(tmp_path / "data") as broker:
        consumers = [
            threading.Thread(target=consume, args=(broker.url, name, ledger, stopped))
            for name in ("one", "two", "three")
        ]
        try:
            send_numbers(broker.url)
            for thread in consumers:
                thread.start()
            for event in ledger.is_third[:2]:
                assert event.wait(WAIT_S), ledger.faults
                broker.kill()
                broker.start()
            assert ledger.is_third[2].wait(WAIT_S), ledger.faults
        finally:
            stopped.set()
            for thread in consumers:
                if thread.is_alive():
                    thread.join(WAIT_S)
    assert ledger.faults == []
