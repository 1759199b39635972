"""Reads records from the commit log: many at once, each checked, and sliced only when needed.

The messages of one subject are mostly contiguous, in stretches as long as their frames.
A stretch is read, checked and passed on as one piece, because a step of Python per record would
cost more than the read itself. Callers that need single records slice them afterwards (`Records`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import compress, count
from operator import add, ne
from typing import Final

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.logs.segmented_log import SegmentedLog
from qmq_client.group.queue import Place
from qmq_client.wire.checksum import crc32c
from qmq_client.wire.columns import checksums, first_broken
from qmq_client.wire.deliveries import Records
from qmq_client.wire.record import RECORD_FIXED_BYTES

#: Neighbouring records with a smaller gap than this are read together: a second read costs more.
READ_GAP_BYTES: Final = 16 * 1024
#: The longest single read; bounds the memory of a pull.
READ_BYTES_MAX: Final = 8 * 1024 * 1024


class RecordReader:
    """Reads from one log. Safe for any thread."""

    def __init__(self, log: SegmentedLog) -> None:
        self._log = log

    def read(self, entries: Sequence[Place], subject: str) -> Records:
        """The records of these entries of one subject, each checked; raises `CorruptionError`."""
        if not entries:
            return Records.of([])
        seed = crc32c(subject.encode())
        offsets, lengths, _ = zip(*entries, strict=True)
        ends = list(map(add, offsets, lengths))
        parts: list[bytes | memoryview] = []
        counts = []
        for stretches in self._reads(offsets, ends):
            first_offset = offsets[stretches[0].start]
            data = self._log.read(first_offset, ends[stretches[-1].stop - 1] - first_offset)
            view = memoryview(data)
            for one in stretches:
                first = offsets[one.start] - first_offset
                # A stretch keeps the bytes that were read: they are not copied again.
                after = ends[one.stop - 1] - first_offset
                part = data if len(stretches) == 1 else view[first:after]
                broken = _broken(part, lengths[one.start : one.stop], seed)
                if broken is not None:
                    raise self._corruption(subject, entries[one.start + broken])
                parts.append(part)
                counts.append(len(one))
        return Records(parts, counts, lengths)

    def _reads(self, offsets: Sequence[int], ends: Sequence[int]) -> Iterator[list[range]]:
        """Ranges of indexes to read at once; none crosses a segment."""
        near: list[range] = []
        next_offset = limit = 0
        for begin, after in _stretches(offsets, ends):
            first = begin
            while first < after:
                offset = offsets[first]
                is_near = near and next_offset <= offset <= next_offset + READ_GAP_BYTES
                if not is_near or ends[first] > limit:
                    if near:
                        yield near
                    near, limit = [], self._read_limit(offset)
                fitting = max(first + 1, bisect_right(ends, limit, first, after))
                near.append(range(first, fitting))
                first, next_offset = fitting, ends[fitting - 1]
        yield near

    def _read_limit(self, first: int) -> int:
        """The end of a read that begins at `first`: the segment's end, or the length limit."""
        return min(self._log.base_of(first) + self._log.segment_bytes, first + READ_BYTES_MAX)

    def _corruption(self, subject: str, entry: Place) -> CorruptionError:
        offset, record_bytes, _ = entry
        return CorruptionError(
            segment=self._log.path(offset),
            offset=offset,
            reason=f"the record of subject {subject}, {record_bytes} bytes, was altered since it was sent",
        )


def _stretches(offsets: Sequence[int], ends: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The bounds, as indexes, of stretches of contiguous records."""
    first = 0
    for after in compress(count(1), map(ne, ends, offsets[1:])):
        yield first, after
        first = after
    yield first, len(offsets)


def _broken(part: bytes | memoryview, lengths: Sequence[int], seed: int) -> int | None:
    """The index of the first damaged record; None if all are valid."""
    if len(part) == sum(lengths) and min(lengths) >= RECORD_FIXED_BYTES:
        return first_broken(checksums(part, lengths), seed)
    # A wrong entry, or the end of the file; checking one by one tells which record.
    first = 0
    for index, length in enumerate(lengths):
        record = part[first : first + length]
        is_whole = len(record) == length >= RECORD_FIXED_BYTES
        if not is_whole or first_broken(checksums(record, [length]), seed) is not None:
            return index
        first += length
    return None
