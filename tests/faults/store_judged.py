"""A broker under load that is ended again and again, and the verdict on the history of all of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.store import Store
from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.wire.record import decode_record, record_message_id
from tests.crash.enumeration import SEED
from tests.faults.store_life import StoreProcess
from tests.faults.store_load import GROUP, LEASE_MS, Load
from tests.faults.store_serve import KEEPING
from tests.kit.checker import check
from tests.kit.events import Drained, Fault, Heal, Stored
from tests.kit.expectations import Group, Promises
from tests.kit.history import body_hash
from tests.kit.verdict import Verdict

SUBJECTS: Final = ("orders", "Invoices")
#: An end comes after at most so many more messages.
MESSAGES_MAX: Final = 90


def judged(
    data: Path,
    ends: int,
    *,
    kind: str,
    after_each: Callable[[random.Random], object],
    end: Callable[[StoreProcess], object] = StoreProcess.kill,
) -> Verdict:
    """A broker that is ended so often, each time followed by what else this fault does."""
    rng = random.Random(SEED)
    broker = StoreProcess(data, "--keep-all")
    broker.start()
    load = Load(broker.url, SUBJECTS)
    load.start()
    try:
        for _ in range(ends):
            load.wait_for_accepted(rng.randint(1, MESSAGES_MAX))
            load.events.append(Fault(kind=kind, target="broker", phase="begin"))
            end(broker)
            broker.clean_up()
            after_each(rng)
            broker.start()
            load.events.append(Fault(kind=kind, target="broker", phase="end"))
        load.wait_for_accepted(1)
        load.events.append(Heal())
        load.finish()
        load.events.append(Drained())
        broker.stop()
    finally:
        load.stop()
        broker.clean_up()
    verdict = check(
        [*load.events, *_stored(data)],
        groups={GROUP: Group(subjects=frozenset(SUBJECTS), has_effects=False)},
        promises=Promises(lease_ms=LEASE_MS),
    )
    assert verdict.counts["accepted"] == len(load.accepted)
    return verdict


def _stored(data: Path) -> Iterator[Stored]:
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
