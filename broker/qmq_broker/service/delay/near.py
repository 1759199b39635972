"""Delayed messages in memory: those that were overdue at the start, and those that fall due soon.

Two wheels. One holds what is due now or within `AHEAD_MS`; it is filled from the schedule before it
runs empty, and by messages as they arrive. The other holds what was overdue at the start, so that a
large backlog does not delay what is due now; a bucket that is read again is treated the same way.
Both are loaded in slices, one load at a time.

Belongs to the thread that releases; any thread may read the counts. Not for: when and how fast
messages are released (`releasing.py`).
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final

from qmq_broker.clock import Clock
from qmq_broker.service.delay.damage import Damage
from qmq_broker.service.delay.load import LOAD_MAX, Load, frozen_sequences, latest_bucket_ms
from qmq_broker.service.delay.rows import Key, Pending, Rows, end_of
from qmq_broker.service.delay.wheel import Wheel
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.storage.schedule.schedule import Arrival, Schedule
from qmq_broker.storage.schedule.sorted import SortedBuckets

#: How far ahead messages are loaded, and how long before the end of that the next load begins.
AHEAD_MS: Final = 600_000
AGAIN_MS: Final = 60_000
#: How long a load goes on before the messages due meanwhile are released.
LOAD_SLICE_S: Final = 0.02


class NearFuture:
    """What is in memory of one schedule. Call `begin` before everything else."""

    def __init__(
        self, schedule: Schedule, clock: Clock, limits: ServiceLimits, damage: Damage
    ) -> None:
        """`damage` is told what cannot be read; it is passed over."""
        self._schedule = schedule
        self._clock = clock
        self._loaded_max = limits.delayed_loaded
        self._damage = damage
        self._sorted = SortedBuckets(schedule, messages_min=limits.delayed_unsorted)
        self._soon = Wheel(end_of(0), loaded_max=self._loaded_max)
        self._overdue = Wheel(end_of(0), loaded_max=self._loaded_max)
        #: What was due by then, of these buckets up to these sequences, is treated as overdue; no
        #: buckets once all of it is loaded.
        self._overdue_until_ms = 0
        self._overdue_frozen: dict[int, int] = {}
        #: The load under way.
        self._loading: Load | None = None

    def begin(self, now_ms: int) -> None:
        """Treat everything pending that is due before now as overdue."""
        self._overdue_until_ms = now_ms - 1
        self._overdue_frozen = frozen_sequences(self._schedule)
        self._soon.loaded_until = end_of(self._overdue_until_ms)
        # What is due at 0 has a place in the order, too.
        self._overdue.loaded_until = end_of(-1)

    @property
    def loaded(self) -> int:
        """How many messages are in memory."""
        return len(self._soon) + len(self._overdue)

    @property
    def loaded_until_ms(self) -> int:
        """Everything due before this is in memory, unless it is overdue."""
        return self._soon.loaded_until.due_at_ms

    @property
    def overdue(self) -> int:
        """Messages in memory that were overdue at the start."""
        return len(self._overdue)

    @property
    def has_overdue(self) -> bool:
        """Whether overdue messages are left, in memory or to be loaded."""
        return bool(len(self._overdue) or self._overdue_frozen)

    @property
    def is_loading(self) -> bool:
        """Whether a load is under way."""
        return self._loading is not None

    def next_due_ms(self) -> int | None:
        """When the next message that is not overdue falls due; None if none is in memory."""
        return self._soon.next_due_ms()

    def take_overdue(self, now_ms: int, count: int) -> Rows:
        """Remove up to `count` overdue messages, longest due first."""
        return self._overdue.take(now_ms, count)

    def take_due(self, now_ms: int, count: int) -> Rows:
        """Remove up to `count` messages that are due and not overdue, longest due first."""
        return self._soon.take(now_ms, count)

    def arrive(self, arrival: Arrival) -> None:
        """Add messages that became durable, as far as the near future reaches."""
        self._add(arrival)
        if self._loading is not None:
            self._loading.arrivals.append(arrival)

    def load(self, now_ms: int) -> None:
        """For a while, load what is due soon, before it is needed."""
        if self._loading is None:
            self._loading = self._next_load(now_ms)
        loading = self._loading
        if loading is None:
            return
        until_s = self._clock.monotonic_s() + LOAD_SLICE_S
        try:
            is_over = loading.advance(lambda: self._clock.monotonic_s() < until_s)
        except Exception:
            self._loading = None
            raise
        if not is_over:
            return
        self._loading = None
        if loading.wheel is self._overdue:
            if self._overdue.loaded_until >= end_of(loading.until_ms):
                self._overdue_frozen = {}
            return
        for arrival in loading.arrivals:
            self._add(arrival, after=loading.after)

    def read_again(self, buckets: Set[int], now_ms: int) -> None:
        """Forget what was read of these buckets, and treat what is due of them as overdue.

        Requires: nothing is overdue or being loaded.
        """
        for bucket in buckets:
            self._schedule.read_anew(bucket)
        frozen = frozen_sequences(self._schedule)
        self._sorted.keep(frozen.keys() - buckets)
        # What is due is loaded as overdue, and the rest once more with the others.
        self._soon.let_go_behind(end_of(now_ms))
        self._overdue_until_ms = now_ms
        self._overdue.loaded_until = end_of(-1)
        self._overdue_frozen = {one: next_ for one, next_ in frozen.items() if one in buckets}

    def close(self) -> None:
        """Remove the files of sorted buckets."""
        self._sorted.keep(())

    def _add(self, arrival: Arrival, after: Key | None = None) -> None:
        """Add new messages to the wheel as far as it reaches; only those behind `after`."""
        if arrival.bucket > latest_bucket_ms(self._schedule, self.loaded_until_ms):
            return
        bucket, first, next_ = arrival
        for columns in self._schedule.columns(bucket, first, next_):
            self._soon.add(
                Pending(
                    columns.due_at_ms[index],
                    bucket,
                    sequence,
                    columns.sources[index],
                    columns.places[index],
                    columns.record_bytes[index],
                    columns.subjects[index],
                )
                for index, sequence in enumerate(columns.sequences)
                if first <= sequence < next_
                and (after is None or (columns.due_at_ms[index], bucket, sequence) > after)
            )

    def _next_load(self, now_ms: int) -> Load | None:
        """What to load next: what is due now, then what was overdue at the start, then the rest."""
        reaches_ms, enough = self.loaded_until_ms, self._loaded_max // 2
        wheel, frozen, until_ms = self._overdue, self._overdue_frozen, self._overdue_until_ms
        if not frozen or wheel.room < enough or reaches_ms < now_ms:
            wheel, until_ms = self._soon, now_ms + AHEAD_MS
            if reaches_ms >= now_ms + AGAIN_MS or wheel.room < min(LOAD_MAX, enough):
                return None
            frozen = frozen_sequences(self._schedule)
            self._sorted.keep(frozen.keys() | self._overdue_frozen.keys())
        return Load(
            self._schedule,
            wheel,
            frozen,
            until_ms=until_ms,
            damage=self._damage,
            sorted_=self._sorted,
        )
