"""Bugs in opening, to be planted: each is a switch that a test turns on for its own time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from qmq_broker.storage import recovery
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.checkpoint import Checkpoint, CheckpointFiles
from qmq_broker.storage.ids.window import DedupeWindow
from qmq_broker.storage.logs import frame_scan, log_recovery
from qmq_broker.storage.logs.action_log import ActionLog
from qmq_broker.storage.logs.frame_scan import FrameScan, ScannedFrame, claims_after
from qmq_broker.storage.logs.log_recovery import LogFinding, examine
from qmq_broker.storage.logs.segments import Segments
from qmq_broker.storage.recovery import Recovery
from qmq_broker.storage.schedule.copy import ScheduleCopier
from qmq_client.group.actions import Action
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import FrameHeader, FrameKind, read_header
from tests.crash.recording_disk import RecordingDisk


def the_action_log_is_replayed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the snapshot holds is replayed once more."""
    replay = ActionLog.replay

    def from_the_beginning(self: ActionLog) -> Iterator[Action]:
        offset = self.snapshot_offset
        self.snapshot_offset = min(self.log.bases(), default=0) if offset else 0
        yield from replay(self)
        self.snapshot_offset = offset

    monkeypatch.setattr(ActionLog, "replay", from_the_beginning)


def names_in_state_are_believed_unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What may be given up is read from a note whose name only this kernel knows."""
    sync = RecordingDisk.sync_directory

    def forget(self: RecordingDisk, path: str) -> None:
        # Later calls for this directory in an opening are those of the small files themselves; a new
        # witness would hide the bug.
        caller = sys._getframe(1).f_code.co_name
        believed = caller in ("_make_names_durable", "_write_witness")
        if not (path == layout.STATE and believed):
            sync(self, path)

    monkeypatch.setattr(RecordingDisk, "sync_directory", forget)


def the_slot_that_was_read_is_believed_unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start writes the other slot while this one may be in the page cache only."""
    write = CheckpointFiles.write
    read = CheckpointFiles.read

    def read_and_remember(self: CheckpointFiles) -> Checkpoint | None:
        found = read(self)
        known[id(self)] = found
        return found

    def write_only_new(self: CheckpointFiles, checkpoint: Checkpoint) -> None:
        if checkpoint != known.get(id(self)):
            write(self, checkpoint)

    known: dict[int, Checkpoint | None] = {}
    monkeypatch.setattr(CheckpointFiles, "read", read_and_remember)
    monkeypatch.setattr(CheckpointFiles, "write", write_only_new)


def no_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever looks like a frame is one."""
    monkeypatch.setattr(frame_scan, "verify_stamp", lambda header, head: None)
    monkeypatch.setattr(frame_scan, "verify_body", lambda header, frame: None)


def a_gap_ends_only_the_last_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the ones before, the scan goes on with the next segment."""

    def scan(self: FrameScan) -> Iterator[ScannedFrame]:
        while True:
            try:
                frame = self._verified(self.next_offset)
            except ProtocolError:
                base = self._segments.base_of(self.next_offset) + self._segments.segment_bytes
                if not self._segments.read(base, 1):
                    return
                self.next_offset = self.search_offset = base
                continue
            self.last = frame.header
            self.next_offset += frame.header.frame_bytes
            self.search_offset = self.next_offset
            yield frame

    monkeypatch.setattr(FrameScan, "__iter__", scan)


def the_tail_is_not_made_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed process left in the page cache is shown, and gone with the power."""
    monkeypatch.setattr(log_recovery, "_rewrite", lambda segments, offset, next_offset: None)


def a_checksum_over_the_head_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies within the length that the head tells is not looked at."""
    monkeypatch.setattr(frame_scan, "verify_body", lambda header, frame: None)


def epoch_is_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Recovery._next_checkpoint

    def same_epoch(self: Recovery, last: Checkpoint | None, *findings: LogFinding) -> Checkpoint:
        checkpoint = make(self, last, *findings)
        return replace(checkpoint, epoch=max(1, checkpoint.epoch - 1))

    monkeypatch.setattr(Recovery, "_next_checkpoint", same_epoch)


def epoch_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    write = CheckpointFiles.write

    def forget(self: CheckpointFiles, checkpoint: Checkpoint) -> None:
        if checkpoint.commit_log.durable_offset:
            write(self, checkpoint)

    monkeypatch.setattr(CheckpointFiles, "write", forget)


def the_last_frame_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_one_more(segments: Segments, kinds: frozenset[FrameKind], **others: Any) -> LogFinding:
        finding = examine(segments, kinds, **others)
        return replace(
            finding,
            next_offset=finding.last_frame_offset,
            durable_offset=min(finding.durable_offset, finding.last_frame_offset),
            torn_bytes=finding.next_offset - finding.last_frame_offset,
        )

    monkeypatch.setattr(recovery, "examine", cut_one_more)


def bad_frames_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def scan(self: FrameScan) -> Iterator[ScannedFrame]:
        while True:
            try:
                frame = self._verified(self.next_offset)
            except ProtocolError:
                assert isinstance(self._segments, Segments)
                later = claims_after(self._segments, self.search_offset, epoch=0)
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


def the_window_is_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    derive = Recovery._derive

    def derive_and_forget(
        self: Recovery, commit: LogFinding, copier: ScheduleCopier, *, has_schedule: bool
    ) -> None:
        derive(self, commit, copier, has_schedule=has_schedule)
        self._window = DedupeWindow(ids_max=1_000, age_ms=1_000)

    monkeypatch.setattr(Recovery, "_derive", derive_and_forget)


def later_segments_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Segments, "remove", lambda self, base: None)


def stale_frames_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tail is not cut, and old epochs are as good as new ones: either alone is harmless."""
    monkeypatch.setattr(log_recovery, "_cut", lambda segments, offset, torn_frames: None)

    def read_without_epoch(data: bytes, position: int = 0) -> FrameHeader:
        return msgspec.structs.replace(read_header(data, position), epoch=1)

    monkeypatch.setattr(frame_scan, "verify_stamp", lambda header, head: None)
    monkeypatch.setattr(frame_scan, "read_header", read_without_epoch)


def old_frames_are_believed_wherever_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither offset nor epoch is looked at: what a spare held before is taken for new."""
    scanned = frame_scan.FrameScan._bytes

    def read_as_if_here(data: bytes, position: int = 0) -> FrameHeader:
        return read_header(data, position)

    def verified(self: frame_scan.FrameScan, offset: int) -> frame_scan.ScannedFrame:
        header = read_as_if_here(scanned(self, offset, 64))
        next_offset = offset + header.frame_bytes
        base = self._segments.base_of(offset)
        room_offset = base + self._segments.segment_bytes
        self.search_offset = next_offset
        return self._whole(offset, header, offset == base, room_offset)

    monkeypatch.setattr(frame_scan.FrameScan, "_verified", verified)
