"""The golden journals are written, and read, byte for byte: those of the golden segment.

The journal of ids has version 2, which knows the subject of each id; that of version 1 is derived anew.
"""

from __future__ import annotations

from pathlib import Path

from qmq_broker.options import StoreOptions
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.files.retained import Retained
from qmq_broker.storage.ids.journal import IdJournal
from qmq_broker.storage.ids.runs import IdRun, subject_ids
from qmq_broker.storage.ids.window import DedupeWindow
from qmq_broker.storage.queues.consume_queues import ConsumeQueues
from qmq_client.wire.frame import parse_message_frame
from tests.golden.storage_version_1 import NOW_MS, STORE_ID
from tests.golden.version_1 import golden

#: The first frame of the golden segment, and where it ends.
FIRST_OFFSET, NEXT_OFFSET = 88, 504
NAME = f"{0:020d}"
IDS = subject_ids(parse_message_frame(golden("frame_messages")))


def open_ids(root: Path) -> tuple[IdJournal, DedupeWindow]:
    disk = OsDisk(str(root))
    disk.make_directory("ids")
    window = DedupeWindow(ids_max=1_000, age_ms=60_000)
    return IdJournal(disk, STORE_ID, window), window


def open_queues(root: Path) -> ConsumeQueues:
    disk = OsDisk(str(root))
    for directory in ("consumequeue", "state", "entries"):
        disk.make_directory(directory)
    return ConsumeQueues(disk, StoreOptions(), STORE_ID)


def write_ids(root: Path) -> bytes:
    ids, window = open_ids(root)
    ids.load(0, 0)
    ids.start()
    window.add(IDS, offset=FIRST_OFFSET, stored_at_ms=NOW_MS)
    assert ids.write_some(NEXT_OFFSET)
    ids.close()
    return (root / "ids" / NAME).read_bytes()


def write_entries(root: Path) -> bytes:
    queues = open_queues(root)
    queues.load(0, Retained(STORE_ID, 0, {}))
    queues.start_journal(next_offset=0)
    queues.stage("flight.departed", 0, golden("queue_entries")[:60], offset=FIRST_OFFSET)
    queues.make_visible()
    queues.write_journal(NEXT_OFFSET, NEXT_OFFSET)
    queues.close()
    return (root / "entries" / NAME).read_bytes()


def test_the_journal_of_ids_is_written_as_in_version_2(tmp_path: Path) -> None:
    assert write_ids(tmp_path) == golden("journal_ids_version_2")


def test_the_journal_of_ids_of_version_1_is_not_taken_for_one_of_version_2(tmp_path: Path) -> None:
    ids, window = open_ids(tmp_path)
    (tmp_path / "ids" / NAME).write_bytes(golden("journal_ids"))
    ids.load(0, NEXT_OFFSET)
    assert (ids.next_offset, window.ids) == (0, 0), "the frames are read instead"
    ids.start()
    assert not (tmp_path / "ids" / NAME).exists()


def test_the_golden_journal_of_ids_is_read(tmp_path: Path) -> None:
    ids, window = open_ids(tmp_path)
    (tmp_path / "ids" / NAME).write_bytes(golden("journal_ids_version_2"))
    ids.load(0, NEXT_OFFSET)
    assert ids.next_offset == NEXT_OFFSET
    assert window.first_offset == FIRST_OFFSET
    assert window.find(IDS) == [
        (subject, run, FIRST_OFFSET) for subject, runs in IDS.items() for run in runs
    ]
    for subject, runs in IDS.items():
        after = IdRun(runs[0].instance, runs[-1].next_counter, 2**64)
        assert not window.find({subject: [after], "other": runs})


def test_the_journal_of_entries_is_written_as_in_version_1(tmp_path: Path) -> None:
    assert write_entries(tmp_path) == golden("journal_entries")


def test_the_golden_journal_of_entries_is_read(tmp_path: Path) -> None:
    queues = open_queues(tmp_path)
    (tmp_path / "entries" / NAME).write_bytes(golden("journal_entries"))
    assert queues.load(NEXT_OFFSET, Retained(STORE_ID, 0, {}))
    assert (queues.known_offset, queues.copied_offset) == (NEXT_OFFSET, NEXT_OFFSET)
    queue = queues.visible("flight.departed")
    assert queue is not None
    assert [entry.physical_offset for entry in queue.entries(0, 9)] == [247, 290, 397]
