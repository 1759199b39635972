"""The scanner of all append-only logs: reads a log frame by frame and verifies each frame.

A frame is good if magic and kind are right, it stands at the offset it was stamped for, its epoch
is not older than that of the frame before, it lies inside its segment, and both checksums match.
The scan ends at the first bad frame; `log_recovery.py` decides what that means.

`claims_after` searches the bytes after that point for frames with a valid stamp. The durable gap of
such a frame gives the offset up to which the log had been synced when it was written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Protocol

from qmq_broker.errors import DiskError, UnknownFormatError
from qmq_broker.storage.logs.segments import Segments, check_segment_head
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import (
    DURABLE_GAP_MAX,
    FRAME_ALIGNMENT_BYTES,
    FRAME_HEADER_BYTES,
    FRAME_MAGIC,
    FRAME_VERSION,
    PHYSICAL_OFFSET_POSITION,
    SEQUENCE_BYTES,
    FrameHeader,
    FrameKind,
    read_header,
    unknown_format,
    verify_body,
    verify_stamp,
)
from qmq_client.wire.limits import SUBJECTS_PER_FRAME_MAX

#: Bytes of one read, roughly: large enough for the disk's speed, small enough to stay in the cache.
SCAN_BLOCK_BYTES: Final = 1024 * 1024
#: The head of a frame has a sequence for each of its subjects.
HEAD_BYTES_MAX: Final = FRAME_HEADER_BYTES + SEQUENCE_BYTES * SUBJECTS_PER_FRAME_MAX
_OFFSET_BYTES: Final = 8
#: A searched block overlaps the next one by the longest head, so that no head is cut in two. A
#: multiple of every system's page size, because a partly read page no longer counts as a hole.
_PAGE_BYTES: Final = 64 * 1024
_ZEROS: Final = bytes(SCAN_BLOCK_BYTES + HEAD_BYTES_MAX)


class ScanSource(Protocol):
    """The interface that a scanner needs from the files of a log; `Segments` implements it."""

    segment_bytes: int

    def base_of(self, offset: int) -> int:
        """Where the segment that holds `offset` begins."""
        ...

    def path(self, offset: int) -> str:
        """The segment that holds `offset`, for reports."""
        ...

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes of one segment; fewer at its end."""
        ...

    def data_from(self, offset: int) -> int:
        """The offset of the next byte of the segment that may be non-zero; its end if there is none."""
        ...


class ReadAhead:
    """A source that is read forwards in short pieces, sliced from long reads. For one thread.

    Requires: the requested range is already written at the first read.
    """

    def __init__(self, source: ScanSource, ahead_bytes: int) -> None:
        self.segment_bytes = source.segment_bytes
        self.base_of, self.path, self.data_from = source.base_of, source.path, source.data_from
        self._source = source
        self._ahead_bytes = ahead_bytes
        self._block = b""
        self._block_offset = 0

    def read(self, offset: int, count: int) -> bytes:
        """Like the source's method."""
        first = offset - self._block_offset
        if first < 0 or first + count > len(self._block):
            self._block = self._read(offset, count)
            self._block_offset, first = offset, 0
        return self._block[first : first + count]

    def _read(self, offset: int, count: int) -> bytes:
        if count < self._ahead_bytes:
            with suppress(DiskError):  # the fault may be in a later part of the block
                return self._source.read(offset, self._ahead_bytes)
        return self._source.read(offset, count)


@dataclass(frozen=True)
class ScannedFrame:
    """A good frame within a larger block: a reference to it keeps the whole block in memory."""

    offset: int
    header: FrameHeader
    #: The block that was read, and the start of this frame in it.
    block: bytes
    first: int = 0

    @property
    def view(self) -> memoryview:
        """The whole frame, or only the header for a padding frame; nothing is copied."""
        is_padding = self.header.kind is FrameKind.PADDING
        count = FRAME_HEADER_BYTES if is_padding else self.header.frame_bytes
        return memoryview(self.block)[self.first : self.first + count]

    @cached_property
    def data(self) -> bytes:
        """The same bytes as a separate object; copied once."""
        return bytes(self.view)


class FrameScan:
    """One pass over a log, from the first byte of a frame to the first bad frame.

    Iterate once; afterwards `next_offset` and the attributes below it say where and why it ended.
    Raises `UnknownFormatError` at a frame of another version, which is neither damage nor the end
    of the log.
    """

    def __init__(
        self,
        segments: ScanSource,
        kinds: frozenset[FrameKind],
        *,
        store_id: bytes,
        first_offset: int,
    ) -> None:
        self._segments = segments
        self._kinds = kinds | {FrameKind.SEGMENT_HEAD, FrameKind.PADDING, FrameKind.LOST}
        self._store_id = store_id
        self._block = b""
        self._block_offset = 0
        #: First byte after the good frames.
        self.next_offset = first_offset
        #: Why the scan ended there.
        self.reason = ""
        #: The end of the bad frame if its stamp is whole, so that its content is not searched.
        self.search_offset = first_offset
        #: The last good frame; None if there was none.
        self.last: FrameHeader | None = None
        #: The offset up to which the log had been synced, according to the good frames.
        self.durable_claim = 0

    def __iter__(self) -> Iterator[ScannedFrame]:
        while True:
            try:
                frame = self._verified(self.next_offset)
            except ProtocolError as error:
                self.reason = str(error)
                return
            self.last = frame.header
            self.durable_claim = max(self.durable_claim, durable_claim(frame.header))
            self.next_offset += frame.header.frame_bytes
            self.search_offset = self.next_offset
            yield frame

    def _verified(self, offset: int) -> ScannedFrame:
        first = self._place(offset, FRAME_HEADER_BYTES)
        try:
            header = read_header(self._block, first)
        except ProtocolError:
            epoch = 0 if self.last is None else self.last.epoch
            refuse_unknown(self._bytes(offset, HEAD_BYTES_MAX), self._segments, offset, epoch)
            raise
        verify_stamp(header, self._bytes(offset, header.head_bytes))
        if header.physical_offset != offset:
            raise ProtocolError(f"frame written for offset {header.physical_offset}")
        if self.last is not None and header.epoch < self.last.epoch:
            raise ProtocolError(
                f"frame of epoch {header.epoch} after one of epoch {self.last.epoch}"
            )
        next_offset = offset + header.frame_bytes
        base = self._segments.base_of(offset)
        room_offset = base + self._segments.segment_bytes
        if header.kind not in self._kinds or next_offset > room_offset:
            raise ProtocolError(
                f"frame of kind {header.kind.name}, {header.frame_bytes} bytes, does not belong here"
            )
        # The stamp is valid, so its length is trusted even if the body is damaged.
        self.search_offset = next_offset
        is_first = offset == base
        frame = self._whole(offset, header, is_first, room_offset)
        verify_body(header, frame.view)
        if header.kind is FrameKind.SEGMENT_HEAD:
            path = self._segments.path(offset)
            check_segment_head(frame.data, store_id=self._store_id, segment=path, base=offset)
        return frame

    def _whole(
        self, offset: int, header: FrameHeader, is_first: bool, room_offset: int
    ) -> ScannedFrame:
        if is_first != (header.kind is FrameKind.SEGMENT_HEAD):
            raise ProtocolError(f"frame of kind {header.kind.name} at the wrong place")
        count = header.frame_bytes
        if header.kind is FrameKind.PADDING:
            count = FRAME_HEADER_BYTES
            if offset + header.frame_bytes != room_offset:
                raise ProtocolError("padding that does not end with its segment")
        first = self._place(offset, count)
        if first + count > len(self._block):
            raise ProtocolError("segment ends inside a frame")
        return ScannedFrame(offset, header, self._block, first)

    def _bytes(self, offset: int, count: int) -> bytes:
        first = self._place(offset, count)
        return self._block[first : first + count]

    def _place(self, offset: int, count: int) -> int:
        """The index of `offset` in the block, which is read again unless it holds enough bytes."""
        first = offset - self._block_offset
        if first < 0 or first + count > len(self._block):
            self._block = self._segments.read(offset, max(count, self._block_bytes()))
            self._block_offset = offset
            first = 0
        return first

    def _block_bytes(self) -> int:
        """How much to read in one step: whole frames, if all are as long as the last one.

        A frame that is cut by the end of a block is read again, and a long frame is a large part of a block.
        """
        if self.last is None:
            return SCAN_BLOCK_BYTES
        return SCAN_BLOCK_BYTES + -SCAN_BLOCK_BYTES % self.last.frame_bytes


def claims_after(segments: Segments, offset: int, *, epoch: int) -> Iterator[FrameHeader]:
    """Headers at or after `offset` with a valid stamp and an epoch of at least `epoch`.

    Only places where a frame may begin are checked: every eighth byte, with the right magic and
    offset. Raises `UnknownFormatError` at a frame of another version.
    """
    for base in segments.bases_from(offset):
        yield from claims_in_segment(segments, base, max(base, offset), epoch=epoch)


def claims_in_segment(
    segments: ScanSource, base: int, offset: int, *, epoch: int
) -> Iterator[FrameHeader]:
    """The same within the segment that begins at `base`. Requires: `offset` is in it."""
    for block_offset, block in blocks(segments, offset, base):
        yield from _claims_in(segments, block, block_offset, epoch)


def blocks(segments: ScanSource, offset: int, base: int) -> Iterator[tuple[int, bytes]]:
    """The bytes of one segment from `offset` to its end, in blocks that overlap.

    Zeros are left out: a new segment has a gigabyte of them, and a start searches after its last
    frame. Most are in space that was never written, which is not read.
    """
    while block := segments.read(offset, len(_ZEROS)):
        if block == _ZEROS:
            offset += len(block)
            offset = segments.data_from(offset - (offset - base) % _PAGE_BYTES)
        else:
            if block != _ZEROS[: len(block)]:
                yield offset, block
            offset += SCAN_BLOCK_BYTES
        if offset >= base + segments.segment_bytes:
            return


def durable_claim(header: FrameHeader) -> int:
    """The offset up to which the log had been synced when this frame was written."""
    if header.durable_gap >= DURABLE_GAP_MAX:
        return 0
    return header.physical_offset - header.durable_gap


def refuse_unknown(head: bytes, segments: ScanSource, offset: int, epoch: int) -> None:
    """Raise `UnknownFormatError` if another version wrote the frame at `offset` of the log.

    Requires: `head` begins there. A frame with an epoch below `epoch` is an old one that does not belong to the log.
    """
    what = unknown_format(head)
    if not what:
        return
    place, epoch_place = PHYSICAL_OFFSET_POSITION, PHYSICAL_OFFSET_POSITION + 16
    is_here = head[place : place + _OFFSET_BYTES] == offset.to_bytes(_OFFSET_BYTES)
    if is_here and int.from_bytes(head[epoch_place : epoch_place + 4]) >= epoch:
        raise UnknownFormatError(
            setting="a frame",
            found=f"of {what}, at offset {offset} in {segments.path(offset)}",
            known=f"version {FRAME_VERSION}, kinds 1 to {max(FrameKind)}",
        )


def _claims_in(
    segments: ScanSource, block: bytes, block_offset: int, epoch: int
) -> Iterator[FrameHeader]:
    position = block.find(FRAME_MAGIC)
    while 0 <= position < SCAN_BLOCK_BYTES:
        offset, place = block_offset + position, position + PHYSICAL_OFFSET_POSITION
        # The cheapest test first: a recycled segment holds a million old frames, with other
        # offsets.
        is_here = block[place : place + _OFFSET_BYTES] == offset.to_bytes(_OFFSET_BYTES)
        if is_here and offset % FRAME_ALIGNMENT_BYTES == 0:
            header = _claim(block, position)
            if header is None:
                head = block[position : position + HEAD_BYTES_MAX]
                refuse_unknown(head, segments, offset, epoch)
            if header is not None and header.epoch >= epoch:
                yield header
        position = block.find(FRAME_MAGIC, position + 1)


def _claim(block: bytes, position: int) -> FrameHeader | None:
    try:
        header = read_header(block, position)
        verify_stamp(header, block[position : position + header.head_bytes])
    except ProtocolError:
        return None
    return header
