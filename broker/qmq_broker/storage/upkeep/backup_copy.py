"""Copying the content of a log to another directory through the disk port, frame by frame."""

from __future__ import annotations

from typing import NamedTuple

from qmq_broker.storage.files.disk_port import Disk, DiskFile
from qmq_broker.storage.files.layout import segment_path
from qmq_broker.storage.logs.frame_scan import SCAN_BLOCK_BYTES, FrameScan
from qmq_broker.storage.logs.segments import Segments


class LogEnd(NamedTuple):
    """Where the good frames of a log end."""

    next_offset: int
    last_frame_offset: int
    last_stored_at_ms: int
    epoch: int
    #: Why what follows is no good frame.
    reason: str


def is_there(disk: Disk, path: str) -> bool:
    """Whether there is a file of that name."""
    directory, _, name = path.rpartition("/")
    return name in disk.names(directory)


def copy_frames(source: Segments, target: Disk, scan: FrameScan) -> LogEnd:
    """Copy what `scan` finds; it begins with a segment of `source` and reads from there.

    A segment being written is copied up to its first frame that is not whole; segments begun later
    are not copied. Content is durable on return, names are not.
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
        """Write the next frame; of padding only the header."""
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
