"""F25: the broker is killed under load, again and again; the history of all of it is judged."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from qmq_broker.clock import SYSTEM_CLOCK
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.store import Store
from qmq_client.wire.record import decode_record, record_message_id
from tests.crash.enumeration import SEED
from tests.faults.store_life import StoreProcess
from tests.faults.store_load import GROUP, LEASE_MS, Load
from tests.faults.store_serve import KEEPING
from tests.kit.checker import check
from tests.kit.events import Drained, Fault, Heal, Stored
from tests.kit.expectations import Group, Promises
from tests.kit.history import body_hash
from tests.services.private import free_port

KILLS: Final = 20
KILLS_BEFORE_A_RELEASE: Final = 1_000
SUBJECTS: Final = ("orders", "Invoices")
#: A kill comes after at most so many more messages.
MESSAGES_MAX: Final = 90


def stored(data: Path) -> Iterator[Stored]:
    """What the files hold at the end."""
    disk = OsDisk(str(data))
    store = Store.open(disk, SYSTEM_CLOCK, KEEPING)
    for subject in store.subjects():
        queue = store.queue(subject)
        assert queue is not None
        entries = queue.entries(0, queue.next_sequence)
        records = store.read_records(entries, subject=subject)
        for sequence, (entry, record) in enumerate(zip(entries, records, strict=True)):
            yield Stored(
                message_id=record_message_id(record).hex(),
                subject=subject,
                sequence=sequence,
                offset=entry.physical_offset,
                body_hash=body_hash(decode_record(subject, record).body),
            )
    store.close()
    disk.close()


def started(data: Path, listen: str) -> StoreProcess:
    """A broker that serves."""
    broker = StoreProcess(data, "--keep-all", listen=listen)
    broker.start()
    return broker


@pytest.mark.timeout(0)
def test_B1_B3_B7_B8_C1_a_broker_killed_under_load_loses_alters_and_doubles_nothing(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kills = KILLS_BEFORE_A_RELEASE if request.config.getoption("--release") else KILLS
    rng = random.Random(SEED)
    listen = f"127.0.0.1:{free_port()}"
    broker = started(tmp_path / "data", listen)
    load = Load(broker.url, SUBJECTS)
    load.start()
    try:
        for _ in range(kills):
            load.wait_for_accepted(rng.randrange(MESSAGES_MAX))
            load.events.append(Fault(kind="crash", target="broker", phase="begin"))
            broker.kill()
            broker.clean_up()
            broker = started(tmp_path / "data", listen)
            load.events.append(Fault(kind="crash", target="broker", phase="end"))
        load.wait_for_accepted(1)
        load.events.append(Heal())
        load.finish()
        load.events.append(Drained())
        broker.stop()
    finally:
        load.stop()
        broker.clean_up()
    verdict = check(
        [*load.events, *stored(tmp_path / "data")],
        groups={GROUP: Group(subjects=frozenset(SUBJECTS), has_effects=False)},
        promises=Promises(lease_ms=LEASE_MS),
    )
    assert verdict.ok, verdict
    assert verdict.counts["accepted"] == len(load.accepted)
    print(verdict.to_json())
