"""Keeping a copy of a range of a log, and covering the range in place with frames of kind LOST.

For ranges that a person gave up, see `quarantine.py`. The first frame of a range is written last,
on its own: until it is durable the range is as damaged as before, whatever else a power cut leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.logs.frame_scan import SCAN_BLOCK_BYTES
from qmq_broker.storage.logs.lost import LOST_LEAST_BYTES, LostRun, lost_frames
from qmq_broker.storage.logs.segments import SEGMENT_HEAD_BYTES, Segments, build_segment_head
from qmq_broker.storage.upkeep.inspect_log import DamagedRange
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import FRAME_HEADER_BYTES, build_padding, stamp_frame


class RangeCover:
    """Ranges of one log, each within one segment."""

    def __init__(self, disk: Disk, segments: Segments, store_id: bytes) -> None:
        self._disk = disk
        self._segments = segments
        self._store_id = store_id

    def frames(self, hole: DamagedRange, lost: list[LostRun]) -> list[bytes]:
        """The frames that will fill the hole, after the head if it begins a segment.

        Raises `CorruptionError` if the hole is too short for what must be recorded.
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
                reason=f"{hole.reason}; it cannot be given up: {error}",
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

        A backup that shares the segment keeps it as it is.
        """
        segments = self._segments
        base = segments.base_of(hole.first_offset)
        offset = hole.first_offset
        parts: list[tuple[int, bytes]] = []
        # Whether old frames follow is no longer known, so the head says that they may.
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
                # Stamped only now, and not copied for that: together they may be a GiB.
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
