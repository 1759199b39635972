"""An append-only log of frames: offsets, stamps, segments, and the durable end.

`append` writes with one gathering write, `sync` makes all earlier appends durable with one sync. In
between, the operating system has the bytes, but perhaps not the disk. Segments are described in
`segments.py`, the frame in `qmq_client.wire.frame`.

Space is allocated before any write: on a full disk, or in a process that may open no more files,
the whole append is refused and the log continues. The first failed write or sync poisons the log
permanently: the content of the disk is unknown, and a second attempt may succeed without storing
the bytes. Only a restart, which verifies and rewrites the tail, can be trusted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from threading import Lock

from qmq_broker.errors import DiskError, DiskFullError, NoRoomError, PoisonedError, disk_full
from qmq_broker.options import SEGMENT_MULTIPLE_BYTES
from qmq_broker.storage.files.checkpoint import LogPoint
from qmq_broker.storage.logs.log_recovery import LogFinding
from qmq_broker.storage.logs.segments import SEGMENT_HEAD_BYTES, Segments, build_segment_head
from qmq_client.clock import Clock
from qmq_client.wire.frame import FRAME_HEADER_BYTES, build_padding, stamp_frame

#: A frame, and the first sequence of each of its subjects.
Draft = tuple[bytes, Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """The space settings of a log, and the store and epoch in its frames."""

    store_id: bytes
    #: Stamped on every frame that this process writes.
    epoch: int
    growth_bytes: int
    #: No more space is allocated below this free space.
    reserve_bytes: int
    #: How many deleted segments are kept as spares.
    spare_segments: int = 0


class SegmentedLog:
    """One log, recovered and open for appending.

    `append` belongs to one thread. `sync` may run in another one at the same time; it covers
    appends before it began. `read` may run in any thread. Invariant: `durable_offset` ≤
    `written_offset`, and neither ever decreases.
    """

    def __init__(
        self, segments: Segments, clock: Clock, settings: LogSettings, finding: LogFinding
    ) -> None:
        """Requires: the segments were repaired according to `finding`."""
        self._segments = segments
        self._clock = clock
        self._settings = settings
        self._lock = Lock()
        self._poison: str | None = None
        self._allocated = {base: segments.file(base).length() for base in segments.bases[-1:]}
        #: The end of the last frame handed to the operating system.
        self.written_offset = finding.next_offset
        #: The stamp of the last append.
        self.last_stored_at_ms = finding.last_stored_at_ms
        self._last_frame_offset = finding.last_frame_offset
        self._durable = self._written_point()

    @property
    def durable_offset(self) -> int:
        """Bytes below this survive a power cut."""
        return self._durable.durable_offset

    @property
    def durable_point(self) -> LogPoint:
        """The durable end of the log, for the checkpoint."""
        return self._durable

    @property
    def poison(self) -> str | None:
        """The reason why nothing is written any more; None while the log is healthy."""
        return self._poison

    @property
    def frame_bytes_max(self) -> int:
        """The longest frame that a segment can hold."""
        return self._segments.segment_bytes - SEGMENT_HEAD_BYTES - FRAME_HEADER_BYTES

    def append(self, drafts: Sequence[Draft]) -> list[int]:
        """Stamp frames and append them; returns their offsets.

        Written on return, not durable. Raises `NoRoomError` with nothing written, or
        `PoisonedError`.
        """
        with self._lock:
            self._check_poison()
            sizes = [len(frame) for frame, _ in drafts]
            if max(sizes, default=0) > self.frame_bytes_max:
                raise ValueError(f"frame of {max(sizes)} bytes; allowed: {self.frame_bytes_max}")
            stored_at_ms = max(self._clock.now_ms(), self.last_stored_at_ms)
            offsets = self._offsets_ahead(sizes)
            if offsets is None:
                offsets = self._place(sizes)
                self._make_room(offsets, sizes, stored_at_ms)
            self.last_stored_at_ms = stored_at_ms
            self._write(drafts, offsets)
            return offsets

    def sync(self) -> None:
        """Make all earlier appends durable: one sync of one file."""
        with self._lock:
            self._check_poison()
            point = self._written_point()
            if point.durable_offset == self._durable.durable_offset:
                return
            file = self._segments.file(self._segments.base_of(point.last_frame_offset))
        try:
            file.sync()
        except (DiskError, NoRoomError) as error:
            raise self._poisoned("sync", error) from error
        with self._lock:
            if point.durable_offset > self._durable.durable_offset:
                self._durable = point

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset` of one segment; fewer at its end."""
        return self._segments.read(offset, count)

    def data_from(self, offset: int) -> int:
        """The offset of the next byte of the segment that may be non-zero; its end if there is none."""
        return self._segments.data_from(offset)

    @property
    def segment_bytes(self) -> int:
        """Length of a full segment."""
        return self._segments.segment_bytes

    def base_of(self, offset: int) -> int:
        """Where the segment that holds `offset` begins."""
        return self._segments.base_of(offset)

    def path(self, offset: int) -> str:
        """The segment that holds `offset`, for reports."""
        return self._segments.path(offset)

    def bases(self) -> list[int]:
        """Where the segments begin, in order."""
        return list(self._segments.bases)

    def made_at_ms(self, base: int) -> int:
        """When the segment at `base` was created; 0 if it no longer exists."""
        return self._segments.made_at_ms(base)

    def give_up_below(self, offset: int) -> int:
        """Take the segments that end at or below `offset` out of the log; returns how many.

        Their files stay.

        Requires: it is durably recorded that nothing below is needed, and the last segment is not
        among them. Raises `PoisonedError`.
        """
        with self._lock:
            self._check_poison()
            bases = [base for base in self._segments.bases if base + self.segment_bytes <= offset]
            for base in bases:
                self._segments.give_up(base)
            return len(bases)

    def put_away(self) -> None:
        """Remove the files of segments that were taken out; some become spares. Durable on return.

        Call it in one thread at a time: no append waits for it, though it may take long. Raises
        `PoisonedError`.
        """
        with self._poisoning("removal of a segment"):
            self._segments.put_away(spares_max=self._settings.spare_segments, lock=self._lock)

    @property
    def spare_count(self) -> int:
        """How many spare segments there are."""
        return len(self._segments.spares)

    def add_spare(self, path: str) -> None:
        """Add a spare file, from any thread; it becomes the next segment when this one is full.

        Raises `NoRoomError`, and `PoisonedError` if the names of the log may not be durable.
        """
        try:
            with self._lock:
                self._check_poison()
                self._segments.add_spare(path)
            # Outside the lock: no commit waits for it, and losing this name is harmless.
            self._segments.disk.sync_directory(self._segments.directory)
        except DiskError as error:
            raise self._poisoned("spare", error) from error

    def remove_spare(self) -> bool:
        """Remove a spare, from any thread; returns whether there was one."""
        with self._lock:
            self._check_poison()
            if not self._segments.spares:
                return False
            self._segments.remove_spare()
            return True

    def close(self) -> None:
        """Close the files without syncing. Safe to call twice."""
        self._segments.close()

    def _offsets_ahead(self, sizes: Sequence[int]) -> list[int] | None:
        """The offsets of frames of these lengths, if there is space for all of them, which is the common case."""
        *offsets, after = accumulate(sizes, initial=self.written_offset)
        position = self.written_offset % self._segments.segment_bytes
        room_bytes = self._allocated.get(self.written_offset - position, 0) - position
        # A segment that is just full, or just created, is left to `_place`.
        is_ahead = position and after - self.written_offset + FRAME_HEADER_BYTES <= room_bytes
        return offsets if is_ahead else None

    def _place(self, sizes: Sequence[int]) -> list[int]:
        """The offsets of frames of these lengths; none crosses a segment."""
        segment_bytes = self._segments.segment_bytes
        offset, offsets = self.written_offset, []
        for size in sizes:
            position = offset % segment_bytes or SEGMENT_HEAD_BYTES
            offset = self._segments.base_of(offset) + position
            room_bytes = segment_bytes - position
            if size != room_bytes and size + FRAME_HEADER_BYTES > room_bytes:
                offset += room_bytes + SEGMENT_HEAD_BYTES
            offsets.append(offset)
            offset += size
        return offsets

    def _make_room(self, offsets: Sequence[int], sizes: Sequence[int], stored_at_ms: int) -> None:
        """Allocate space for these frames, and for the padding that ends a segment."""
        segment_bytes = self._segments.segment_bytes
        needed: dict[int, int] = {}
        if self.written_offset % segment_bytes:
            base = self._segments.base_of(self.written_offset)
            needed[base] = self.written_offset - base
        for offset, size in zip(offsets, sizes, strict=True):
            base = self._segments.base_of(offset)
            needed[base] = offset - base + size
        newest = max(needed, default=0)
        for base, length in needed.items():
            padding_bytes = 0 if base == newest else FRAME_HEADER_BYTES
            padded = min(length + padding_bytes, segment_bytes)
            if padded > self._allocated.get(base, 0):
                self._grow(base, padded, stored_at_ms)

    def _grow(self, base: int, length: int, stored_at_ms: int) -> None:
        """Allocate in large steps; if the disk has no room for that, only what is needed.

        If that fails too, spares are removed, because they only serve speed.
        """
        wanted, needed = (
            min(self._segments.segment_bytes, -(-length // step) * step)
            for step in (self._settings.growth_bytes, SEGMENT_MULTIPLE_BYTES)
        )
        while True:
            try:
                self._take(base, wanted, stored_at_ms)
                return
            except DiskFullError:
                if wanted > needed:
                    wanted = needed
                elif self._segments.spares:
                    with self._poisoning("removal of a spare"):
                        self._segments.remove_spare()
                else:
                    raise

    def _take(self, base: int, grown: int, stored_at_ms: int) -> None:
        segments = self._segments
        try:
            while not segments.has(base) and segments.spares:
                if segments.adopt(base, self._head(base, stored_at_ms, is_recycled=True)):
                    self._allocated[base] = segments.file(base).length()
            more_bytes = grown - self._allocated.get(base, 0)
            if more_bytes <= 0:
                return
            self._check_reserve(more_bytes)
            if segments.has(base):
                segments.file(base).allocate(grown)
            else:
                segments.make(base, grown, self._head(base, stored_at_ms))
        except DiskError as error:
            raise self._poisoned("growth", error) from error
        self._allocated[base] = grown

    def _check_reserve(self, count: int) -> None:
        reserve_bytes = self._settings.reserve_bytes
        if not reserve_bytes:
            return
        free_bytes = self._segments.disk.free_bytes()
        if free_bytes - count < reserve_bytes:
            raise disk_full(free_bytes=free_bytes, needed_bytes=count, reserve_bytes=reserve_bytes)

    def _head(self, base: int, stored_at_ms: int, *, is_recycled: bool = False) -> bytes:
        store_id = self._settings.store_id
        head = build_segment_head(store_id, base, stored_at_ms, is_recycled=is_recycled)
        return self._stamped(head, base, (), stored_at_ms) + head[FRAME_HEADER_BYTES:]

    def _write(self, drafts: Sequence[Draft], offsets: Sequence[int]) -> None:
        """One gathering write per segment: one in total, except for a roll."""
        parts: list[bytes | memoryview] = []
        first = next_offset = self.written_offset
        last = self._last_frame_offset
        for (frame, first_sequences), offset in zip(drafts, offsets, strict=True):
            if offset != next_offset:
                self._put(first, parts, last)
                self._roll(self._segments.base_of(offset))
                first, parts = offset, []
            head = self._stamped(frame, offset, first_sequences, self.last_stored_at_ms)
            parts += (head, memoryview(frame)[len(head) :])
            last, next_offset = offset, offset + len(frame)
        self._put(first, parts, last)

    def _put(self, offset: int, parts: Sequence[bytes | memoryview], last: int) -> None:
        """Write frames, the last of them at `last`; readers may look for them only afterwards."""
        if parts:
            self._flush(offset, parts)
            self._last_frame_offset = last
            self.written_offset = offset + sum(map(len, parts))

    def _flush(self, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        base = self._segments.base_of(offset)
        try:
            self._segments.file(base).write(offset - base, parts)
        except (DiskError, NoRoomError) as error:
            raise self._poisoned("write", error) from error

    def _roll(self, base: int) -> None:
        """Seal the segment before `base` and continue after the head of the new one.

        Requires: the new segment exists and is durable.
        """
        if self.written_offset % self._segments.segment_bytes:
            offset = self.written_offset
            padding = build_padding(base - offset)
            head = self._stamped(padding, offset, (), self.last_stored_at_ms)
            self._flush(offset, [head])
        sealed = base - self._segments.segment_bytes
        if self._segments.has(sealed):
            with self._poisoning("sync"):
                self._segments.file(sealed).sync()
        self._last_frame_offset = base
        self.written_offset = base + SEGMENT_HEAD_BYTES
        self._durable = self._written_point()
        self._allocated = {key: size for key, size in self._allocated.items() if key >= base}

    def _stamped(
        self, frame: bytes, offset: int, first_sequences: Sequence[int], stored_at_ms: int
    ) -> bytes:
        return stamp_frame(
            frame,
            physical_offset=offset,
            stored_at_ms=stored_at_ms,
            epoch=self._settings.epoch,
            durable_offset=self.durable_offset,
            first_sequences=first_sequences,
        )

    def _written_point(self) -> LogPoint:
        return LogPoint(
            durable_offset=self.written_offset,
            last_frame_offset=self._last_frame_offset,
            last_stored_at_ms=self.last_stored_at_ms,
        )

    def _check_poison(self) -> None:
        if self._poison is not None:
            raise PoisonedError(f"nothing is written since {self._poison}. Restart the broker.")

    @contextmanager
    def _poisoning(self, what: str) -> Iterator[None]:
        try:
            yield
        except (DiskError, NoRoomError) as error:
            raise self._poisoned(what, error) from error

    def _poisoned(self, what: str, error: Exception) -> PoisonedError:
        self._poison = f"a failed {what} of {self._segments.directory}: {error}"
        return PoisonedError(f"{self._poison}. Restart the broker.")
