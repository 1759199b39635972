"""Large buckets ordered by due time: a file next to the schedule log, while the broker runs.

::

    sorted/<yyyyMMddHHmm>    runs of blocks of equal length
    block                    count 4, columns of up to 256 messages, CRC-32C of these two 4, nothing to its end

A schedule log is in order of arrival, so a bucket of ten million messages would be read from end to
end for each portion loaded from it. Instead its messages are sorted once, some ten thousand at a
time, into *runs*; a portion is then a few blocks of each run. Only the first and last due time of
each block stay in memory: about 600 kB for ten million messages. The files are derived, in this
machine's byte order, never synced and never read by another process. A start removes them, and if
one cannot be written or read, the schedule log is read as before. For one thread.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Collection, Iterator
from typing import Final

from qmq_broker.errors import DiskError, NoRoomError, disk_full
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import DiskFile
from qmq_broker.storage.schedule.columns import Columns, picker
from qmq_broker.storage.schedule.lists import OnDamage
from qmq_broker.storage.schedule.schedule import Schedule
from qmq_client.wire.checksum import crc32c

_log = logging.getLogger(__name__)
#: Messages of one run. Sorting them blocks the thread for about 40 ms.
RUN_MESSAGES: Final = 65_536
#: Messages of one block. At most a part of one block of each run is read in excess.
BLOCK_MESSAGES: Final = 256
_COUNT_BYTES: Final = 4
_CRC_BYTES: Final = 4
#: Columns of a block: due time, sequence, source, place; record length, number of the subject.
_CODES: Final = "QQQQII"
_MESSAGE_BYTES: Final = sum(array(code).itemsize for code in _CODES)
_BLOCK_BYTES: Final = _COUNT_BYTES + BLOCK_MESSAGES * _MESSAGE_BYTES + _CRC_BYTES


class _SortedBucket:
    """The sorted part of one bucket: messages with sequences below `next_sequence`."""

    def __init__(self, bucket: int, file: DiskFile) -> None:
        self.bucket = bucket
        self.next_sequence = 0
        self._file = file
        #: First and last due time of each block, in the order of the file.
        self._first_due_ms = array("Q")
        self._last_due_ms = array("Q")

    def append(self, run: Columns) -> None:
        """Sort these messages and append them as a run."""
        columns = (
            *(run.due_at_ms, run.sequences, run.sources, run.places),
            *(run.record_bytes, run.subjects),
        )
        order = sorted(range(len(run)), key=run.due_at_ms.__getitem__)
        for first in range(0, len(order), BLOCK_MESSAGES):
            part = order[first : first + BLOCK_MESSAGES]
            block = list(map(picker(part), columns))
            count = len(part).to_bytes(_COUNT_BYTES, "big")
            data = b"".join([count, *(column.tobytes() for column in block)])
            position = len(self._first_due_ms) * _BLOCK_BYTES
            self._file.write(position, [data, crc32c(data).to_bytes(_CRC_BYTES, "big")])
            self._first_due_ms.append(block[0][0])
            self._last_due_ms.append(block[0][-1])

    def columns(self, first_ms: int, last_ms: int) -> Iterator[Columns]:
        """The blocks with due times within these bounds, both inclusive; raises `DiskError`."""
        spans = zip(self._first_due_ms, self._last_due_ms, strict=True)
        wanted = [
            i for i, (first, last) in enumerate(spans) if first <= last_ms and last >= first_ms
        ]
        for index in wanted:
            yield self._block(index * _BLOCK_BYTES)

    def reach_ms(self, after_ms: int, count: int) -> int | None:
        """A due time up to which about `count` messages after `after_ms` are due, if there are so
        many.

        It may be a few more, because whole blocks are counted, or a few less if the last block of a run is not full.
        """
        blocks = zip(self._first_due_ms, self._last_due_ms, strict=True)
        ends = sorted(last for first, last in blocks if first > after_ms)
        wanted = -(-count // BLOCK_MESSAGES)
        return ends[wanted - 1] if wanted <= len(ends) else None

    def close(self) -> None:
        self._file.close()

    def _block(self, position: int) -> Columns:
        block = self._file.read(position, _BLOCK_BYTES)
        count = int.from_bytes(block[:_COUNT_BYTES], "big")
        after = _COUNT_BYTES + count * _MESSAGE_BYTES
        checksum = int.from_bytes(block[after : after + _CRC_BYTES], "big")
        if not count or crc32c(block[:after]) != checksum:
            path = layout.sorted_path(self.bucket)
            raise DiskError(operation="read", path=path, reason=f"no complete block at {position}")
        columns, first = [], _COUNT_BYTES
        for code in _CODES:
            column = array(code)
            after = first + count * column.itemsize
            column.frombytes(block[first:after])
            columns.append(column)
            first = after
        due_at_ms, sequences, sources, places, record_bytes, subjects = columns
        return Columns(
            bucket=self.bucket,
            sequences=sequences,
            sources=sources,
            due_at_ms=due_at_ms,
            places=places,
            record_bytes=record_bytes,
            subjects=subjects,
        )


class SortedBuckets:
    """All buckets of a schedule, the large ones sorted. For the thread that loads."""

    def __init__(self, schedule: Schedule, *, messages_min: int) -> None:
        """Buckets with more than `messages_min` messages are sorted."""
        self._schedule = schedule
        self._messages_min = messages_min
        self._run_messages = min(RUN_MESSAGES, messages_min)
        self._sorted: dict[int, _SortedBucket] = {}
        #: Buckets that could not be sorted: no room, or the disk fails.
        self._refused: set[int] = set()
        for name in schedule.disk.names(layout.SORTED):
            if layout.parse_bucket(name) is not None:
                schedule.disk.unlink(f"{layout.SORTED}/{name}")

    def sort(
        self, bucket: int, messages: int, *, on_damage: OnDamage | None = None
    ) -> Iterator[None]:
        """Sort the messages in the files of a large bucket that are not sorted yet; raises `CorruptionError`.

        With `on_damage`, that is called for unreadable messages instead. Yields at points where other work may run.
        """
        is_known = bucket in self._sorted
        if bucket in self._refused or not (is_known or messages > self._messages_min):
            return
        try:
            found = self._sorted[bucket] if is_known else self._begin(bucket)
            yield from self._sort(found, on_damage)
        except (NoRoomError, DiskError) as error:
            self._refuse(bucket, error)

    def columns(
        self,
        bucket: int,
        next_sequence: int,
        *,
        within: tuple[int, int],
        on_damage: OnDamage | None = None,
    ) -> Iterator[Columns]:
        """Like `Schedule.columns` from the first sequence on, without ids where it is sorted."""
        found, first_sequence = self._sorted.get(bucket), 0
        if found is not None:
            first_sequence = found.next_sequence
            try:
                yield from found.columns(*within)
            except DiskError as error:
                self._refuse(bucket, error)
                first_sequence = 0  # some messages may be returned twice; the writer resolves that
        yield from self._schedule.columns(
            bucket, first_sequence, next_sequence, within=within, on_damage=on_damage
        )

    def reach_ms(self, bucket: int, after_ms: int, count: int) -> int | None:
        """A due time that covers about `count` messages after `after_ms`; None if unsorted, or if there are fewer."""
        found = self._sorted.get(bucket)
        return None if found is None else found.reach_ms(after_ms, count)

    def keep(self, buckets: Collection[int]) -> None:
        """Remove the files of all other buckets."""
        self._refused &= set(buckets)
        for bucket in [one for one in self._sorted if one not in buckets]:
            self._remove(bucket)

    def _begin(self, bucket: int) -> _SortedBucket:
        disk = self._schedule.disk
        disk.make_directory(layout.SORTED)
        file = disk.open(layout.sorted_path(bucket), is_new=True)
        found = self._sorted[bucket] = _SortedBucket(bucket, file)
        return found

    def _sort(self, found: _SortedBucket, on_damage: OnDamage | None) -> Iterator[None]:
        """Sort whole frames of the schedule log, enough for a run; the rest is sorted later."""
        schedule = self._schedule
        copied_sequence = schedule.copied_sequence(found.bucket)
        if copied_sequence - found.next_sequence < self._run_messages:
            return
        room_bytes = 2 * (copied_sequence - found.next_sequence) * _MESSAGE_BYTES
        free_bytes, reserve_bytes = schedule.disk.free_bytes(), schedule.options.reserve_bytes
        if free_bytes < reserve_bytes + room_bytes:
            raise disk_full(
                free_bytes=free_bytes, needed_bytes=room_bytes, reserve_bytes=reserve_bytes
            )
        run = Columns(bucket=found.bucket)
        for part in schedule.columns(
            found.bucket, found.next_sequence, copied_sequence, on_damage=on_damage
        ):
            run.add(part)
            if len(run) >= self._run_messages:
                found.append(run)
                found.next_sequence = max(run.sequences) + 1
                run = Columns(bucket=found.bucket)
            yield

    def _refuse(self, bucket: int, error: Exception) -> None:
        _log.warning("bucket of delayed messages not sorted: bucket=%d reason=%s", bucket, error)
        self._refused.add(bucket)
        self._remove(bucket)

    def _remove(self, bucket: int) -> None:
        found = self._sorted.pop(bucket, None)
        if found is None:
            return
        found.close()
        self._schedule.disk.unlink(layout.sorted_path(bucket))
