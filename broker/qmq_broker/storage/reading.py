"""Reading records back from the commit log: many at once, each checked, none cut out without need.

The messages of one subject mostly lie back to back, in stretches as long as the frame they came in.
A stretch is read, checked and passed on as one piece, because one step of Python per record would
cost more than the read itself. Callers that look at single records cut them out afterwards
(`Records`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, compress, count
from operator import add, ne
from typing import Final, overload

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.logs.segmented_log import SegmentedLog
from qmq_broker.storage.queues.consume_queue import Place
from qmq_client.wire.checksum import crc32c
from qmq_client.wire.columns import checksums, first_broken
from qmq_client.wire.record import RECORD_FIXED_BYTES

#: Neighbouring records with a smaller gap than this are read together: a second read costs more.
READ_GAP_BYTES: Final = 16 * 1024
#: The longest single read; bounds the memory of a pull.
READ_BYTES_MAX: Final = 8 * 1024 * 1024


class Records(Sequence[bytes]):
    """Encoded records in the order they were asked for; single records are cut out only when taken."""

    __slots__ = ("_counts", "lengths", "parts")

    def __init__(
        self, parts: Sequence[bytes | memoryview], counts: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Requires: each part holds as many records, back to back, as its count says."""
        #: Together, the bytes of all records.
        self.parts = parts
        self._counts = counts
        #: The length of each record.
        self.lengths = lengths

    @classmethod
    def of(cls, records: Sequence[bytes]) -> Records:
        """These records, each as a part of its own."""
        return cls(records, [1] * len(records), list(map(len, records)))

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[bytes]:
        for part, lengths in self._stretches():
            first = 0
            for length in lengths:
                yield bytes(part[first : first + length])
                first += length

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        return list(self)[index]

    def column(self, place: int) -> bytes:
        """The byte at `place` of each record. Requires: every record is long enough."""
        cut = []
        for part, lengths in self._stretches():
            if _is_even(lengths):
                cut.append(bytes(part[place :: lengths[0]]))
            else:
                positions = accumulate(lengths[:-1], initial=place)
                cut.append(bytes([part[position] for position in positions]))
        return b"".join(cut)

    def _stretches(self) -> Iterator[tuple[bytes | memoryview, Sequence[int]]]:
        first = 0
        for part, records in zip(self.parts, self._counts, strict=True):
            yield part, self.lengths[first : first + records]
            first += records


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
                # A stretch stays the bytes that were read: nobody has to copy them again.
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
        """Where a read that begins at `first` must stop: at its segment's end, or its bound."""
        return min(self._log.base_of(first) + self._log.segment_bytes, first + READ_BYTES_MAX)

    def _corruption(self, subject: str, entry: Place) -> CorruptionError:
        offset, record_bytes, _ = entry
        return CorruptionError(
            segment=self._log.path(offset),
            offset=offset,
            reason=f"the record of subject {subject}, {record_bytes} bytes, is not as it was sent",
        )


def _stretches(offsets: Sequence[int], ends: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The bounds, as indexes, of stretches of records that lie back to back."""
    first = 0
    for after in compress(count(1), map(ne, ends, offsets[1:])):
        yield first, after
        first = after
    yield first, len(offsets)


def _broken(part: bytes | memoryview, lengths: Sequence[int], seed: int) -> int | None:
    """The index of the first record that is not whole; None if all are."""
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


def _is_even(lengths: Sequence[int]) -> bool:
    return lengths.count(lengths[0]) == len(lengths)
