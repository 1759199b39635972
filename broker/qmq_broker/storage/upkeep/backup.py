"""A backup of a data directory, even while a broker writes to it: a consistent copy that a broker can open.

It reads the files and sends no request to the broker. The order of the steps makes
the copy consistent:

1. delayed messages as far as their table goes, from which the commit log continues;
2. the newest checkpoint: everything synced before it will be in the copy, or the backup fails;
3. sealed segments of the commit log, linked where the file system can, so that they stay;
4. the newest snapshot and the actions after it, then older actions that are kept for keepers;
   consumers may have advanced since, so their messages are copied in step 5;
5. the rest of the commit log, frame by frame up to the first invalid one;
6. the beginning of the log, and the keepers: they have every segment that was deleted during the copy;
7. a checkpoint with the ends of the copy, and finally `FORMAT`.

Everything acknowledged before the call is in the copy, and perhaps some messages that were not
acknowledged yet. Every opening refuses a directory that has segments but no FORMAT, so an
unfinished copy is never used. Of the derived files only the summaries of sealed segments are
copied; the first start of the copy rebuilds the others. The epoch of the copy is far ahead, so
deliveries of the original after the backup are never confused with deliveries of the copy.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto
from typing import Final, NamedTuple

import msgspec

from qmq_broker.errors import CorruptionError, DiskError, StoreError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.checkpoint import (
    START,
    Checkpoint,
    CheckpointFiles,
    LogPoint,
    read_witness,
)
from qmq_broker.storage.files.copying import copy_file
from qmq_broker.storage.files.disk_port import Disk, DiskFile
from qmq_broker.storage.files.format_file import Format, required_format
from qmq_broker.storage.files.keepers import read_keepers, write_keepers
from qmq_broker.storage.files.layout import segment_path
from qmq_broker.storage.files.retained import Retained, read_retained, write_retained
from qmq_broker.storage.files.small_file import read_file, replace_file, unseal
from qmq_broker.storage.files.snapshots import Slot, SnapshotFiles, write_snapshot
from qmq_broker.storage.keepers import LogOffsets, limited_to
from qmq_broker.storage.logs.action_log import ACTION_KINDS
from qmq_broker.storage.logs.frame_scan import SCAN_BLOCK_BYTES, FrameScan
from qmq_broker.storage.logs.kinds import COMMIT_KINDS
from qmq_broker.storage.logs.segments import Segments
from qmq_broker.storage.logs.summary import read_summary, write_summary
from qmq_broker.storage.schedule.copy import take_schedule
from qmq_client.clock import Clock

#: How many times the original may be started between a backup and the first start of the copy.
EPOCH_STEP: Final = 1 << 16
#: Attempts: logs may lose their oldest segments while they are copied, each time after megabytes of new ones.
_TRIES_MAX: Final = 5
#: Links a file of the source to the same path in the copy; returns False if that is not possible.
Link = Callable[[str], bool]


class Backup(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a backup."""

    store_id: str
    #: The range of the commit log in the copy.
    first_offset: int
    next_offset: int
    #: Segments that share their blocks with the source, and bytes that were copied.
    linked_segments: int
    copied_bytes: int
    epoch: int
    duration_ms: int


def back_up(source: Disk, target: Disk, clock: Clock, *, link: Link) -> Backup:
    """Copy `source` into the empty directory `target`; durable on return.

    Raises `CorruptionError` if the source is damaged where the copy reads it, and `StoreError` if
    it is not a data directory or the target is not empty.
    """
    began_s = clock.monotonic_s()
    format_ = required_format(source)
    _refuse_filled(target)
    lock = target.lock(layout.LOCK, f"pid {os.getpid()} (store backup)")
    try:
        _refuse_filled(target)  # another backup may have been made there meanwhile
        made = _Backup(source, target, format_, link).run()
    finally:
        lock.release()
    return msgspec.structs.replace(made, duration_ms=round((clock.monotonic_s() - began_s) * 1000))


def _refuse_filled(target: Disk) -> None:
    others = [name for name in target.names(layout.ROOT) if name != layout.LOCK]
    if others:
        raise StoreError(f"the target is not empty: there is {others[0]}. Give an empty directory.")


def _overtaken() -> StoreError:
    return StoreError("retention deleted old segments faster than they were copied. Try again.")


class _Taken(Enum):
    """The result of copying a whole segment."""

    LINKED = auto()
    COPIED = auto()
    #: It was deleted meanwhile.
    GONE = auto()


class _Backup:
    """One backup in progress."""

    def __init__(self, source: Disk, target: Disk, format_: Format, link: Link) -> None:
        self._source = source
        self._target = target
        self._format = format_
        self._link = link
        self._linked = 0
        self._copied_bytes = 0
        self._sealed: set[int] = set()

    def run(self) -> Backup:
        # The names that mark an unfinished copy are durable first.
        for directory in (layout.COMMIT_LOG, layout.ACTION_LOG, layout.SUMMARIES, layout.STATE):
            self._target.make_directory(directory)
        self._target.sync_directory(layout.ROOT)
        schedule = take_schedule(self._source, self._target, self._format.store_id)
        self._copied_bytes += schedule.copied_bytes
        checkpoint = CheckpointFiles(self._source, self._format.store_id).read()
        point = checkpoint.commit_log if checkpoint else START
        before = read_retained(self._source, self._format.store_id)
        tail_base = point.last_frame_offset - point.last_frame_offset % self._format.segment_bytes
        self._take_sealed(before.first_offset, tail_base)
        action_end = self._take_actions(checkpoint.action_log if checkpoint else START)
        retained, end = self._take_tail(before, point, tail_base)
        copied_offset = schedule.copied_offset
        if copied_offset is not None and not retained.first_offset <= copied_offset:
            raise _overtaken()
        if retained.first_offset:
            write_retained(self._target, retained)
        self._take_keepers(LogOffsets(end.next_offset, action_end.next_offset))
        self._take_summaries()
        epoch = self._write_checkpoint(checkpoint, end, action_end)
        self._finish()
        return Backup(
            store_id=self._format.store_id.hex(),
            first_offset=retained.first_offset,
            next_offset=end.next_offset,
            linked_segments=self._linked,
            copied_bytes=self._copied_bytes,
            epoch=epoch,
            duration_ms=0,
        )

    def _take_sealed(self, first_offset: int, next_base: int) -> None:
        """Link or copy the sealed segments that still exist; they are never written again."""
        for base in range(first_offset, next_base, self._format.segment_bytes):
            path = layout.segment_path(layout.COMMIT_LOG, base)
            if base in self._sealed:
                continue
            taken = self._take_whole(path)
            if taken is _Taken.GONE:
                continue
            begins_offset = read_retained(self._source, self._format.store_id).first_offset
            if taken is _Taken.COPIED and begins_offset > base:
                # It may have been overwritten while it was copied.
                self._target.unlink(path)
            else:
                self._sealed.add(base)

    def _take_whole(self, path: str) -> _Taken:
        """Link a sealed segment, or copy it."""
        try:
            if self._link(path):
                self._linked += 1
                return _Taken.LINKED
            self._copied_bytes += copy_file(self._source, path, self._target)
        except DiskError:
            if is_there(self._source, path):
                raise
            return _Taken.GONE
        return _Taken.COPIED

    def _take_actions(self, point: LogPoint) -> LogEnd:
        """Copy the newest snapshot and the log after it; repeat if that part was deleted meanwhile."""
        durable_offset = max(
            point.durable_offset, read_witness(self._source, self._format.store_id)[0]
        )
        for _ in range(_TRIES_MAX):
            slot = self._newest_snapshot()
            offset = 0
            if slot is not None:
                offset = slot.snapshot.offset
                write_snapshot(self._target, slot.snapshot, slot.pages)
            segment_bytes = self._format.action_segment_bytes
            end = self._take_frames(layout.ACTION_LOG, segment_bytes, offset)
            if end.next_offset >= max(durable_offset, offset):
                self._take_older_actions(offset - offset % segment_bytes)
                return end
            newest = self._newest_snapshot()
            if (slot and slot.snapshot) == (newest and newest.snapshot):
                break
            for path in (*layout.SNAPSHOTS, *_paths(self._target, layout.ACTION_LOG)):
                if is_there(self._target, path):
                    self._target.unlink(path)
        raise CorruptionError(
            segment=layout.ACTION_LOG,
            offset=end.next_offset,
            reason=f"{end.reason}; the log was synced up to offset {max(durable_offset, offset)}",
        )

    def _take_older_actions(self, next_base: int) -> None:
        """Copy the earlier whole segments, newest first, because only the oldest may be deleted meanwhile."""
        found = map(layout.parse_number, self._source.names(layout.ACTION_LOG))
        bases = {base for base in found if base is not None and base < next_base}
        for base in sorted(bases, reverse=True):
            if base % self._format.action_segment_bytes == 0:
                self._take_whole(layout.segment_path(layout.ACTION_LOG, base))

    def _newest_snapshot(self) -> Slot | None:
        return SnapshotFiles(self._source, self._format.store_id).newest

    def _take_tail(
        self, before: Retained, point: LogPoint, tail_base: int
    ) -> tuple[Retained, LogEnd]:
        """Copy the unsealed part, and record the beginning of the log in the copy."""
        store_id = self._format.store_id
        self._take_sealed(read_retained(self._source, store_id).first_offset, tail_base)
        end = self._take_frames(layout.COMMIT_LOG, self._format.segment_bytes, tail_base)
        if end.next_offset < point.durable_offset:
            raise CorruptionError(
                segment=layout.segment_path(layout.COMMIT_LOG, tail_base),
                offset=end.next_offset,
                reason=f"{end.reason}; the checkpoint says synced up to {point.durable_offset}",
            )
        after = read_retained(self._source, store_id)
        for retained in (before, after):
            needed = range(retained.first_offset, tail_base, self._format.segment_bytes)
            if retained.first_offset <= tail_base and self._sealed.issuperset(needed):
                for base in [base for base in self._sealed if base < retained.first_offset]:
                    self._target.unlink(layout.segment_path(layout.COMMIT_LOG, base))
                return retained, end
        if after.first_offset > before.first_offset:
            raise _overtaken()
        missing = next(base for base in needed if base not in self._sealed)
        raise CorruptionError(
            segment=layout.segment_path(layout.COMMIT_LOG, missing),
            offset=missing,
            reason="segment is missing",
        )

    def _take_frames(self, log: str, segment_bytes: int, first_offset: int) -> LogEnd:
        segments = self._open(log, segment_bytes)
        try:
            scan = FrameScan(
                segments,
                COMMIT_KINDS if log == layout.COMMIT_LOG else ACTION_KINDS,
                store_id=self._format.store_id,
                first_offset=segments.base_of(first_offset),
            )
            end = copy_frames(segments, self._target, scan)
        finally:
            segments.close()
        self._copied_bytes += end.next_offset - segments.base_of(first_offset)
        return end

    def _open(self, log: str, segment_bytes: int) -> Segments:
        """Open the current segments of the source; one may vanish between listing and opening."""
        for _ in range(_TRIES_MAX - 1):
            try:
                return Segments(self._source, log, segment_bytes)
            except DiskError:
                continue
        return Segments(self._source, log, segment_bytes)

    def _write_checkpoint(
        self, checkpoint: Checkpoint | None, end: LogEnd, action_end: LogEnd
    ) -> int:
        """Write a checkpoint that covers the whole copy; returns the epoch of the copy."""
        last = checkpoint or Checkpoint(
            generation=0, epoch=0, commit_log=START, action_log=START, window_offset=0
        )
        epoch = max(last.epoch, end.epoch, action_end.epoch) + EPOCH_STEP
        files = CheckpointFiles(self._target, self._format.store_id)
        first = replace(
            last,
            generation=last.generation + 1,
            epoch=epoch,
            commit_log=_point(end, last.commit_log),
            action_log=_point(action_end, last.action_log),
        )
        try:
            files.prepare()
            files.write(first)
            files.write(replace(first, generation=first.generation + 1))
        finally:
            files.close()
        return epoch

    def _take_keepers(self, end: LogOffsets) -> None:
        if keepers := read_keepers(self._source, self._format.store_id):
            limited = tuple(limited_to(end, keeper) for keeper in keepers)
            write_keepers(self._target, self._format.store_id, limited)

    def _take_summaries(self) -> None:
        """Copy the summaries of sealed segments, which stay valid; missing ones are rebuilt."""
        segments = self._open(layout.COMMIT_LOG, self._format.segment_bytes)
        try:
            for base in sorted(self._sealed):
                summary = read_summary(self._source, segments, base, self._format.store_id)
                if summary is not None:
                    write_summary(self._target, summary)
        finally:
            segments.close()

    def _finish(self) -> None:
        for directory in (layout.COMMIT_LOG, layout.ACTION_LOG, layout.STATE, layout.ROOT):
            self._target.sync_directory(directory)
        data = read_file(self._source, layout.FORMAT)
        content = None if data is None else unseal(data)
        if content is None:
            raise CorruptionError(
                segment=layout.FORMAT, offset=0, reason="its checksum does not fit"
            )
        replace_file(self._target, layout.FORMAT, content)


def _point(end: LogEnd, last: LogPoint) -> LogPoint:
    return LogPoint(
        durable_offset=end.next_offset,
        last_frame_offset=end.last_frame_offset,
        last_stored_at_ms=max(end.last_stored_at_ms, last.last_stored_at_ms),
    )


def _paths(disk: Disk, directory: str) -> list[str]:
    return [f"{directory}/{name}" for name in disk.names(directory)]


class LogEnd(NamedTuple):
    """The end of the good frames of a log."""

    next_offset: int
    last_frame_offset: int
    last_stored_at_ms: int
    epoch: int
    #: The reason why the next bytes are not a good frame.
    reason: str


def is_there(disk: Disk, path: str) -> bool:
    """Whether the file exists."""
    directory, _, name = path.rpartition("/")
    return name in disk.names(directory)


def copy_frames(source: Segments, target: Disk, scan: FrameScan) -> LogEnd:
    """Copy the frames that `scan` finds; it begins with a segment of `source`.

    The active segment is copied up to its first invalid frame; segments created later are not
    copied. Content is durable on return, names are not.
    """
    first_offset = scan.next_offset
    copy = _Copy(source, target)
    last_offset = first_offset
    try:
        for frame in scan:
            copy.write(frame.offset, frame.data)
            last_offset = frame.offset
        copy.end()
    finally:
        copy.close()
    last = scan.last
    return LogEnd(
        next_offset=scan.next_offset,
        last_frame_offset=last_offset,
        last_stored_at_ms=last.stored_at_ms if last else 0,
        epoch=last.epoch if last else 0,
        reason=scan.reason,
    )


class _Copy:
    """The segments of the copy, one after the other; writes are gathered."""

    def __init__(self, source: Segments, target: Disk) -> None:
        self._source = source
        self._target = target
        self._base = -1
        self._file: DiskFile | None = None
        self._first = 0
        self._parts: list[bytes] = []
        self._gathered_bytes = 0

    def write(self, offset: int, data: bytes) -> None:
        """Write the next frame; for padding only the header."""
        base = self._source.base_of(offset)
        if base != self._base:
            self.end()
            self._base = base
            path = segment_path(self._source.directory, base)
            self._file = self._target.open(path, is_new=True)
        if not self._parts:
            self._first = offset
        self._parts.append(data)
        self._gathered_bytes += len(data)
        if self._gathered_bytes >= SCAN_BLOCK_BYTES:
            self._flush()

    def end(self) -> None:
        """Make the current segment durable."""
        self._flush()
        if self._file is not None:
            self._file.sync()
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _flush(self) -> None:
        if self._file is not None and self._parts:
            self._file.write(self._first - self._base, self._parts)
        self._parts = []
        self._gathered_bytes = 0
