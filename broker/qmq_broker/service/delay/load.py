"""Loading the near future from the schedule into a wheel, in bounded portions, a little at a time.

A bucket is read through for each portion; a bucket with millions of messages is first sorted on the
disk (`storage/schedule/sorted.py`). Releases go on between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final, TypeVar

from qmq_broker.errors import CorruptionError
from qmq_broker.service.delay.damage import Damage
from qmq_broker.service.delay.rows import Key, Rows, end_of
from qmq_broker.service.delay.wheel import Wheel
from qmq_broker.storage.schedule.columns import Columns
from qmq_broker.storage.schedule.fates import Fates
from qmq_broker.storage.schedule.schedule import Arrival, Schedule
from qmq_broker.storage.schedule.sorted import SortedBuckets

#: The longest bucket: how far after the beginning of a bucket its due times may be.
BUCKET_MS_MAX: Final = 3_600_000
#: Messages of one load. While twice as many are sorted nothing else is done: about 0.05 s.
LOAD_MAX: Final = 62_500

T = TypeVar("T")


def frozen_sequences(schedule: Schedule) -> dict[int, int]:
    """Bucket → the sequence behind its last message, for buckets with pending messages."""
    return {bucket: next_ for bucket, next_, pending in schedule.states() if pending}


def latest_bucket_ms(schedule: Schedule, due_at_ms: int) -> int:
    """The last bucket that may hold messages due then or before.

    What is due before the log's own time goes to the bucket of that time, because earlier ones may be
    removed. The log is ahead of the clock for long after a message was stored while the clock was wrong.
    """
    return max(due_at_ms, schedule.stored_at_ms)


class Load:
    """One load: everything due up to `until_ms`, or as much as there is room for.

    It covers the messages that `frozen` counts. Later arrivals are not among them: collect them in
    `arrivals` and check them when the load has ended. What cannot be read is recorded in `damage`
    and passed over.
    """

    def __init__(
        self,
        schedule: Schedule,
        wheel: Wheel,
        frozen: Mapping[int, int],
        *,
        until_ms: int,
        damage: Damage,
        sorted_: SortedBuckets,
    ) -> None:
        self.wheel = wheel
        self.until_ms = until_ms
        #: Loading begins behind this point.
        self.after = wheel.loaded_until
        self.arrivals: list[Arrival] = []
        #: Messages loaded, once it has ended.
        self.count = 0
        self._schedule = schedule
        self._sorted = sorted_
        self._frozen = frozen
        self._damage = damage
        self._parts = self._run()

    def advance(self, has_time: Callable[[], bool] = lambda: True) -> bool:
        """Go on while there is time; returns whether it has ended."""
        return all(has_time() for _ in self._parts)

    def _run(self) -> Iterator[None]:
        """The load as a generator that yields where other work may go first."""
        last = end_of(self.until_ms)
        found = Rows()
        room = min(self.wheel.room, LOAD_MAX)
        for bucket in self._buckets(last):
            sorting = self._sorted.sort(
                bucket, self._frozen[bucket], on_damage=partial(self._damage.hold_part, bucket)
            )
            yield from self._unless_damaged(bucket, sorting)
            reach_ms = self._sorted.reach_ms(bucket, self.after.due_at_ms, room)
            if reach_ms is not None:
                last = min(last, end_of(reach_ms))
        for bucket in self._buckets(last):
            for columns, fates in self._unless_damaged(
                bucket, self._columns(bucket, last.due_at_ms)
            ):
                found.extend(columns, _wanted(columns, fates, self.after, last))
                if len(found) > 2 * room:
                    found, last = _first(found, room)
                yield
        if len(found) > room:
            found, last = _first(found, room)
        found.sort()
        # Too many may have arrived meanwhile: then the wheel dropped its last part.
        if self.wheel.loaded_until == self.after:
            self.wheel.load(found, last)
            self.count = len(found)

    def _columns(self, bucket: int, last_ms: int) -> Iterator[tuple[Columns, Fates]]:
        fates = self._schedule.fates_of(bucket)
        if fates is None:
            return
        within = self.after.due_at_ms, last_ms
        on_damage = partial(self._damage.hold_part, bucket)
        next_sequence = self._frozen[bucket]
        for columns in self._sorted.columns(
            bucket, next_sequence, within=within, on_damage=on_damage
        ):
            yield columns, fates

    def _buckets(self, last: Key) -> list[int]:
        """Buckets that may hold messages for this load, up to `last`."""
        after_ms = self.after.due_at_ms
        last_ms = latest_bucket_ms(self._schedule, last.due_at_ms)
        return [
            bucket
            for bucket in sorted(self._frozen)
            if after_ms - BUCKET_MS_MAX < bucket <= last_ms and not self._damage.holds(bucket)
        ]

    def _unless_damaged(self, bucket: int, parts: Iterator[T]) -> Iterator[T]:
        try:
            yield from parts
        except CorruptionError as error:
            self._damage.hold_bucket(bucket, error)


def _first(found: Rows, room: int) -> tuple[Rows, Key]:
    """Those of these that are due first, as many as there is room for, and where they end."""
    until_ms = sorted(found.due_at_ms)[room] - 1
    first = found.due_until(until_ms)
    if len(first) > room // 2:
        return first, end_of(until_ms)
    found.sort()  # too many are due at one moment
    return found.part(0, room), found.key(room - 1)


def _wanted(columns: Columns, fates: Fates, after: Key, last: Key) -> list[int]:
    """Indexes of the pending ones behind `after`, up to `last`."""
    bucket, sequences, due_at_ms = columns.bucket, columns.sequences, columns.due_at_ms
    first_ms, last_ms = after.due_at_ms, last.due_at_ms
    # Comparing numbers first saves most look-ups where a bucket is loaded in parts.
    near = [index for index, due_ms in enumerate(due_at_ms) if first_ms <= due_ms <= last_ms]
    pending = fates.pending([sequences[index] for index in near])
    return [
        index
        for index in map(near.__getitem__, pending)
        if first_ms < due_at_ms[index] < last_ms
        or after < (due_at_ms[index], bucket, sequences[index]) <= last
    ]
