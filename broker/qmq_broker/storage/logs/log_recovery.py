"""Opens one append-only log after a clean stop, a crash or a power cut.

`examine` reads and decides, `mend` repairs. The first bad frame is one of two things:

- a **torn tail**: no later frame claims that it had been synced, so it was never acknowledged. It
  is cut physically, so that old bytes cannot be mistaken for new ones;
- **corruption**: the checkpoint, or the durable gap of a later frame, says that the log had been
  synced beyond it. Then accepted data is damaged: raises `CorruptionError` and changes nothing.

The limit of the method: damage inside the very last commit before the stop looks like a torn write.
Checkpoints, which are also written when the log becomes idle, limit this to about a second.

`mend` also rewrites in place frames that may never have been synced, and syncs them: after
a failed sync the page cache may show bytes that the kernel has marked as stored although they never
reached the disk (PostgreSQL's fsync finding of 2018). A sync alone would then succeed without
storing them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.files.checkpoint import LogPoint
from qmq_broker.storage.logs.frame_scan import (
    SCAN_BLOCK_BYTES,
    FrameScan,
    ScannedFrame,
    blocks,
    claims_after,
    durable_claim,
    refuse_unknown,
)
from qmq_broker.storage.logs.segments import SEGMENT_HEAD_BYTES, Segments, check_segment_head
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import (
    FRAME_HEADER_BYTES,
    FrameHeader,
    FrameKind,
    read_header,
    verify_body,
    verify_stamp,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFinding:
    """The result of `examine` for one log."""

    #: First byte after the accepted frames: the log continues here.
    next_offset: int
    #: Bytes below this are known to have been synced.
    durable_offset: int
    last_frame_offset: int
    last_stored_at_ms: int
    #: Highest epoch of the frames that were read.
    epoch: int
    #: Frames and records that were read, without segment heads and padding.
    frames: int
    records: int
    scanned_bytes: int
    #: Bytes after the accepted frames, from the first to the last that is not zero.
    torn_bytes: int
    #: The fault of the first of them; empty if there are none.
    torn_reason: str
    #: Offsets of valid frames among them: bytes before them were lost, so these frames are discarded too.
    torn_frames: tuple[int, ...] = ()


def examine(
    segments: Segments,
    kinds: frozenset[FrameKind],
    *,
    store_id: bytes,
    point: LogPoint,
    first_offset: int = 0,
    check: Callable[[ScannedFrame], object] = lambda _: None,
) -> LogFinding:
    """Read the log from the checkpoint's last frame on, and decide where it ends.

    `first_offset` is where the log begins; `check` is called with each frame of `kinds`. Raises
    `CorruptionError`, and `UnknownFormatError` where another version wrote. Changes nothing.
    """
    _check_unbroken(segments, store_id, first_offset, point)
    scan = FrameScan(segments, kinds, store_id=store_id, first_offset=point.last_frame_offset)
    frames = records = 0
    last_frame_offset = point.last_frame_offset
    for frame in scan:
        last_frame_offset = frame.offset
        if frame.header.kind in kinds:
            check(frame)
            frames += 1
            records += frame.header.record_count
    torn_frames = _check_end(segments, scan, point)
    torn_bytes = torn_bytes_after(segments, scan.next_offset)
    last = scan.last
    return LogFinding(
        next_offset=scan.next_offset,
        durable_offset=min(scan.next_offset, max(point.durable_offset, scan.durable_claim)),
        last_frame_offset=last_frame_offset,
        last_stored_at_ms=max(point.last_stored_at_ms, last.stored_at_ms if last else 0),
        epoch=last.epoch if last else 0,
        frames=frames,
        records=records,
        scanned_bytes=scan.next_offset - point.last_frame_offset,
        torn_bytes=torn_bytes,
        torn_reason=scan.reason if torn_bytes else "",
        torn_frames=torn_frames,
    )


def mend(
    segments: Segments, finding: LogFinding, *, first_offset: int = 0, spares_max: int = 0
) -> None:
    """Cut the bytes after the accepted frames and make the accepted ones durable; durable on return.

    Segments below `first_offset` were deleted; their removal is completed. May be interrupted at
    any point and repeated, with the same result.
    """
    given_up = [b for b in segments.bases if b + segments.segment_bytes <= first_offset]
    for base in given_up:
        segments.give_up(base)
    segments.put_away(spares_max=spares_max)
    cut = finding.next_offset
    _rewrite(segments, finding.durable_offset, cut)
    for base in [base for base in segments.bases if base >= cut]:
        segments.remove(base)
    segments.disk.sync_directory(segments.directory)
    if (finding.torn_bytes or finding.torn_frames) and segments.bases:
        _cut(segments, cut, finding.torn_frames)


def _check_unbroken(
    segments: Segments, store_id: bytes, first_offset: int, point: LogPoint
) -> None:
    """Raise unless every segment from `first_offset` to that of `point` exists and belongs to this store.

    Only their heads are read. The scan checks the segment where it begins and later ones: an
    interrupted cut may leave any of them.
    """
    for base in range(first_offset, point.last_frame_offset, segments.segment_bytes):
        reason = f"segment is missing; the log reaches to offset {point.last_frame_offset} at least"
        if segments.has(base):
            reason = _head_fault(segments, base, store_id)
        if reason:
            raise CorruptionError(segment=segments.path(base), offset=base, reason=reason)


def _head_fault(segments: Segments, base: int, store_id: bytes) -> str:
    """The fault of the head of a segment; empty without one."""
    data = segments.read(base, SEGMENT_HEAD_BYTES)
    refuse_unknown(data, segments, base, epoch=0)
    try:
        header = read_header(data)
        verify_stamp(header, data[: header.head_bytes])
        verify_body(header, data)
        check_segment_head(data, store_id=store_id, segment=segments.path(base), base=base)
    except ProtocolError as error:
        return str(error)
    except CorruptionError as error:
        return error.reason
    return "" if header.kind is FrameKind.SEGMENT_HEAD else "not a segment head"


def _check_end(segments: Segments, scan: FrameScan, point: LogPoint) -> tuple[int, ...]:
    """Offsets of valid frames after the scan; raises if one of them, or the checkpoint, claims a sync beyond it."""
    if scan.next_offset < point.durable_offset:
        raise _corruption(
            segments, scan, f"the checkpoint says synced up to offset {point.durable_offset}"
        )
    epoch = scan.last.epoch if scan.last else 0
    torn_frames = []
    for header in claims_after(segments, scan.search_offset, epoch=epoch):
        if durable_claim(header) > scan.next_offset:
            raise _corruption(segments, scan, _evidence(header))
        torn_frames.append(header.physical_offset)
    return tuple(torn_frames)


def _evidence(header: FrameHeader) -> str:
    return (
        f"the frame at offset {header.physical_offset} says "
        f"synced up to offset {durable_claim(header)}"
    )


def _corruption(segments: Segments, scan: FrameScan, evidence: str) -> CorruptionError:
    offset = scan.next_offset
    reason = f"{scan.reason}; {evidence}"
    if not segments.has(segments.base_of(offset)):
        reason = f"segment is missing; {evidence}"
    return CorruptionError(segment=segments.path(offset), offset=offset, reason=reason)


def torn_bytes_after(segments: Segments, offset: int) -> int:
    """How many bytes after the accepted frames belong to a torn frame."""
    torn_bytes = 0
    for base in segments.bases_from(offset):
        first = max(base, offset)
        if segments.is_recycled(base):
            torn_bytes += _claimed_bytes(segments, first)
            continue
        next_nonzero = first
        for block_offset, block in blocks(segments, first, base):
            content = block.rstrip(b"\0")
            if content:
                next_nonzero = block_offset + len(content)
        torn_bytes += next_nonzero - first
    return torn_bytes


def _claimed_bytes(segments: Segments, offset: int) -> int:
    """The length of the torn frame at this place, if any; old frames have another offset."""
    try:
        header = read_header(segments.read(offset, FRAME_HEADER_BYTES))
    except ProtocolError:
        return 0
    return header.frame_bytes if header.physical_offset == offset else 0


def _rewrite(segments: Segments, offset: int, next_offset: int) -> None:
    """Rewrite accepted bytes in place, and sync their segments."""
    for base in segments.bases_from(offset):
        if base >= next_offset:
            return
        file = segments.file(base)
        last_offset = min(next_offset, base + segments.segment_bytes)
        position_offset = max(base, offset)
        while position_offset < last_offset:
            count = min(SCAN_BLOCK_BYTES, last_offset - position_offset)
            data = segments.read(position_offset, count)
            if not data:
                break
            file.write(position_offset - base, [data])
            position_offset += len(data)
        file.sync()


def _cut(segments: Segments, offset: int, torn_frames: Iterable[int]) -> None:
    """Make all bytes after `offset` in the last segment read as zeros.

    In a recycled segment only the heads of the torn frame and of `torn_frames` are cleared. No
    other frame after them is stamped for its place. Otherwise padding would hide such a frame from
    a scan, but not from a search for the next frame after any byte (`frame_seek.py`).
    """
    base = segments.bases[-1]
    file = segments.file(base)
    length = file.length()
    if segments.is_recycled(base):
        for one in (offset, *torn_frames):
            position = one - base
            if position < length:
                file.write(position, [bytes(min(FRAME_HEADER_BYTES, length - position))])
    elif offset - base < length:
        file.truncate(offset - base)
        file.allocate(length)
    file.sync()
