"""The files of delayed messages: the schedule log and the dispatch log of each bucket of due times.

::

    schedule/<yyyyMM>/<yyyyMMddHHmm>    SEGMENT_HEAD frame, SCHEDULED frames
    dispatch/<yyyyMM>/<yyyyMMddHHmm>    SEGMENT_HEAD frame, DISPATCHED frames

Each is a log of one segment that begins at the offset of its bucket, which reveals a file under the
wrong name. It is written only at a known length, by one thread, usually dozens of messages at a
time; bytes after that length were left by an interrupted copy and are cut. Body of a DISPATCHED
frame: entries of 8 bytes, the state 1 and the schedule sequence 7.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Final

from qmq_broker.errors import CorruptionError, DiskError, DiskFullError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk, DiskFile
from qmq_broker.storage.logs.frame_scan import (
    HEAD_BYTES_MAX,
    FrameScan,
    claims_in_segment,
    durable_claim,
    refuse_unknown,
)
from qmq_broker.storage.logs.segments import build_segment_head
from qmq_broker.storage.schedule.columns import Columns, Subjects
from qmq_broker.storage.schedule.lists import BucketLists, OnDamage
from qmq_broker.storage.schedule.states import DelayedState, unpack_state
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import (
    FRAME_HEADER_BYTES,
    FrameHeader,
    FrameKind,
    build_frame,
    read_header,
    stamp_frame,
)
from qmq_client.wire.marks import numbers

#: Longer than any of these files; times are below 2⁴⁸, so no offset exceeds 64 bits.
BUCKET_BYTES_MAX: Final = 1 << 44
#: Files kept open for reading.
OPEN_FILES: Final = 32
#: Entries of one DISPATCHED frame.
DISPATCHED_MAX: Final = 16 * 1024
KINDS: Final = {
    layout.SCHEDULE: frozenset({FrameKind.SCHEDULED}),
    layout.DISPATCH: frozenset({FrameKind.DISPATCHED}),
}


class BucketFile:
    """One file as a source for a scanner: a log of one segment that begins at its bucket's offset."""

    def __init__(
        self, files: ScheduleFiles, log: str, bucket: int, length: int = BUCKET_BYTES_MAX
    ) -> None:
        """`length` is the number of bytes to read."""
        self.segment_bytes = length
        self._files = files
        self._log = log
        self._bucket = bucket

    def base_of(self, _: int) -> int:
        """The beginning of its only segment."""
        return self._bucket

    def path(self, _: int) -> str:
        """For reports."""
        return layout.bucket_path(self._log, self._bucket)

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset`; fewer at the end."""
        return self._files.read(self._log, self._bucket, offset - self._bucket, count)

    def data_from(self, offset: int) -> int:
        """`offset` itself: no space is reserved in these files."""
        return offset


class ScheduleFiles:
    """Schedule and dispatch logs. `append` belongs to one thread, reads to any."""

    def __init__(self, disk: Disk, store_id: bytes) -> None:
        self._disk = disk
        self._store_id = store_id
        self._lock = Lock()
        self._open: OrderedDict[tuple[str, int], DiskFile] = OrderedDict()
        self._directories: set[str] = set()
        self._lists = BucketLists(partial(BucketFile, self, layout.SCHEDULE))
        #: Log and bucket → length of the file at its last sync, for files written since.
        self._unsynced: dict[tuple[str, int], int] = {}
        #: The epoch stamped on every frame; set once the epoch of this run is known.
        self.epoch = 0

    def append(
        self, log: str, bucket: int, position: int, frames: Sequence[bytes], *, stored_at_ms: int
    ) -> int:
        """Write frames at `position`, the known end of the file; durable after `sync`.

        Returns the new end. Bytes after the old end are cut.
        """
        path = layout.bucket_path(log, bucket)
        is_new = position == 0
        if is_new:
            self._make_directory(log, layout.bucket_directory(log, bucket))
            frames = [build_segment_head(self._store_id, bucket, stored_at_ms), *frames]
        durable_offset = bucket + self._unsynced.setdefault((log, bucket), position)
        file = self._disk.open(path, is_new=is_new)
        try:
            if file.length() > position:
                file.truncate(position)
            parts: list[bytes | memoryview] = []
            next_position = position
            for frame in frames:
                header = read_header(frame)
                head = stamp_frame(
                    frame,
                    physical_offset=bucket + next_position,
                    stored_at_ms=stored_at_ms,
                    epoch=self.epoch,
                    durable_offset=durable_offset,
                    first_sequences=(0,) * header.subject_count,
                )
                parts += (head, memoryview(frame)[len(head) :])
                next_position += len(frame)
            file.write(position, parts)
        finally:
            file.close()
        return next_position

    def sync(self) -> None:
        """Make all appended frames durable. In any thread, while no append runs.

        Raises `DiskError` even for a full disk, because the result of a failed sync is unknown.
        """
        directories = set()
        for (log, bucket), synced_bytes in self._unsynced.items():
            path = layout.bucket_path(log, bucket)
            file = self._disk.open(path)
            try:
                file.sync()
            except DiskFullError as error:
                raise DiskError(operation="sync", path=path, reason=str(error)) from error
            finally:
                file.close()
            if not synced_bytes:
                directories.add(layout.bucket_directory(log, bucket))
        for directory in sorted(directories):
            self._disk.sync_directory(directory)
        self._unsynced.clear()

    def read(self, log: str, bucket: int, position: int, count: int) -> bytes:
        """Read bytes of a file; none if there is no file."""
        key = log, bucket
        with self._lock:
            file = self._open.get(key)
            if file is None:
                file = self._opened(log, bucket)
                if file is None:
                    return b""
                self._open[key] = file
                if len(self._open) > OPEN_FILES:
                    self._open.popitem(last=False)[1].close()
            else:
                self._open.move_to_end(key)
            return file.read(position, count)

    @contextmanager
    def opened(self, log: str, bucket: int) -> Iterator[DiskFile | None]:
        """A file for many reads that block no other reader; None if there is none."""
        file = self._opened(log, bucket)
        try:
            yield file
        finally:
            if file is not None:
                file.close()

    def length(self, log: str, bucket: int) -> int:
        """Bytes in a file; 0 if there is none."""
        with self.opened(log, bucket) as file:
            return 0 if file is None else file.length()

    def refuse_later(self, log: str, bucket: int, next_position: int) -> int:
        """Bytes in a file; raises `UnknownFormatError` if a later version wrote a frame of it.

        Reads only the heads of the frames below `next_position`, up to one that is damaged.
        """
        with self.opened(log, bucket) as file:
            if file is None:
                return 0
            position = 0
            while position < next_position:
                head = file.read(position, FRAME_HEADER_BYTES)
                try:
                    position += read_header(head).frame_bytes
                except ProtocolError:
                    head = file.read(position, HEAD_BYTES_MAX)
                    source = BucketFile(self, log, bucket)
                    refuse_unknown(head, source, bucket + position, epoch=0)
                    break
            return file.length()

    def has(self, log: str, bucket: int) -> bool:
        """Whether there is such a file."""
        directory, _, name = layout.bucket_path(log, bucket).rpartition("/")
        return name in self._disk.names(directory)

    def _opened(self, log: str, bucket: int) -> DiskFile | None:
        try:
            return self._disk.open(layout.bucket_path(log, bucket))
        except DiskError:
            if self.has(log, bucket):  # checked only here: its folder may have hundreds of names
                raise
            return None

    def buckets(self, log: str) -> list[int]:
        """All buckets that have a file, in order."""
        found = []
        for month in filter(layout.is_month_name, self._disk.names(log)):
            for name in self._disk.names(f"{log}/{month}"):
                bucket = layout.parse_bucket(name)
                if bucket is not None and name.startswith(month):
                    found.append(bucket)
        return sorted(found)

    def remove(self, log: str, bucket: int) -> None:
        """Remove a file if it is there; durable when its directory is synced."""
        if not self.has(log, bucket):
            return
        path = layout.bucket_path(log, bucket)
        self._lists.forget(bucket)
        with self._lock:
            if (file := self._open.pop((log, bucket), None)) is not None:
                file.close()
            self._disk.unlink(path)

    def columns(
        self,
        bucket: int,
        subjects: Subjects,
        *,
        next_position: int,
        first_sequence: int = 0,
        within: tuple[int, int] | None = None,
        on_damage: OnDamage | None = None,
    ) -> Iterator[Columns]:
        """The messages of a schedule log frame by frame, without reading their records.

        Begins with the frame that holds `first_sequence`. Frames known to have no due time `within`
        these bounds are left out. Raises `CorruptionError`; with `on_damage`, that is called
        instead for each unreadable list, and reading continues with the next frame.
        """
        return self._lists.columns(
            bucket,
            subjects,
            next_position=next_position,
            first_sequence=first_sequence,
            within=within,
            on_damage=on_damage,
        )

    def states(self, bucket: int, *, next_position: int) -> Iterator[tuple[DelayedState, int]]:
        """The entries of a dispatch log; raises `CorruptionError`."""
        if not next_position:
            return
        for data, header in self.frames(layout.DISPATCH, bucket, next_position=next_position):
            first = header.head_bytes
            for entry in numbers(data[first : first + 8 * header.record_count]):
                try:
                    yield unpack_state(entry)
                except ValueError as error:
                    raise self._corruption(layout.DISPATCH, bucket, 0, str(error)) from error

    def frames(
        self, log: str, bucket: int, *, next_position: int
    ) -> Iterator[tuple[bytes, FrameHeader]]:
        """The frames of a file up to this position, each verified; raises `CorruptionError`."""
        scan = self.scan(log, bucket)
        for frame in scan:
            if frame.header.kind in KINDS[log]:
                yield frame.data, frame.header
            if scan.next_offset >= bucket + next_position:
                return
        raise self._corruption(log, bucket, scan.next_offset - bucket, scan.reason)

    def scan(self, log: str, bucket: int) -> FrameScan:
        """One pass over a file from its beginning."""
        source = BucketFile(self, log, bucket)
        return FrameScan(source, KINDS[log], store_id=self._store_id, first_offset=bucket)

    def good_bytes(self, log: str, bucket: int) -> int:
        """The end of the good frames of a file, without the table; raises `CorruptionError`.

        It is damage, not an interrupted copy, if a later frame shows that more was synced.
        """
        scan = self.scan(log, bucket)
        for _ in scan:
            pass
        source = BucketFile(self, log, bucket)
        epoch = scan.last.epoch if scan.last else 0
        for header in claims_in_segment(source, bucket, scan.search_offset, epoch=epoch):
            if durable_claim(header) > scan.next_offset:
                raise self._corruption(log, bucket, scan.next_offset - bucket, scan.reason)
        return scan.next_offset - bucket

    def close(self) -> None:
        """Close all files. Safe to call twice."""
        with self._lock:
            for file in self._open.values():
                file.close()
            self._open.clear()

    def forget(self, bucket: int) -> None:
        """Let the next read open the files of a bucket again."""
        self._lists.forget(bucket)
        with self._lock:
            for log in KINDS:
                if (file := self._open.pop((log, bucket), None)) is not None:
                    file.close()

    def sync_directory(self, log: str, bucket: int) -> None:
        """Make removals from the folder of a bucket durable."""
        self._disk.sync_directory(layout.bucket_directory(log, bucket))

    def _make_directory(self, log: str, directory: str) -> None:
        if directory in self._directories:
            return
        self._disk.make_directory(directory)
        self._disk.sync_directory(log)
        self._directories.add(directory)

    def _corruption(self, log: str, bucket: int, position: int, reason: str) -> CorruptionError:
        return CorruptionError(
            segment=layout.bucket_path(log, bucket), offset=position, reason=reason
        )


def dispatched_frames(entries: Sequence[int]) -> list[bytes]:
    """Entries of a dispatch log as frames."""
    frames = []
    for first in range(0, len(entries), DISPATCHED_MAX):
        column = array("Q", entries[first : first + DISPATCHED_MAX])
        count = len(column)
        if sys.byteorder == "little":
            column.byteswap()
        frames.append(build_frame(FrameKind.DISPATCHED, column.tobytes(), record_count=count))
    return frames
