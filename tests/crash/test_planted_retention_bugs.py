"""Bugs in giving up old segments and in writing over them: each is found by the enumeration."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from qmq_broker.storage import frame_scan, layout, store
from qmq_broker.storage.action_log import ActionLog
from qmq_broker.storage.consume_queues import ConsumeQueues
from qmq_broker.storage.disk import Disk
from qmq_broker.storage.retained import Retained, write_retained
from qmq_broker.storage.segmented_log import SegmentedLog
from qmq_broker.storage.segments import Segments
from qmq_broker.storage.snapshots import SnapshotFiles
from qmq_broker.storage.store import Store
from qmq_client.wire.errors import QmqError
from qmq_client.wire.frame import FrameHeader, read_header
from tests.crash.enumeration import crash_again, crash_everywhere
from tests.crash.recording_disk import RecordingDisk
from tests.crash.scenarios import (
    kills_among_recycled_segments,
    retention,
    retention_of_a_quiet_subject,
    snapshots,
    snapshots_and_kills,
)
from tests.crash.test_planted_bugs import ForgetfulDisk, Plant
from tests.crash.world import BrokenPromiseError

LIVES = (retention, retention_of_a_quiet_subject, kills_among_recycled_segments)


def is_found(make_disk: Callable[[], RecordingDisk] = RecordingDisk) -> bool:
    """Whether crashing these lives breaks a promise, or the life itself."""
    try:
        for life in LIVES:
            crash_everywhere(life, make_disk())
    except (BrokenPromiseError, QmqError):
        return True
    return False


def test_the_lives_keep_every_promise_as_they_are() -> None:
    assert not is_found()


def test_a_note_of_the_beginning_that_is_not_synced_is_found() -> None:
    assert is_found(lambda: ForgetfulDisk("sync", layout.draft_path(layout.RETAINED)))


def test_a_note_of_the_beginning_whose_name_is_not_synced_is_found() -> None:
    assert is_found(lambda: ForgetfulDisk("sync_directory", layout.STATE, spared=3))


def test_snapshots_that_are_not_synced_are_found() -> None:
    with pytest.raises((BrokenPromiseError, QmqError)):
        crash_everywhere(snapshots, ForgetfulDisk("sync", "state/groups."))


def test_one_snapshot_that_is_not_synced_is_harmless() -> None:
    """The other one and more of the log give the same groups."""
    for path in layout.SNAPSHOTS:
        crash_everywhere(snapshots, ForgetfulDisk("sync", layout.draft_path(path)))


def _a_snapshot_before_the_sync_of_its_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    write = SnapshotFiles.write

    def write_ahead(self: ActionLog, offset: int, content: bytes) -> int:
        write(self._snapshots, offset, content)
        self.log.sync()
        return self.log.give_up_below(self._snapshots.first_offset)

    monkeypatch.setattr(ActionLog, "write_snapshot", write_ahead)


def test_a_snapshot_ahead_of_its_log_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _a_snapshot_before_the_sync_of_its_actions(monkeypatch)
    with pytest.raises((BrokenPromiseError, QmqError)):
        crash_everywhere(snapshots_and_kills, RecordingDisk())


def _files_go_before_the_note(monkeypatch: pytest.MonkeyPatch) -> None:
    give_up_below = Store.give_up_below

    def files_first(self: Store, offset: int) -> int:
        def note(disk: Disk, retained: Retained) -> None:
            self._commit_log.log.give_up_below(retained.first_offset)
            write_retained(disk, retained)

        monkeypatch.setattr(store, "write_retained", note)
        return give_up_below(self, offset)

    monkeypatch.setattr(Store, "give_up_below", files_first)


def _sequences_are_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConsumeQueues, "sequences_at", lambda self, offset: {})


def _more_goes_than_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    give_up_below = SegmentedLog.give_up_below
    monkeypatch.setattr(
        SegmentedLog,
        "give_up_below",
        lambda self, offset: give_up_below(self, offset + self.segment_bytes),
    )


def _a_spare_is_used_under_its_old_head(monkeypatch: pytest.MonkeyPatch) -> None:
    adopt = Segments.adopt
    monkeypatch.setattr(Segments, "adopt", lambda self, base, head: adopt(self, base, b""))


def _old_frames_are_believed_wherever_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither offset nor epoch is looked at: what a spare held before is taken for new."""
    scanned = frame_scan.FrameScan._bytes

    def read_as_if_here(data: bytes, position: int = 0) -> FrameHeader:
        return read_header(data, position)

    def verified(self: frame_scan.FrameScan, offset: int) -> frame_scan.ScannedFrame:
        header = read_as_if_here(scanned(self, offset, 64))
        next_offset = offset + header.frame_bytes
        room_offset = self._segments.base_of(offset) + self._segments.segment_bytes
        self.search_offset = next_offset
        content = self._content(offset, header, next_offset, room_offset)
        return frame_scan.ScannedFrame(offset, header, content)

    monkeypatch.setattr(frame_scan.FrameScan, "_verified", verified)


@pytest.mark.parametrize(
    "plant",
    [
        _files_go_before_the_note,
        _sequences_are_not_noted,
        _more_goes_than_was_asked_for,
        _a_spare_is_used_under_its_old_head,
        _old_frames_are_believed_wherever_they_stand,
    ],
    ids=lambda plant: plant.__name__.strip("_"),
)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert is_found()


def test_B3_what_was_cut_in_a_recycled_segment_never_comes_back() -> None:
    assert crash_again(kills_among_recycled_segments, RecordingDisk(), every=29) > 500
