"""The report and the copy of a quarantined range, and the frames that cover the range.

::

    quarantine/<20 digits>-<20 digits>.raw, .json              of the commit log
    quarantine/actionlog.<20 digits>-<20 digits>.raw, .json    of the action log
    quarantine/schedule.<20 digits>-<20 digits>.json           range missing in a schedule log
    quarantine/dispatch.<20 digits>-<20 digits>.json           range missing in a dispatch log

A range is covered in place with frames of kind LOST. The first one is written last, on its own:
until it is durable the range counts as damaged, even after a power cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.format_file import Format
from qmq_broker.storage.files.small_file import read_file, replace_file, unseal
from qmq_broker.storage.logs.frame_scan import SCAN_BLOCK_BYTES
from qmq_broker.storage.logs.frame_seek import LogRange, frame_at_or_after, read_stamp
from qmq_broker.storage.logs.lost import LOST_LEAST_BYTES, LostRun, lost_frames
from qmq_broker.storage.logs.segments import SEGMENT_HEAD_BYTES, Segments, build_segment_head
from qmq_broker.storage.upkeep.backup import is_there
from qmq_broker.storage.upkeep.inspect_files import SmallFiles
from qmq_broker.storage.upkeep.inspect_log import DamagedRange
from qmq_broker.storage.upkeep.verify_log import LogVerdict
from qmq_client.clock import Clock
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import (
    FRAME_ALIGNMENT_BYTES,
    FRAME_HEADER_BYTES,
    FrameKind,
    build_padding,
    read_header,
    stamp_frame,
)

_SUFFIX: Final = ".json"


class QuarantineReport(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a report: one quarantined range."""

    store_id: str
    at_ms: int
    first_offset: int
    next_offset: int
    reason: str
    lost: tuple[LostRun, ...]
    #: `commitlog`, `actionlog`, `schedule` or `dispatch`.
    log: str = layout.COMMIT_LOG
    #: Delayed messages lost with the range, as far as the heads of its frames can be read …
    delayed: int = 0
    #: … and whether an unreadable part of it may have held more messages, or states of messages.
    may_hold_delayed: bool = False
    #: Whether it held, or may have held, frames about delayed messages, including copied ones.
    touches_delayed: bool = True


def write_report(
    disk: Disk, report: QuarantineReport, *, keep: Callable[[], object] = lambda: None
) -> None:
    """Copy the bytes of a range, if there are any, then write its report; durable on return.

    Only once: an interrupted run may already have covered part of the range.
    """
    disk.make_directory(layout.QUARANTINE)
    disk.sync_directory(layout.ROOT)
    path = _path(report.log, report.first_offset, report.next_offset, "json")
    if not is_there(disk, path):
        keep()
        replace_file(disk, path, msgspec.json.encode(report))


class LostDelayed(NamedTuple):
    """The known losses of delayed messages in a damaged range."""

    messages: int
    may_be_more: bool


NO_DELAYED: Final = LostDelayed(0, may_be_more=False)


def lost_delayed(segments: Segments, hole: DamagedRange, copied_offset: int) -> LostDelayed:
    """The delayed messages of a hole of the commit log; messages below `copied_offset` are in their files.

    A frame with a valid stamp gives the number of its messages, even if its body is damaged.
    """
    offset, count, may_be_more = max(hole.first_offset, copied_offset), 0, False
    while offset < hole.next_offset:
        try:
            header = read_stamp(segments, offset)
        except ProtocolError:
            may_be_more = True
            within = LogRange(offset + FRAME_ALIGNMENT_BYTES, hole.next_offset)
            later = frame_at_or_after(segments, within)
            offset = hole.next_offset if later is None else later.physical_offset
            continue
        if header.kind is FrameKind.DELAYED:
            count += header.record_count
        offset += header.frame_bytes
    return LostDelayed(count, may_be_more)


#: Frames that neither hold delayed messages nor their states.
_OF_OTHERS: Final = frozenset({FrameKind.MESSAGES, FrameKind.PADDING, FrameKind.SEGMENT_HEAD})


def touches_delayed(segments: Segments, hole: DamagedRange) -> bool:
    """Whether a hole of the commit log held, or may have held, frames about delayed messages."""
    offset = hole.first_offset
    while offset < hole.next_offset:
        try:
            header = read_stamp(segments, offset)
        except ProtocolError:
            return True
        if header.kind not in _OF_OTHERS:
            return True
        offset += header.frame_bytes
    return False


class LogQuarantine:
    """The common part of the quarantine of both logs: known facts, stamps and reports.

    Must be closed.
    """

    def __init__(
        self, disk: Disk, clock: Clock, format_: Format, files: SmallFiles, log: str
    ) -> None:
        self._disk = disk
        self._clock = clock
        self._format = format_
        self._files = files
        self._log = log
        lengths = {
            layout.COMMIT_LOG: format_.segment_bytes,
            layout.ACTION_LOG: format_.action_segment_bytes,
        }
        self._segments = Segments(disk, log, lengths[log])
        self._cover = RangeCover(disk, self._segments, format_.store_id)

    def close(self) -> None:
        """Close the files."""
        self._segments.close()

    def _report(
        self,
        whole: DamagedRange,
        parts: Sequence[DamagedRange],
        lost: Sequence[LostRun],
        delayed: LostDelayed = NO_DELAYED,
        *,
        touches_delayed: bool = False,
    ) -> QuarantineReport:
        """Report and copy a range with these parts; durable on return."""
        report = QuarantineReport(
            store_id=self._format.store_id.hex(),
            at_ms=self._clock.now_ms(),
            first_offset=whole.first_offset,
            next_offset=whole.next_offset,
            reason=whole.reason,
            lost=tuple(lost),
            log=self._log,
            delayed=delayed.messages,
            may_hold_delayed=delayed.may_be_more,
            touches_delayed=touches_delayed,
        )
        write_report(self._disk, report, keep=lambda: self._keep(parts))
        return report

    def _stamps(self, holes: Sequence[DamagedRange], verdict: LogVerdict) -> list[tuple[int, int]]:
        """Epoch and time for each hole: those of the frame after it, so that neither decreases."""
        last = self._files.checkpoint
        epoch = max(verdict.epoch, last.epoch if last else 0)
        stored_at_ms = self._clock.now_ms()
        if last:
            is_commit = self._log == layout.COMMIT_LOG
            point = last.commit_log if is_commit else last.action_log
            stored_at_ms = point.last_stored_at_ms
        stamps: list[tuple[int, int]] = []
        first_offsets = {hole.first_offset for hole in holes}
        for hole in reversed(holes):
            is_good = hole.next_offset not in first_offsets
            if is_good and hole.next_offset < verdict.next_offset:
                header = read_header(self._segments.read(hole.next_offset, FRAME_HEADER_BYTES))
                epoch, stored_at_ms = header.epoch, header.stored_at_ms
            stamps.append((epoch, stored_at_ms))
        return stamps[::-1]

    def _keep(self, parts: Sequence[DamagedRange]) -> None:
        for part in parts:
            path = _path(self._log, part.first_offset, part.next_offset, "raw")
            self._cover.keep(part, path)


def read_reports(disk: Disk) -> list[QuarantineReport]:
    """All quarantined ranges, in order; damaged reports are left out."""
    reports = []
    for name in disk.names(layout.QUARANTINE):
        data = read_file(disk, f"{layout.QUARANTINE}/{name}") if name.endswith(_SUFFIX) else None
        content = None if data is None else unseal(data)
        if content is not None:
            with suppress(msgspec.MsgspecError):
                reports.append(msgspec.json.decode(content, type=QuarantineReport))
    return reports


def _path(log: str, first_offset: int, next_offset: int, suffix: str) -> str:
    path = layout.quarantine_path(first_offset, next_offset, suffix)
    if log == layout.COMMIT_LOG:
        return path
    directory, _, name = path.rpartition("/")
    return f"{directory}/{log}.{name}"


class RangeCover:
    """Ranges of one log, each within one segment."""

    def __init__(self, disk: Disk, segments: Segments, store_id: bytes) -> None:
        self._disk = disk
        self._segments = segments
        self._store_id = store_id

    def frames(self, hole: DamagedRange, lost: list[LostRun]) -> list[bytes]:
        """The frames that will fill the hole, after the head if it begins a segment.

        Raises `CorruptionError` if the hole is too short for the necessary records.
        """
        is_first = hole.first_offset == self._segments.base_of(hole.first_offset)
        head_bytes = SEGMENT_HEAD_BYTES if is_first else 0
        range_bytes = hole.next_offset - hole.first_offset - head_bytes
        is_last = hole.next_offset % self._segments.segment_bytes == 0
        if not range_bytes and not lost:
            return []
        if is_last and not lost and FRAME_HEADER_BYTES <= range_bytes < LOST_LEAST_BYTES:
            return [build_padding(range_bytes)]
        try:
            return lost_frames(range_bytes, lost)
        except (ValueError, ProtocolError) as error:
            raise CorruptionError(
                segment=self._segments.path(hole.first_offset),
                offset=hole.first_offset,
                reason=f"{hole.reason}; it cannot be discarded: {error}",
            ) from error

    def keep(self, hole: DamagedRange, path: str) -> None:
        """Copy the bytes of a range; durable on return, except for the name."""
        file = self._disk.open(path, is_new=True)
        try:
            file.truncate(0)
            for offset in range(hole.first_offset, hole.next_offset, SCAN_BLOCK_BYTES):
                count = min(SCAN_BLOCK_BYTES, hole.next_offset - offset)
                file.write(offset - hole.first_offset, [self._segments.read(offset, count)])
            file.sync()
        finally:
            file.close()

    def cover(
        self, hole: DamagedRange, frames: Sequence[bytes], *, epoch: int, stored_at_ms: int
    ) -> None:
        """Write the frames from `frames` over the range; durable on return.

        A backup that shares the segment keeps the old bytes.
        """
        segments = self._segments
        base = segments.base_of(hole.first_offset)
        offset = hole.first_offset
        parts: list[tuple[int, bytes]] = []
        # It is unknown whether old frames follow, so the head says that they may.
        head = build_segment_head(self._store_id, base, stored_at_ms, is_recycled=True)
        if not segments.has(base):
            self._disk.make_directory(segments.directory)
            self._disk.sync_directory(layout.ROOT)
            stamped = b"".join(_stamped(head, base, epoch, stored_at_ms))
            segments.make(base, len(head), stamped)
        if offset == base:
            frames = [head, *frames]
        for frame in frames:
            parts.append((offset, frame))
            offset += len(frame)
        segments.unshare(base)
        file = segments.file(base)
        for some in (parts[1:], parts[:1]):
            for offset, frame in some:
                # Stamped only now, without copying them: together they may be a GiB.
                file.write(offset - base, _stamped(frame, offset, epoch, stored_at_ms))
            file.sync()


def by_segment(segments: Segments, first_offset: int, next_offset: int) -> Iterator[DamagedRange]:
    """A range as parts of one segment each."""
    while first_offset < next_offset:
        next_base = segments.base_of(first_offset) + segments.segment_bytes
        yield DamagedRange(first_offset, min(next_base, next_offset), "")
        first_offset = next_base


def _stamped(frame: bytes, offset: int, epoch: int, stored_at_ms: int) -> tuple[bytes, memoryview]:
    """A frame in two parts: its stamped head, and the rest."""
    head = stamp_frame(
        frame,
        physical_offset=offset,
        stored_at_ms=stored_at_ms,
        epoch=epoch,
        durable_offset=0,
    )
    return head, memoryview(frame)[len(head) :]
