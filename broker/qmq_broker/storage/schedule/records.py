"""Reading the records of delayed messages, from the commit log or from the schedule log of their
bucket.

Many are read together when they are released: neighbours with one read, in the order of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from qmq_broker.errors import CorruptionError, DiskError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import DiskFile
from qmq_broker.storage.logs.segments import Segments
from qmq_broker.storage.schedule.columns import IN_SCHEDULE
from qmq_broker.storage.schedule.files import ScheduleFiles
from qmq_client.wire.checksum import crc32c
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.record import record_crc, verify_record

#: A smaller gap than this between two records is read with them: cheaper than one more read.
_GAP_BYTES: Final = 2_048
#: Bytes of one read.
_READ_BYTES_MAX: Final = 1024 * 1024
_CRC_BYTES: Final = 4


class Wanted(Protocol):
    """Columns of messages of one bucket: those of the schedule, or of the wheel."""

    @property
    def sequences(self) -> Sequence[int]:
        """The sequence of each within its bucket."""
        ...

    @property
    def places(self) -> Sequence[int]:
        """As in `DelayedMessage`."""
        ...

    @property
    def record_bytes(self) -> Sequence[int]:
        """The length of each."""
        ...


class ScheduleRecords:
    """The records of one schedule; for any thread."""

    def __init__(
        self, files: ScheduleFiles, commit: Segments, find_copy: Callable[[int, int], int]
    ) -> None:
        """`find_copy` gives the place of this sequence in the schedule log of a bucket."""
        self._files = files
        self._commit = commit
        self._find_copy = find_copy

    def read(self, bucket: int, subject: str, sequence: int, place: int, count: int) -> bytes:
        """One record of `count` bytes, verified; raises `CorruptionError` if it cannot be read."""
        try:
            data = self._read(bucket, place, count)
            if not data and not place & IN_SCHEDULE:
                # Its commit log segment was removed while it was known by its place there.
                place = self._find_copy(bucket, sequence)
                data = self._read(bucket, place, count)
            verify_record(subject, data)
        except (ProtocolError, DiskError) as error:
            is_copied = bool(place & IN_SCHEDULE)
            path = layout.bucket_path(layout.SCHEDULE, bucket)
            raise CorruptionError(
                segment=path if is_copied else self._commit.path(place),
                offset=place & ~IN_SCHEDULE,
                reason=f"no whole record of subject {subject}: {error}",
            ) from error
        return data

    def read_all(
        self, bucket: int, subject: str, wanted: Wanted, indexes: Sequence[int]
    ) -> dict[int, bytes | CorruptionError]:
        """These messages, all of one bucket and subject, verified; an unreadable one is replaced by
        its error.

        Requires: at least one, and together no more than memory may hold.
        """
        places, sizes = wanted.places, wanted.record_bytes
        order = sorted(indexes, key=places.__getitem__)
        records: list[bytes] = []
        with self._files.opened(layout.SCHEDULE, bucket) as file:
            for begin, after, count in _neighbours(order, places, sizes):
                first = places[order[begin]]
                data = self._read_run(file, first, count)
                if after - begin == 1:
                    records.append(data)
                else:
                    run = [(places[index] - first, sizes[index]) for index in order[begin:after]]
                    records += [data[position : position + size] for position, size in run]
        seed = crc32c(subject.encode())
        found: dict[int, bytes | CorruptionError] = dict(zip(order, records, strict=True))
        broken = [
            index
            for index, record in zip(order, records, strict=True)
            if not len(record) == sizes[index] > _CRC_BYTES
            or crc32c(record[_CRC_BYTES:], seed) != record_crc(record)
        ]
        for index in broken:
            found[index] = self._alone(bucket, subject, wanted, index)
        return found

    def _read_run(self, file: DiskFile | None, first: int, count: int) -> bytes:
        """The records of a run of neighbours; fewer or none where each must be read by itself."""
        try:
            if not first & IN_SCHEDULE:
                return self._commit.read(first, count)
            return b"" if file is None else file.read(first & ~IN_SCHEDULE, count)
        except DiskError:  # a neighbour of a bad sector can still be read
            return b""

    def _alone(
        self, bucket: int, subject: str, wanted: Wanted, index: int
    ) -> bytes | CorruptionError:
        sequence, place = wanted.sequences[index], wanted.places[index]
        try:
            return self.read(bucket, subject, sequence, place, wanted.record_bytes[index])
        except CorruptionError as error:
            return error

    def _read(self, bucket: int, place: int, count: int) -> bytes:
        if place & IN_SCHEDULE:
            return self._files.read(layout.SCHEDULE, bucket, place & ~IN_SCHEDULE, count)
        return self._commit.read(place, count)


def _neighbours(
    order: Sequence[int], places: Sequence[int], sizes: Sequence[int]
) -> list[tuple[int, int, int]]:
    """The half open range of indexes that one read covers, in order of place, and its length."""
    runs: list[tuple[int, int, int]] = []
    begin = first = near = end = 0
    for at, index in enumerate(order):
        place = places[index]
        after = place + sizes[index]
        if place > near or after - first > _READ_BYTES_MAX:
            if at:
                runs.append((begin, at, end - first))
            begin, first = at, place
        end = after
        near = end + _GAP_BYTES
    runs.append((begin, len(order), end - first))
    return runs
