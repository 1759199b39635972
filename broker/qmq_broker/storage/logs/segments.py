"""The files of one append-only log: segments of equal length, each named by its first offset.

::

    <log>/00000000000000000000    SEGMENT_HEAD frame, frames …, PADDING frame to the end
    <log>/00000000001073741824    SEGMENT_HEAD frame, frames …, zeros that were allocated ahead

Body of a SEGMENT_HEAD frame, 32 bytes big-endian: store id 16, base offset 8, flags 1, made at 7
(ms since 1970 UTC). It reveals a segment of another store, or one under a wrong name. A frame never
crosses a segment. It is written only where it either ends with the segment or leaves room for the
header of a PADDING frame, so a sealed segment consists of frames from its first to its last byte.

A deleted segment may be kept as a spare and used again under another name: overwriting blocks that
the disk has already allocated is several times faster than allocating new ones. Flag 1 marks such a
segment: after its last frame there are old frames instead of zeros. Scans ignore them, because they
were stamped for other offsets.

Not for: the content of frames. Other files next to the segments are not touched.
"""

from __future__ import annotations

import struct
from bisect import bisect_right, insort
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.files.disk_port import Disk, DiskFile
from qmq_broker.storage.files.layout import (
    draft_path,
    parse_number,
    parse_spare,
    segment_path,
    spare_path,
)
from qmq_broker.storage.files.small_file import open_draft
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import (
    FRAME_HEADER_BYTES,
    FrameKind,
    build_frame,
    read_header,
    verify_body,
    verify_stamp,
)

_HEAD_BODY: Final = struct.Struct(">16sQQ")
_RECYCLED: Final = 1 << 56  # flags and time as one number
_TIME_MASK: Final = _RECYCLED - 1
#: The lock where there is only one thread.
_NO_LOCK: Final = nullcontext()
#: Bytes copied at a time when a shared segment gets a separate file.
_COPIED_BYTES: Final = 1024 * 1024
SEGMENT_HEAD_BYTES: Final = FRAME_HEADER_BYTES + _HEAD_BODY.size


class Segments:
    """Open files of one log. Reads may come from any thread, everything else from its writer."""

    def __init__(
        self, disk: Disk, directory: str, segment_bytes: int, *, only: int | None = None
    ) -> None:
        """Opens all segments, or `only` the one that begins there; changes nothing."""
        self.disk = disk
        self.directory = directory
        self.segment_bytes = segment_bytes
        self._files: dict[int, DiskFile] = {}
        #: Segments taken out of the log whose files still exist, oldest first.
        self._given_up: deque[tuple[int, DiskFile]] = deque()
        #: Base offsets in order.
        self.bases: list[int] = []
        #: Numbers of the spare segments.
        self.spares: list[int] = []
        for name in disk.names(directory):
            base, spare = parse_number(name), parse_spare(name)
            if base is not None and base % segment_bytes == 0 and only in (None, base):
                self._add(base, disk.open(segment_path(directory, base)))
            elif spare is not None:
                self.spares.append(spare)

    def path(self, offset: int) -> str:
        """The segment that holds `offset`, for reports."""
        return segment_path(self.directory, self.base_of(offset))

    def base_of(self, offset: int) -> int:
        """Where the segment that holds `offset` begins."""
        return offset - offset % self.segment_bytes

    def has(self, base: int) -> bool:
        """Whether there is a segment that begins at `base`."""
        return base in self._files

    def file(self, base: int) -> DiskFile:
        """The segment that begins at `base`."""
        return self._files[base]

    def bases_from(self, offset: int) -> list[int]:
        """The segments that hold `offset` or anything after it."""
        bases = self.bases.copy()  # read at one moment: the writer may take segments out meanwhile
        return bases[bisect_right(bases, offset - self.segment_bytes) :]

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes of one segment; fewer at its end, none if there is no segment."""
        base = self.base_of(offset)
        file = self._files.get(base)
        if file is None:
            return b""
        return file.read(offset - base, min(count, base + self.segment_bytes - offset))

    def data_from(self, offset: int) -> int:
        """The offset of the next byte of the segment that may be non-zero; its end if there is none."""
        base = self.base_of(offset)
        file = self._files.get(base)
        return offset if file is None else base + file.data_from(offset - base)

    def make(self, base: int, length: int, head: bytes) -> None:
        """Create a segment of `length` bytes that begins with `head`; durable on return."""
        file = self.disk.open(segment_path(self.directory, base), is_new=True)
        try:
            file.allocate(length)
            file.write(0, [head])
            file.sync()
            self.disk.sync_directory(self.directory)
        except BaseException:
            file.close()
            raise
        self._add(base, file)

    def adopt(self, base: int, head: bytes) -> bool:
        """Turn a spare into a new segment that begins with `head`; durable on return.

        Returns False and drops the spare if a backup shares the file, which must not be
        overwritten. Requires: there is a spare. Until the last step the file is a spare like any
        other.
        """
        number = self.spares[-1]
        file = self.disk.open(spare_path(self.directory, number))
        try:
            if file.links() > 1:
                self.disk.unlink(spare_path(self.directory, number))
                self.spares.pop()
                file.close()
                return False
            file.write(0, [head])
            file.sync()
            self.disk.rename(spare_path(self.directory, number), segment_path(self.directory, base))
            self.disk.sync_directory(self.directory)
        except BaseException:
            file.close()
            raise
        self.spares.pop()
        self._add(base, file)
        return True

    def unshare(self, base: int) -> None:
        """Give a segment whose file a backup shares a separate file, durably, so that it can be written.

        Until then the shared one is the segment. Raises `NoRoomError`, which leaves only a draft next to it.
        """
        shared, path = self._files[base], segment_path(self.directory, base)
        if shared.links() == 1:
            return
        draft = draft_path(path)
        own = open_draft(self.disk, draft)
        try:
            own.truncate(0)
            for position in range(0, shared.length(), _COPIED_BYTES):
                own.write(position, [shared.read(position, _COPIED_BYTES)])
            own.sync()
        finally:
            own.close()
        self.disk.rename(draft, path)
        self.disk.sync_directory(self.directory)
        self._files[base] = self.disk.open(path)
        shared.close()

    def add_spare(self, path: str) -> None:
        """Make a spare of a file in this directory that is not in use.

        Durable after the next sync of the directory, or when it becomes a segment.
        """
        number = max(self.spares, default=-1) + 1
        self.disk.rename(path, spare_path(self.directory, number))
        self.spares.append(number)

    def remove_spare(self) -> None:
        """Remove a spare; after a crash it may reappear. Requires: there is one."""
        self.disk.unlink(spare_path(self.directory, self.spares[-1]))
        self.spares.pop()

    def give_up(self, base: int) -> None:
        """Take a whole segment out of the log; its file stays until `put_away`."""
        self.bases.remove(base)
        self._given_up.append((base, self._files.pop(base)))

    def put_away(self, *, spares_max: int, lock: AbstractContextManager[object] = _NO_LOCK) -> None:
        """Remove the files of segments that were taken out, or keep up to `spares_max` of them as spares.

        Oldest first, and each durably before the next: the beginning of the action log is not
        recorded elsewhere, so a power cut must not leave a gap. Takes as long as the disk needs, in
        one thread at a time; `lock` is held only while a spare is added. A reader inside such a
        file keeps it until its read ends.
        """
        while self._given_up:
            base, file = self._given_up[0]
            path = segment_path(self.directory, base)
            # A segment that was closed early because of long frames becomes a spare too; it is extended again.
            is_worth_it = file.length() * 2 >= self.segment_bytes
            with lock:
                is_kept = is_worth_it and len(self.spares) < spares_max
                if is_kept:
                    self.add_spare(path)
            if not is_kept:
                self.disk.unlink(path)
            self._given_up.popleft()
            self.disk.sync_directory(self.directory)

    def is_recycled(self, base: int) -> bool:
        """Whether this segment was a spare, so that old frames follow its last one."""
        return bool(self._flags_and_time(base) & _RECYCLED)

    def made_at_ms(self, base: int) -> int:
        """When this segment was created; 0 if it does not exist or has no valid head."""
        return self._flags_and_time(base) & _TIME_MASK

    def _flags_and_time(self, base: int) -> int:
        body = self.read(base + FRAME_HEADER_BYTES, _HEAD_BODY.size)
        return int(_HEAD_BODY.unpack(body)[2]) if len(body) == _HEAD_BODY.size else 0

    def remove(self, base: int) -> None:
        """Remove a segment; durable after the next sync of the directory."""
        self.bases.remove(base)
        self._files.pop(base).close()
        self.disk.unlink(segment_path(self.directory, base))

    def close(self) -> None:
        """Close all files. Safe to call twice."""
        given_up = (file for _, file in self._given_up)
        for file in (*self._files.values(), *given_up):
            file.close()
        self._files.clear()
        self._given_up.clear()
        self.bases.clear()

    def _add(self, base: int, file: DiskFile) -> None:
        self._files[base] = file
        insort(self.bases, base)


def build_segment_head(
    store_id: bytes, base: int, made_at_ms: int, *, is_recycled: bool = False
) -> bytes:
    """The first frame of a segment, not yet stamped."""
    flags_and_time = made_at_ms & _TIME_MASK | (_RECYCLED if is_recycled else 0)
    return build_frame(FrameKind.SEGMENT_HEAD, _HEAD_BODY.pack(store_id, base, flags_and_time))


def store_of_head(data: bytes, base: int) -> bytes | None:
    """The store that the head of a segment names; None if it is not a valid head for this place."""
    try:
        header = read_header(data)
        verify_stamp(header, data[: header.head_bytes])
        verify_body(header, data)
    except ProtocolError:
        return None
    if header.kind is not FrameKind.SEGMENT_HEAD or len(data) != SEGMENT_HEAD_BYTES:
        return None
    store_id, found_base, _ = _HEAD_BODY.unpack(data[FRAME_HEADER_BYTES:])
    return bytes(store_id) if found_base == base else None


def check_segment_head(frame: bytes, *, store_id: bytes, segment: str, base: int) -> None:
    """Raise `CorruptionError` if a verified head belongs to another store or another place."""
    body = frame[FRAME_HEADER_BYTES:]
    if len(body) != _HEAD_BODY.size:
        raise CorruptionError(
            segment=segment, offset=base, reason="the segment head has the wrong length"
        )
    found_id, found_base, _ = _HEAD_BODY.unpack(body)
    if found_id != store_id:
        reason = f"segment of store {found_id.hex()}; this is store {store_id.hex()}"
        raise CorruptionError(segment=segment, offset=base, reason=reason)
    if found_base != base:
        raise CorruptionError(
            segment=segment, offset=base, reason=f"segment of offset {found_base}"
        )
