"""The summaries of sealed segments, made in the background.

A segment is summarized when all of it is durable and no more frames can be added. `step` reads a
bounded number of bytes of the first segment without a summary and verifies every frame; so each
byte of the log is read back once after it was written. A damaged segment gets no summary, and
readers search it without one. No failure here stops the broker.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from threading import Lock
from typing import Final

from qmq_broker.errors import CorruptionError, DiskError, NoRoomError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.logs.frame_scan import FrameScan, ScannedFrame
from qmq_broker.storage.logs.frame_seek import LogRange
from qmq_broker.storage.logs.kinds import COMMIT_KINDS
from qmq_broker.storage.logs.segments import Segments
from qmq_broker.storage.logs.summary import (
    SegmentSummary,
    Summarizer,
    read_summary,
    write_summary,
)
from qmq_client.wire.errors import ProtocolError

_log = logging.getLogger(__name__)
#: Summaries kept in memory: one of ten thousand subjects takes a few megabytes.
CACHED_MAX: Final = 8


class Summaries:
    """The summaries of one commit log. `step` belongs to one thread, `find` to any."""

    def __init__(
        self, disk: Disk, segments: Segments, *, store_id: bytes, bounds: Callable[[], LogRange]
    ) -> None:
        """Changes nothing."""
        self._disk = disk
        self._segments = segments
        self._store_id = store_id
        self._bounds = bounds
        self._lock = Lock()
        self._cached: OrderedDict[int, SegmentSummary] = OrderedDict()
        #: Segments that have a summary, or cannot have one.
        self._done: set[int] = set()
        self._work: _Work | None = None
        #: The reason why no summaries are made until the next start; empty while they are made.
        self.fault = ""

    def find(self, base: int) -> SegmentSummary | None:
        """The summary of the segment that begins at `base`; None while there is none."""
        with self._lock:
            known = self._cached.get(base)
        if known is not None:
            return known
        if base + self._segments.segment_bytes > self._bounds().next_offset:
            return None
        try:
            found = read_summary(self._disk, self._segments, base, self._store_id)
        except DiskError:
            return None
        if found is not None:
            with self._lock:
                self._cached[base] = found
                while len(self._cached) > CACHED_MAX:
                    self._cached.popitem(last=False)
        return found

    def step(self, bytes_max: int) -> bool:
        """Continue with one segment for about this many bytes; returns whether there may be more to
        do.

        Never raises because of the disk: without room it does nothing; after a failure it stays off.
        """
        if self.fault:
            return False
        try:
            return self._step(bytes_max)
        except NoRoomError as error:
            _log.debug("summary waits for room: reason=%s", error)
        except DiskError as error:
            self.fault = str(error)
            _log.error("no summaries until the next start: reason=%s", error)
        return False

    def _step(self, bytes_max: int) -> bool:
        work = self._work
        if work is None:
            base = self._next_base()
            if base is None:
                return False
            if self.find(base) is not None:
                self._done.add(base)
                return True
            work = self._work = _Work(self._segments, self._store_id, base)
        try:
            if work.read(bytes_max):
                write_summary(self._disk, work.summarizer.finish())
                self._end(work)
        except (CorruptionError, ProtocolError) as error:
            if work.base >= self._bounds().first_offset:
                path = self._segments.path(work.base)
                _log.warning("segment not summarised: segment=%s reason=%s", path, error)
            self._end(work)
        return True

    def _end(self, work: _Work) -> None:
        self._work = None
        self._done.add(work.base)

    def _next_base(self) -> int | None:
        """The first sealed segment that was not summarized; forgets removed ones."""
        within, segment_bytes = self._bounds(), self._segments.segment_bytes
        gone = {base for base in self._done if base < within.first_offset}
        if gone or not self._done:
            self._remove_below(within.first_offset)
            self._done -= gone
        for base in range(
            within.first_offset, within.next_offset - segment_bytes + 1, segment_bytes
        ):
            if base not in self._done:
                return base
        return None

    def _remove_below(self, offset: int) -> None:
        """Remove summaries of segments that are gone, and drafts that a crash left."""
        for name in self._disk.names(layout.SUMMARIES):
            base = layout.parse_number(name.removesuffix(layout.DRAFT_SUFFIX))
            if base is not None and base < offset:
                self._disk.unlink(f"{layout.SUMMARIES}/{name}")
                with self._lock:
                    self._cached.pop(base, None)


class _Work:
    """The work on one segment."""

    def __init__(self, segments: Segments, store_id: bytes, base: int) -> None:
        self.base = base
        self.summarizer = Summarizer(store_id, base, segments.segment_bytes)
        self._next_offset = base + segments.segment_bytes
        self._scan = FrameScan(segments, COMMIT_KINDS, store_id=store_id, first_offset=base)
        self._frames: Iterator[ScannedFrame] = iter(self._scan)

    def read(self, bytes_max: int) -> bool:
        """Read the next bytes, up to this many; returns whether the end of the segment was reached.

        Raises `ProtocolError` or `CorruptionError` where it is damaged.
        """
        until = min(self._next_offset, self._scan.next_offset + bytes_max)
        while self._scan.next_offset < until:
            frame = next(self._frames, None)
            if frame is None:
                raise ProtocolError(f"offset {self._scan.next_offset}: {self._scan.reason}")
            self.summarizer.add(frame)
        return self._scan.next_offset >= self._next_offset
