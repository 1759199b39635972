"""Records are read in stretches, and come out as one by one, whatever stands between them."""

from __future__ import annotations

import itertools

import pytest

from qmq_broker.errors import CorruptionError
from qmq_broker.options import StoreOptions
from qmq_broker.storage import reading
from qmq_broker.storage.store import Store
from qmq_client.wire.deliveries import Records
from qmq_client.wire.message_id import MessageIds
from tests.crash.recording_disk import RecordingDisk
from tests.crash.world import make_frame
from tests.kit.clock import FakeClock

SUBJECT = "orders"
#: Lengths of the bodies of each frame's records.
FRAMES = {
    "alone": [[5], [5], [5]],
    "of one length": [[7] * 9, [7] * 4],
    "of many lengths": [[*range(40)], [3, 3, 90]],
    "mixed": [[8] * 5, [1], [*range(9)], [8] * 5, [40_000], [8]],
}


def stored(frames: list[list[int]]) -> tuple[Store, list[bytes]]:
    """A store with these frames of the subject and others between, and the subject's records."""
    store, ids = (
        Store.open(RecordingDisk(), FakeClock(), StoreOptions(reserve_bytes=0)),
        MessageIds(7),
    )
    made = [make_frame(ids, {"before": [3], SUBJECT: lengths}) for lengths in frames]
    store.append(made)
    store.commit_and_step()
    records = [list(one.records()) for one in made]
    return store, [data for subject, data in itertools.chain(*records) if subject == SUBJECT]


def read(store: Store, wanted: list[int]) -> Records:
    """The records of the subject with these sequences, in this order."""
    queue = store.queue(SUBJECT)
    assert queue is not None
    entries = [queue.entries(sequence, 1)[0] for sequence in wanted]
    return store.read_together(entries, subject=SUBJECT)


@pytest.mark.parametrize("frames", FRAMES.values(), ids=FRAMES)
@pytest.mark.parametrize("step", [1, 2, -1, -3])
@pytest.mark.parametrize("read_bytes_max", [60, 300, 8 * 1024 * 1024])
def test_records_that_are_read_together_are_those_asked_for_in_their_order(
    frames: list[list[int]], step: int, read_bytes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "READ_BYTES_MAX", read_bytes_max)
    store, records = stored(frames)
    wanted = list(range(len(records)))[::step]
    found, expected = read(store, wanted), [records[sequence] for sequence in wanted]
    assert list(found) == expected
    assert (len(found), found[0], found[-1:]) == (len(expected), expected[0], expected[-1:])
    assert b"".join(found.parts) == b"".join(expected)
    assert list(found.lengths) == list(map(len, expected))
    assert found.column(20) == bytes(record[20] for record in expected)


def test_neighbours_of_a_frame_are_one_part() -> None:
    store, records = stored([[7] * 500, [7] * 500])
    found = read(store, list(range(1_000)))
    assert [len(part) for part in found.parts] == [sum(map(len, records[:500]))] * 2


@pytest.mark.parametrize("broken", [0, 3, 8])
@pytest.mark.parametrize("name", ["of one length", "of many lengths", "alone"])
def test_the_record_that_is_broken_is_named_and_nothing_is_given(name: str, broken: int) -> None:
    store, records = stored(FRAMES[name])
    queue = store.queue(SUBJECT)
    assert queue is not None
    broken %= len(records)
    entries = queue.entries(0, len(records))
    for wrong in (
        entries[broken]._replace(record_bytes=entries[broken].record_bytes - 1),
        entries[broken]._replace(record_bytes=35),
        entries[broken]._replace(record_bytes=2),
        entries[broken]._replace(physical_offset=entries[broken].physical_offset + 1),
    ):
        asked = [*entries[:broken], wrong, *entries[broken + 1 :]]
        with pytest.raises(CorruptionError) as raised:
            store.read_together(asked, subject=SUBJECT)
        assert raised.value.offset == wrong.physical_offset


def test_records_given_one_by_one_read_as_such() -> None:
    given = Records.of([b"one" * 20, b"three" * 20])
    assert (list(given), given.lengths, given.column(1)) == (
        [b"one" * 20, b"three" * 20],
        [60, 100],
        b"nh",
    )
    assert list(Records.of([])) == []
