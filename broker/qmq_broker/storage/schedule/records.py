"""Reading the records of delayed messages: from the commit log, or from the schedule log of their bucket.

Many are read at once when they are released: neighbours with one read, in the order of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.files import layout
from qmq_broker.storage.logs.segments import Segments
from qmq_broker.storage.schedule.columns import IN_SCHEDULE
from qmq_broker.storage.schedule.files import ScheduleFiles
from qmq_client.wire.checksum import crc32c, extend_crc32c
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.record import record_crc, verify_record

#: What stands between two records is read with them when it is no more: cheaper than one more read.
_GAP_BYTES: Final = 2_048
#: Bytes of one read.
_READ_BYTES_MAX: Final = 1024 * 1024
_CRC_BYTES: Final = 4


class Wanted(Protocol):
    """A record that is to be read: any of the tuples that say where one stands."""

    @property
    def sequence(self) -> int:
        """Its place among those of its bucket."""
        ...

    @property
    def place(self) -> int:
        """As of `DelayedMessage`."""
        ...

    @property
    def record_bytes(self) -> int:
        """Its length."""
        ...


class ScheduleRecords:
    """The records of one schedule; for any thread."""

    def __init__(
        self, files: ScheduleFiles, commit: Segments, find_copy: Callable[[int, int], int]
    ) -> None:
        """`find_copy` says where the schedule log of a bucket has this sequence."""
        self._files = files
        self._commit = commit
        self._find_copy = find_copy

    def read(self, bucket: int, subject: str, wanted: Wanted) -> bytes:
        """One record, verified; raises `CorruptionError`."""
        place, record_bytes = wanted.place, wanted.record_bytes
        data = self._read(bucket, place, record_bytes)
        if not data and not place & IN_SCHEDULE:
            # Its commit log segment went while it was known by its place there.
            place = self._find_copy(bucket, wanted.sequence)
            data = self._read(bucket, place, record_bytes)
        try:
            verify_record(subject, data)
        except ProtocolError as error:
            raise CorruptionError(
                segment=layout.bucket_path(layout.SCHEDULE, bucket),
                offset=place & ~IN_SCHEDULE,
                reason=f"no whole record of subject {subject}: {error}",
            ) from error
        return data

    def read_all(
        self, bucket: int, subject: str, wanted: Sequence[Wanted]
    ) -> list[bytes | CorruptionError]:
        """All of these of one bucket and subject, verified, in their order; one that cannot be read is its error."""
        found: list[bytes | CorruptionError] = [b""] * len(wanted)
        seed = crc32c(subject.encode())
        for run in _neighbours(wanted):
            first, last = wanted[run[0]].place, wanted[run[-1]]
            data = self._read(bucket, first, last.place + last.record_bytes - first)
            for index in run:
                one = wanted[index]
                position, record_bytes = one.place - first, one.record_bytes
                record = data[position : position + record_bytes]
                is_there = len(record) == record_bytes > _CRC_BYTES
                if is_there and extend_crc32c(seed, record[_CRC_BYTES:]) == record_crc(record):
                    found[index] = record
                    continue
                try:
                    found[index] = self.read(bucket, subject, one)
                except CorruptionError as error:
                    found[index] = error
        return found

    def _read(self, bucket: int, place: int, count: int) -> bytes:
        if place & IN_SCHEDULE:
            return self._files.read(layout.SCHEDULE, bucket, place & ~IN_SCHEDULE, count)
        return self._commit.read(place, count)


def _neighbours(wanted: Sequence[Wanted]) -> Iterator[list[int]]:
    """Indexes in the order of the places, those together that one read gives."""
    places = [one.place for one in wanted]
    run: list[int] = []
    first = near = 0
    for index in sorted(range(len(places)), key=places.__getitem__):
        place, record_bytes = places[index], wanted[index].record_bytes
        if place > near or place + record_bytes - first > _READ_BYTES_MAX:
            if run:
                yield run
            run, first = [], place
        run.append(index)
        near = place + record_bytes + _GAP_BYTES
    if run:
        yield run
