"""Reads one log of a data directory for the pipeline, up to its durable end, in ranges.

The broker's own scanner finds and verifies the frames. This module determines the durable end, cuts
the log into ranges that begin and end at frames, and translates errors of the scanner: retention
has deleted the range, or it is damaged.

The durable end is that of the newest checkpoint, or the last sync that later valid frames confirm.
So a reader next to a running broker is at most a second behind, and never shows messages that a
power cut could remove. A broker serves only durable bytes, so there every valid frame counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from typing import Final, NamedTuple, TypeVar

from qmq_broker.errors import CorruptionError, DiskError, StoreError, UnknownFormatError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.checkpoint import START, CheckpointFiles, LogPoint
from qmq_broker.storage.files.format_file import Format, read_format
from qmq_broker.storage.files.retained import read_retained
from qmq_broker.storage.logs.action_log import ACTION_KINDS
from qmq_broker.storage.logs.frame_scan import (
    HEAD_BYTES_MAX,
    FrameScan,
    ScannedFrame,
    ScanSource,
)
from qmq_broker.storage.logs.frame_seek import LogRange, frame_at_or_after, offset_at, read_stamp
from qmq_broker.storage.logs.kinds import COMMIT_KINDS
from qmq_broker.storage.logs.segments import Segments
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import FrameKind
from qmq_pipeline.errors import (
    DamagedRangeError,
    ExpiredRangeError,
    LaterVersionError,
    SourceError,
)
from qmq_pipeline.places.disks import ReadDisk, ReadFile

#: Both logs, by their names in the tables.
COMMIT_LOG: Final = layout.COMMIT_LOG
ACTION_LOG: Final = layout.ACTION_LOG
_KINDS: Final = {COMMIT_LOG: COMMIT_KINDS | {FrameKind.DELAYED}, ACTION_LOG: ACTION_KINDS}
#: Distance before an end at which the search for a frame begins.
_STEP_BYTES: Final = 4096
_REMEDY_DIRECTORY: Final = "Give the data directory of a broker, a backup or an archive"


_Result = TypeVar("_Result")


class LogBounds(NamedTuple):
    """The extent of a log."""

    #: Identifies the log: offsets of another store mean nothing here.
    store_id: str
    first_offset: int
    next_offset: int
    #: Offset and checksum of the last frame, which distinguish a log from one that was restored and
    #: continued differently; None if unknown.
    last_frame: tuple[int, int] | None = None


class LogReader:
    """One log, open for reading; one thread at a time."""

    def __init__(
        self, disk: ReadDisk, log: str, *, source: str, known: Format | None = None
    ) -> None:
        """Raises `SourceError` if `source` is not a data directory, or of another version.

        With `known`, from another reader of the same store, nothing is read here.
        """
        self._disk = disk
        self._log = log
        self._source = source
        #: The settings that never change.
        self.format: Final = self._read_format() if known is None else known
        #: The segments found when the log was last read as a whole; None before.
        self._opened: Segments | None = None

    @property
    def store_id(self) -> str:
        """Identifies the store."""
        return self.format.store_id.hex()

    @property
    def segment_bytes(self) -> int:
        """Length of one segment."""
        if self._log == COMMIT_LOG:
            return self.format.segment_bytes
        return self.format.action_segment_bytes

    def part_bytes(self, most: int) -> int:
        """Bytes of one part: a segment is a whole number of parts, of at most `most` bytes if possible."""
        segment = self.segment_bytes
        count = max(1, -(-segment // most))
        return segment // next(one for one in range(count, segment + 1) if segment % one == 0)

    def close(self) -> None:
        """Close the files and the disk."""
        self._let_go()
        self._disk.close()

    def bounds(self) -> LogBounds:
        """The range of the log that may be read now."""
        self._let_go()
        first_offset = self._first_offset()
        return LogBounds(self.store_id, first_offset, *self._durable_offset(first_offset))

    def bounds_since(self, known: LogBounds) -> LogBounds | None:
        """The same for callers that know an earlier range: only later frames are read.

        The lower end does not change: readers of a range detect that retention has deleted it.
        Returns None if only `bounds` can decide: the store is another one, or its next frame is not
        at the expected place.
        """
        self._let_go()
        if self._read_format() != self.format:
            return None
        with closing(self._one_pass()) as files:
            scan = self._scan(files, known.next_offset)
            try:
                durable = max(known.next_offset, self._durable_end(scan))
            except StoreError:
                return None
        is_all_vouched_for = scan.last is not None and durable == scan.next_offset
        if not is_all_vouched_for:
            durable = max(durable, self._point().durable_offset)
        if durable > scan.next_offset:
            return None
        last = known.last_frame if durable == known.next_offset else _last_frame(scan, durable)
        return known._replace(next_offset=durable, last_frame=last)

    def offset_at(self, time_ms: int, bounds: LogBounds) -> int:
        """The offset of the first frame stored at `time_ms` or later."""
        within = LogRange(bounds.first_offset, bounds.next_offset)
        return self._translated(lambda: offset_at(self._segments(), time_ms, within))

    def frame_from(self, offset: int, bounds: LogBounds) -> int:
        """The offset of the first frame at or after any `offset`; the log's end if there is none."""
        if not bounds.first_offset < offset < bounds.next_offset:
            return min(max(offset, bounds.first_offset), bounds.next_offset)
        return self._cut(offset, bounds.next_offset)

    def stamp_crc(self, offset: int) -> int | None:
        """The log's checksum of the frame at `offset`; None without a valid frame or a segment there."""
        with closing(self._one_pass()) as files:
            try:
                # At a broker this is one request, from which the head is then read.
                files.read(offset, HEAD_BYTES_MAX)
                return read_stamp(files, offset).stamp_crc
            except (ProtocolError, DiskError):
                return None

    def last_frame(self, next_offset: int, bounds: LogBounds) -> tuple[int, int] | None:
        """Offset and checksum of the frame that ends at `next_offset`; None if it no longer exists."""
        step = _STEP_BYTES
        while step <= _STEP_BYTES * self.segment_bytes:
            wanted = max(bounds.first_offset, next_offset - step)
            first = self._cut(wanted, next_offset)
            if first < next_offset:
                frames = list(self.frames(LogRange(first, next_offset)))
                return frames[-1].offset, frames[-1].header.stamp_crc
            if wanted == bounds.first_offset:
                return None
            step *= 4
        return None

    def has_stamp(self, offset: int, stamp_crc: int) -> bool:
        """Whether the frame at `offset` has this checksum, as far as the log still has it."""
        return self.stamp_crc(offset) == stamp_crc or offset < self.bounds().first_offset

    def parts(self, first_offset: int, next_offset: int, part_bytes: int) -> list[LogRange]:
        """Cut a part of the log at multiples of `part_bytes`: each range begins at the first frame after one."""
        inner = range(
            first_offset - first_offset % part_bytes + part_bytes, next_offset, part_bytes
        )
        cuts = {first_offset, next_offset, *(self._cut(one, next_offset) for one in inner)}
        return _between(sorted(cuts))

    def shares(self, first_offset: int, next_offset: int, count: int) -> list[LogRange]:
        """Cut a part of the log into `count` ranges of about the same length, at frames.

        They are fewer if single frames are longer than a share.
        """
        log_bytes = next_offset - first_offset
        wanted = (first_offset + log_bytes * number // count for number in range(1, count))
        inner = {self._cut(one, next_offset) for one in wanted}
        return _between(sorted({first_offset, next_offset, *inner}))

    def frames(self, within: LogRange) -> Iterator[ScannedFrame]:
        """Every frame of a range that begins and ends at frames, verified.

        Raises `ExpiredRangeError` if retention has deleted it, `DamagedRangeError` if it is
        damaged: the frames yielded before are valid, but the range is incomplete.
        """
        if within.first_offset >= within.next_offset:
            return
        with closing(self._one_pass(within.next_offset)) as files:
            scan = self._scan(files, within.first_offset)
            try:
                for frame in scan:
                    if scan.next_offset > within.next_offset:
                        raise self._damaged(
                            frame.offset, within, "a frame reaches out of the range"
                        )
                    yield frame
                    if scan.next_offset == within.next_offset:
                        return
            except StoreError as error:
                raise self._why(scan.next_offset, within, error) from error
            raise self._why(scan.next_offset, within, scan.reason)

    def _read_format(self) -> Format:
        found = self._translated(lambda: read_format(self._disk))
        if found is None:
            raise SourceError(
                source=self._source,
                reason="this is not a data directory: FORMAT is missing",
                remedy=_REMEDY_DIRECTORY,
            )
        return found

    def _segments(self) -> Segments:
        if self._opened is None:
            self._opened = self._translated(
                lambda: Segments(self._disk, self._log, self.segment_bytes)
            )
        return self._opened

    def _cut(self, offset: int, next_offset: int) -> int:
        """The offset of the first frame at or after any `offset`; at most `next_offset`."""
        within = LogRange(offset, next_offset)
        try:
            header = frame_at_or_after(self._segments(), within)
        except (
            StoreError
        ) as error:  # at a broker: retention has deleted segments since they were listed
            raise self._why(offset, within, error) from error
        return next_offset if header is None else header.physical_offset

    def _let_go(self) -> None:
        """Close segments: an open file that was deleted keeps its space on the disk."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _one_pass(self, next_offset: int | None = None) -> _Pass:
        return _Pass(self._disk, self._log, self.segment_bytes, next_offset)

    def _scan(self, files: ScanSource, first_offset: int) -> FrameScan:
        kinds, store_id = _KINDS[self._log], self.format.store_id
        return FrameScan(files, kinds, store_id=store_id, first_offset=first_offset)

    def _first_offset(self) -> int:
        bases = self._segments().bases
        lowest = bases[0] if bases else 0
        if self._log != COMMIT_LOG:
            return lowest
        retained = self._translated(lambda: read_retained(self._disk, self.format.store_id))
        return max(lowest, retained.first_offset)

    def _point(self) -> LogPoint:
        """The log's entry in the newest checkpoint."""
        checkpoint = self._translated(
            lambda: CheckpointFiles(self._disk, self.format.store_id).read()
        )
        if checkpoint is None:
            return START
        return checkpoint.commit_log if self._log == COMMIT_LOG else checkpoint.action_log

    def _durable_offset(self, first_offset: int) -> tuple[int, tuple[int, int] | None]:
        """The durable end of the log, and its last frame."""
        point = self._point()
        begin = max(first_offset, point.last_frame_offset)
        durable = max(first_offset, point.durable_offset)
        scan = self._scan(self._segments(), begin)
        try:
            seen = self._durable_end(scan)
        except StoreError as error:
            raise self._why(scan.next_offset, LogRange(begin, durable), error) from error
        if scan.next_offset < durable:
            raise self._why(scan.next_offset, LogRange(begin, durable), scan.reason)
        return max(durable, seen), _last_frame(scan, max(durable, seen))

    def _durable_end(self, scan: FrameScan) -> int:
        """The durable end of the log, according to all valid frames of a new scan."""
        for _ in scan:
            pass
        return scan.next_offset if self._disk.gives_durable_alone else scan.durable_claim

    def _why(self, offset: int, within: LogRange, reason: str | StoreError) -> SourceError:
        """The error for a range that cannot be read at `offset`."""
        self._let_go()
        if isinstance(reason, UnknownFormatError):
            return LaterVersionError(source=self._source, reason=str(reason))
        first_offset = self._first_offset()
        if offset < first_offset:
            return ExpiredRangeError(
                source=self._source,
                reason=f"offsets {within.first_offset} to {within.next_offset} of {self._log} are "
                f"asked for, but retention has deleted the log below {first_offset}",
                remedy="Ingest more often than the broker retains, or read an archive",
            )
        return self._damaged(offset, within, str(reason))

    def _damaged(self, offset: int, within: LogRange, reason: str) -> DamagedRangeError:
        return DamagedRangeError(
            source=f"{self._source}/{self._one_pass().path(offset)}",
            reason=f"damaged at offset {offset} of {self._log} (asked for: "
            f"{within.first_offset} to {within.next_offset}): {reason or 'the log ends there'}",
            remedy="Run `qmq store verify` on it; restore a copy, or start the broker with --quarantine",
        )

    def _translated(self, work: Callable[[], _Result]) -> _Result:
        """Translate errors of the broker's readers into errors of the pipeline."""
        try:
            return work()
        except UnknownFormatError as error:
            raise LaterVersionError(source=self._source, reason=str(error)) from error
        except (CorruptionError, DiskError) as error:
            raise DamagedRangeError(
                source=self._source,
                reason=str(error),
                remedy="Run `qmq store verify` on it, or restore a copy",
            ) from error
        except StoreError as error:
            raise SourceError(
                source=self._source,
                reason=str(error),
                remedy="Use the version of qmq that wrote it",
            ) from error


def _last_frame(scan: FrameScan, next_offset: int) -> tuple[int, int] | None:
    """Offset and checksum of the last frame of a scan, if the log ends after it."""
    if scan.last is None or scan.next_offset != next_offset:
        return None
    return scan.last.physical_offset, scan.last.stamp_crc


def _between(cuts: list[int]) -> list[LogRange]:
    return [LogRange(*pair) for pair in pairwise(cuts)]


class _Pass:
    """The segments of a log for one scan, from front to back: one open at a time, each read once.

    After a short read the end is not requested again, because at a broker that would cost a request.
    """

    def __init__(
        self, disk: ReadDisk, log: str, segment_bytes: int, next_offset: int | None
    ) -> None:
        """`next_offset`: the end of the pass; None for the end of the log."""
        self._disk = disk
        self._log = log
        self.segment_bytes = segment_bytes
        self._next = next_offset
        self._file: ReadFile | None = None
        self._base = -1
        #: Offset of the end of the data; -1 if it was not reached.
        self._end = -1

    def base_of(self, offset: int) -> int:
        return offset - offset % self.segment_bytes

    def path(self, offset: int) -> str:
        return layout.segment_path(self._log, self.base_of(offset))

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes of one segment; fewer at its end. Raises `DiskError` if there is none."""
        if offset == self._end:
            return b""
        base = self.base_of(offset)
        if self._file is None or base != self._base:
            self.close()
            self._file, self._base = self._disk.open(self.path(offset)), base
            if self._next is not None:
                self._file.end_at(self._next - base)
        room = base + self.segment_bytes - offset
        data = self._file.read(offset - base, min(count, room))
        if len(data) < min(count, room):
            self._end = offset + len(data)
        return data

    def data_from(self, offset: int) -> int:
        """`offset` itself, without asking the file system for holes."""
        return offset

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
