"""The enumeration is worth something: each of these bugs is found by it.

A bug is planted in the disk, in the caller or in one function of the storage, and the same lives are
crashed in the same way until a promise is broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from qmq_broker.storage import (
    frame_scan,
    layout,
    log_recovery,
    recovery,
    segmented_log,
)
from qmq_broker.storage.checkpoint import Checkpoint, CheckpointFiles
from qmq_broker.storage.commit_log import CommitLog
from qmq_broker.storage.consume_queue import ConsumeQueue
from qmq_broker.storage.consume_queues import ConsumeQueues
from qmq_broker.storage.dedupe_window import DedupeWindow
from qmq_broker.storage.frame_scan import FrameScan, ScannedFrame, claims_behind
from qmq_broker.storage.log_recovery import LogFinding, examine
from qmq_broker.storage.recovery import Recovery
from qmq_broker.storage.segmented_log import SegmentedLog
from qmq_broker.storage.segments import Segments
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import FrameHeader, FrameKind, read_header
from tests.crash.enumeration import crash_again, crash_everywhere, crash_in_recovery
from tests.crash.random_lives import random_life
from tests.crash.recording_disk import Operation, RecordingDisk
from tests.crash.scenarios import (
    SCENARIOS,
    Scenario,
    appends_before_a_sync,
    checkpoints_and_flushes,
    clean_stops,
    first_start,
    kills,
    rolls,
)
from tests.crash.world import BrokenPromiseError, World

LIVES: tuple[Scenario, ...] = (*SCENARIOS, *(random_life(seed) for seed in range(12)))
Plant = Callable[[pytest.MonkeyPatch], None]


class ForgetfulDisk(RecordingDisk):
    """A disk on which some calls of some files do nothing."""

    def __init__(self, call: str, path: str, *, spared: int = 0) -> None:
        super().__init__()
        self._call = call
        self._path = path
        self._spared = spared

    def perform(self, call: str, path: str, operation: Operation) -> None:
        if call == self._call and path.startswith(self._path):
            self._spared -= 1
            if self._spared < 0:
                return
        super().perform(call, path, operation)


def is_found(make_disk: Callable[[], RecordingDisk] = RecordingDisk) -> bool:
    """Whether crashing all lives breaks a promise."""
    try:
        for life in LIVES:
            crash_everywhere(life, make_disk())
    except BrokenPromiseError:
        return True
    return False


def test_commits_that_are_not_synced_are_found() -> None:
    assert is_found(lambda: ForgetfulDisk("sync", "commitlog/"))


def test_actions_that_are_not_synced_are_found() -> None:
    assert is_found(lambda: ForgetfulDisk("sync", "actionlog/"))


def test_a_roll_without_a_sync_of_the_directory_is_found() -> None:
    # The opening syncs it twice: with the first segment, and before.
    assert is_found(lambda: ForgetfulDisk("sync_directory", "commitlog", spared=2))


def test_a_first_start_without_a_sync_of_the_root_is_found() -> None:
    assert is_found(lambda: ForgetfulDisk("sync_directory", "", spared=0))


def test_a_new_format_that_is_not_synced_is_found() -> None:
    assert is_found(lambda: ForgetfulDisk("sync", layout.draft_path(layout.FORMAT)))


def test_queue_files_that_are_not_synced_are_harmless() -> None:
    """They are derived and checked: the one place where a lost sync costs nothing but time."""
    for life in (checkpoints_and_flushes, clean_stops):
        crash_everywhere(life, ForgetfulDisk("sync", "consumequeue/"))


def test_an_acknowledgement_before_the_sync_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(self: World) -> None:
        self.acknowledge()
        self.store.sync()

    monkeypatch.setattr(World, "sync", sync)
    assert is_found()


def test_messages_visible_before_the_sync_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = ConsumeQueue.stage

    def stage_and_publish(self: ConsumeQueue, entries: bytes) -> None:
        stage(self, entries)
        self.publish()

    monkeypatch.setattr(ConsumeQueue, "stage", stage_and_publish)
    assert is_found()


def _no_body_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_scan, "verify_body", lambda header, frame: None)


def _epoch_is_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Recovery._next_checkpoint

    def same_epoch(self: Recovery, last: Checkpoint | None, *findings: LogFinding) -> Checkpoint:
        checkpoint = make(self, last, *findings)
        return replace(checkpoint, epoch=max(1, checkpoint.epoch - 1))

    monkeypatch.setattr(Recovery, "_next_checkpoint", same_epoch)


def _epoch_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    write = CheckpointFiles.write

    def forget(self: CheckpointFiles, checkpoint: Checkpoint) -> None:
        if checkpoint.commit_log.durable_offset:
            write(self, checkpoint)

    monkeypatch.setattr(CheckpointFiles, "write", forget)


def _the_last_frame_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_one_more(
        segments: Segments, kinds: frozenset[FrameKind], **others: object
    ) -> LogFinding:
        finding = examine(segments, kinds, **others)  # type: ignore[arg-type]
        return replace(
            finding,
            next_offset=finding.last_frame_offset,
            durable_offset=min(finding.durable_offset, finding.last_frame_offset),
            torn_bytes=finding.next_offset - finding.last_frame_offset,
        )

    monkeypatch.setattr(recovery, "examine", cut_one_more)


def _bad_frames_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def scan(self: FrameScan) -> Iterator[ScannedFrame]:
        while True:
            try:
                frame = self._verified(self.next_offset)
            except ProtocolError:
                later = claims_behind(self._segments, self.search_offset, epoch=0)
                header = next(later, None)
                if header is None:
                    return
                self.next_offset = self.search_offset = header.physical_offset
                continue
            self.last = frame.header
            self.next_offset += frame.header.frame_bytes
            self.search_offset = self.next_offset
            yield frame

    monkeypatch.setattr(FrameScan, "__iter__", scan)


def _the_window_is_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    derive = Recovery._derive

    def derive_and_forget(self: Recovery, window_offset: int, commit: LogFinding) -> None:
        derive(self, window_offset, commit)
        self._window = DedupeWindow(ids_max=1_000, age_ms=1_000)

    monkeypatch.setattr(Recovery, "_derive", derive_and_forget)


def _the_checkpoint_speaks_of_what_is_not_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SegmentedLog, "durable_point", property(SegmentedLog._written_point))
    monkeypatch.setattr(SegmentedLog, "durable_offset", property(lambda self: self.written_offset))
    append = CommitLog.append

    def append_and_tell(self: CommitLog, frames: object) -> object:
        return append(self, frames)  # type: ignore[arg-type]

    monkeypatch.setattr(CommitLog, "append", append_and_tell)


def _the_table_comes_before_the_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """One queue's entries are in no file, but the table says that all are."""
    begin_flush = ConsumeQueues.begin_flush

    def plan_all_but_one(self: ConsumeQueues, indexed_offset: int) -> None:
        begin_flush(self, indexed_offset)
        if self._flush is not None and self._flush.queues:
            self._flush.queues.pop()

    monkeypatch.setattr(ConsumeQueues, "begin_flush", plan_all_but_one)


def _a_sealed_segment_is_not_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    roll = SegmentedLog._roll

    def roll_without_sync(self: SegmentedLog, base: int) -> None:
        sealed = base - self._segments.segment_bytes
        if self._segments.has(sealed):
            file = self._segments.file(sealed)
            monkeypatch.setattr(file, "sync", lambda: None)
        roll(self, base)

    monkeypatch.setattr(segmented_log.SegmentedLog, "_roll", roll_without_sync)


PLANTED: tuple[Plant, ...] = (
    _no_body_check,
    _epoch_is_not_raised,
    _the_last_frame_is_cut,
    _bad_frames_are_skipped,
    _the_window_is_not_restored,
    _the_checkpoint_speaks_of_what_is_not_synced,
    _the_table_comes_before_the_entries,
    _a_sealed_segment_is_not_synced,
    _epoch_is_not_written,
)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__.strip("_"))
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert is_found()


def test_recovery_that_does_not_make_its_tail_durable_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a killed process left in the page cache is shown, and gone with the power."""
    monkeypatch.setattr(log_recovery, "_rewrite", lambda segments, offset, next_offset: None)
    lives = (first_start, rolls, checkpoints_and_flushes, kills)
    with pytest.raises(BrokenPromiseError):
        sum(crash_in_recovery(life, RecordingDisk(), every=3) for life in lives)


def _later_segments_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Segments, "remove", lambda self, base: None)


def _stale_frames_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tail is not cut, and old epochs are as good as new ones: either alone is harmless."""
    monkeypatch.setattr(log_recovery, "_cut", lambda segments, offset: None)

    def read_without_epoch(data: bytes, position: int = 0) -> FrameHeader:
        return replace(read_header(data, position), epoch=1)

    monkeypatch.setattr(frame_scan, "verify_stamp", lambda header, head: None)
    monkeypatch.setattr(frame_scan, "read_header", read_without_epoch)


@pytest.mark.parametrize(
    "plant",
    [_later_segments_stay, _stale_frames_are_believed],
    ids=lambda plant: plant.__name__.strip("_"),
)
def test_what_comes_back_in_a_second_life_is_found(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    lives = (appends_before_a_sync, rolls, kills)
    with pytest.raises(BrokenPromiseError):
        sum(crash_again(life, RecordingDisk(), every=5) for life in lives)
