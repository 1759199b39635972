"""Golden files of version 1 of the key index are written, and read, byte for byte.

They index the two frames of the golden segment: four ids and one key each. See `version_1.py`.
"""

from __future__ import annotations

from pathlib import Path

from qmq_broker.options import StoreOptions
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.index.key_index import KeyIndex
from qmq_broker.storage.index.key_search import KeySearch, TimeRange
from qmq_broker.storage.logs.frame_seek import LogRange
from qmq_broker.storage.logs.segments import Segments
from tests.golden.storage_version_1 import SEGMENT_BYTES, STORE_ID, write_sealed_segment
from tests.golden.version_1 import RECORDS, golden

NAME = "20130101095700017"
#: The frames of the segment stand below; the padding behind them is not indexed.
WITHIN = LogRange(0, 920)
OPTIONS = StoreOptions(index_entries=16, reserve_bytes=0)
#: Offset of each frame in the log, and of each record in the frame.
FRAMES = (88, 504)
POSITIONS = {"record_plain": 159, "record_full": 202, "record_json": 309}


def open_index(root: Path) -> tuple[KeyIndex, Segments]:
    disk = OsDisk(str(root))
    for directory in ("commitlog", "index", "state"):
        disk.make_directory(directory)
    segments = Segments(disk, "commitlog", SEGMENT_BYTES)
    index = KeyIndex(disk, segments, OPTIONS, store_id=STORE_ID, bounds=lambda: WITHIN)
    return index, segments


def place_golden(root: Path) -> None:
    for path, name in (
        (f"commitlog/{0:020d}", "segment_sealed"),
        (f"index/{NAME}", "index_sealed"),
        ("state/index", "index_table"),
    ):
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_bytes(golden(name))


def write_index(root: Path) -> tuple[bytes, bytes]:
    """A sealed file, and the table that says so."""
    write_sealed_segment(root)
    index, segments = open_index(root)
    assert index.step(1 << 20).messages == 8
    (file,) = index.files()
    file.seal()
    index._growing = None
    index.note()
    segments.close()
    return (root / "index" / NAME).read_bytes(), (root / "state" / "index").read_bytes()


def test_the_index_is_written_as_in_version_1(tmp_path: Path) -> None:
    file, table = write_index(tmp_path)
    assert file == golden("index_sealed")
    assert table == golden("index_table")


def test_the_golden_index_is_read(tmp_path: Path) -> None:
    place_golden(tmp_path)
    index, segments = open_index(tmp_path)
    assert index.indexed_offset == WITHIN.next_offset
    while index.step(1).is_unfinished:
        pass
    (file,) = index.files()
    assert (file.is_checked, file.count) == (True, 10)
    search = KeySearch(segments, index, store_id=STORE_ID, bounds=lambda: WITHIN)
    for name, position in POSITIONS.items():
        result = search.by_id(RECORDS[name].message_id, 10)
        assert result.is_complete
        assert [one.physical_offset for one in result.found] == [
            offset + position for offset in reversed(FRAMES)
        ]
    found = search.by_key("flight.departed", "N14228", TimeRange(), 10).found
    assert [(one.sequence, one.record) for one in found] == [
        (4, golden("record_full")),
        (1, golden("record_full")),
    ]
    index.close()
    segments.close()
