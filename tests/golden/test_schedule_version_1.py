"""The bytes of delayed messages in logs and schedule files, pinned: see `version_1.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq_broker.options import StoreOptions
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.schedule.cancelled import (
    Cancelled,
    cancelled_frame,
    read_cancelled,
    read_withdrawn,
)
from qmq_broker.storage.schedule.columns import Subjects
from qmq_broker.storage.schedule.files import ScheduleFiles, dispatched_frames
from qmq_broker.storage.schedule.schedule import marked_frame
from qmq_broker.storage.schedule.states import DelayedState, pack_state
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import FrameKind, parse_message_frame
from qmq_client.wire.marks import Marks, frame_marks
from qmq_client.wire.record import Record, encode_record
from tests.golden.storage_version_1 import EPOCH, NOW_MS, STORE_ID
from tests.golden.version_1 import golden

BUCKET = NOW_MS - NOW_MS % StoreOptions().bucket_ms
IDS = [bytes.fromhex(f"f00dcafe12345678{number:016x}") for number in (1, 2)]
RECORDS = {
    "flight.boarding_closes": [
        encode_record(
            Record(
                message_id=message_id,
                subject="flight.boarding_closes",
                body=b"LH401",
                born_at_ms=NOW_MS,
                due_at_ms=NOW_MS + 60_000,
            )
        )
        for message_id in IDS
    ]
}
MARKS = {
    FrameKind.RELEASED: Marks(buckets=[BUCKET], sequences=[4, 5], sources=[1_000, 1_100]),
    FrameKind.RESCHEDULED: Marks(
        buckets=[BUCKET, BUCKET],
        sequences=[4, 5],
        sources=[1_000, 1_100],
        due_at_ms=[NOW_MS + 1, NOW_MS + 2],
    ),
    FrameKind.SCHEDULED: Marks(
        sequences=[4, 5],
        sources=[1_000, 1_100],
        due_at_ms=[NOW_MS + 60_000] * 2,
        message_ids=b"".join(IDS),
    ),
}
CANCELLED = [Cancelled(BUCKET, 4, 1_000, "flight.boarding_closes", IDS[0])]
STATES = [
    pack_state(DelayedState.RELEASED, 5),
    pack_state(DelayedState.CANCELLED, 4),
    pack_state(DelayedState.RESCHEDULED, 6),
]


@pytest.mark.parametrize("kind", MARKS, ids=lambda kind: kind.name)
def test_B13_a_marked_frame_is_as_it_was_and_means_what_it_meant(kind: FrameKind) -> None:
    data = golden(f"delay_{kind.name.lower()}")
    assert marked_frame(kind, RECORDS, MARKS[kind]).data == data
    frame = parse_message_frame(data)
    assert [record for _, record in frame.records()] == RECORDS["flight.boarding_closes"]
    found, meant = frame_marks(frame), MARKS[kind]
    assert list(found.buckets) == list(meant.buckets)
    assert list(found.sequences) == list(meant.sequences)
    assert list(found.sources) == list(meant.sources)
    assert list(found.due_at_ms) == list(meant.due_at_ms)
    assert found.message_ids == meant.message_ids


def test_B13_cancellations_are_as_they_were() -> None:
    data = golden("delay_cancelled")
    assert cancelled_frame(CANCELLED) == data
    assert read_cancelled(data) == CANCELLED
    assert read_withdrawn(data) == {}


def test_B13_withdrawals_are_as_they_were() -> None:
    data = golden("delay_withdrawn_by_subject")
    withdrawn = {"flight.boarding_closes": IDS, "flight.departed": IDS[:1]}
    assert cancelled_frame(CANCELLED, withdrawn) == data
    assert read_cancelled(data) == CANCELLED
    assert read_withdrawn(data) == withdrawn
    assert read_withdrawn(cancelled_frame([], withdrawn)) == withdrawn
    assert read_withdrawn(cancelled_frame([])) == {}
    with pytest.raises(ProtocolError, match="cut short"):
        read_withdrawn(cancelled_frame([], {"a": [*IDS, b"short"]}))


def test_B13_withdrawals_that_name_no_subject_are_read_as_those_of_none() -> None:
    data = golden("delay_withdrawn")
    assert read_cancelled(data) == CANCELLED
    assert read_withdrawn(data) == {"": IDS}


def files_of(directory: Path) -> ScheduleFiles:
    """A schedule log and a dispatch log, written as the broker does."""
    disk = OsDisk(str(directory))
    for name in (layout.SCHEDULE, layout.DISPATCH):
        disk.make_directory(name)
    files = ScheduleFiles(disk, STORE_ID)
    files.epoch = EPOCH
    scheduled = marked_frame(FrameKind.SCHEDULED, RECORDS, MARKS[FrameKind.SCHEDULED]).data
    files.append(layout.SCHEDULE, BUCKET, 0, [scheduled], stored_at_ms=NOW_MS)
    files.append(layout.DISPATCH, BUCKET, 0, dispatched_frames(STATES), stored_at_ms=NOW_MS)
    return files


def test_B13_schedule_and_dispatch_logs_are_as_they_were(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    for log in (layout.SCHEDULE, layout.DISPATCH):
        path = tmp_path / layout.bucket_path(log, BUCKET)
        assert path.name == "201301010900"
        assert path.read_bytes() == golden(f"delay_{log}_log")
    subjects = Subjects()
    length = files.length(layout.SCHEDULE, BUCKET)
    (columns,) = files.columns(BUCKET, subjects, next_position=length)
    assert list(columns.sequences) == [4, 5]
    assert columns.find_id(IDS[1]) == [1]
    assert subjects.names == ["flight.boarding_closes"]
    length = files.length(layout.DISPATCH, BUCKET)
    assert list(files.states(BUCKET, next_position=length)) == [
        (DelayedState.RELEASED, 5),
        (DelayedState.CANCELLED, 4),
        (DelayedState.RESCHEDULED, 6),
    ]
    files.close()
