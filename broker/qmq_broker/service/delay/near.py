"""The delayed messages in memory: those that were overdue at the start, and those that fall due soon.

There are two wheels. One holds messages due now or within `AHEAD_MS`; it is filled from the schedule before it
runs empty, and by messages as they arrive. The other holds messages that were overdue at the start,
so that a large backlog does not delay those due now; a bucket that is read again is treated the
same way. Both are loaded in slices, one load at a time.

Owned by the thread that releases messages; any thread may read the counts. Not for: the time and
rate of releases (`releasing.py`).

A load (`Load`) reads messages from the schedule into a wheel, in bounded portions, a little at a
time. A whole bucket is read for each portion; a bucket with millions of messages is first sorted
on the disk (`storage/schedule/sorted.py`). Releases continue between two steps.

In a wheel (`Wheel`) messages are sorted columns, *runs*, of 48 bytes a message; single late arrivals
gather in a small heap until they make a run. A wheel has everything up to one point of the order,
`loaded_until`, and nothing after it. A message that arrives after it is found by a later load, and if
there is too much, moving the point back drops the excess. So memory is bounded, however many
messages one bucket holds.

A load covers the messages known when it began (frozen sequences). Arrivals during the load are kept
apart and checked when the point has moved: none is lost, and none is here twice except for a race
that the writer settles.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import partial
from typing import Final, TypeVar

from qmq_broker.errors import CorruptionError
from qmq_broker.service.delay.damage import Damage
from qmq_broker.service.delay.rows import Key, Pending, Rows, end_of
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.storage.schedule.columns import Columns
from qmq_broker.storage.schedule.schedule import Arrival, Schedule
from qmq_broker.storage.schedule.sorted import SortedBuckets
from qmq_broker.storage.schedule.states import DelayedStates
from qmq_client.clock import Clock

#: Single arrivals before they become a run.
LATE_MAX: Final = 4096
#: Runs before the small ones are merged.
RUNS_MAX: Final = 32


class _Run:
    """Sorted messages; those below `first` are gone."""

    __slots__ = ("first", "rows")

    def __init__(self, rows: Rows) -> None:
        """Requires: `rows` are sorted."""
        self.first = 0
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows) - self.first

    def head(self) -> Key:
        return self.rows.key(self.first)

    def after(self, key: Key) -> int:
        """The index after the last message up to `key`."""
        return bisect_right(range(len(self.rows)), key, lo=self.first, key=self.rows.key)

    def take(self, due_at_ms: int, count: int) -> Rows:
        """Remove up to `count` messages that are due by then."""
        after = bisect_right(self.rows.due_at_ms, due_at_ms, self.first)
        after = min(after, self.first + count)
        taken = self.rows.part(self.first, after)
        self.first = after
        return taken

    def left(self) -> Rows:
        """The messages that are left."""
        return self.rows.part(self.first, len(self.rows))

    def cut(self, until: Key) -> None:
        """Drop everything after `until`."""
        self.rows = self.rows.part(self.first, self.after(until))
        self.first = 0


class Wheel:
    """Messages of the near future. For one thread at a time."""

    def __init__(self, first: Key, *, loaded_max: int) -> None:
        """The wheel ignores messages up to `first`."""
        self.loaded_until = first
        self._loaded_max = loaded_max
        self._runs: list[_Run] = []
        self._late: list[Pending] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def room(self) -> int:
        """How many more messages may be loaded."""
        return max(0, self._loaded_max - self._count)

    def next_due_ms(self) -> int | None:
        """When the next message is due; None if there is none."""
        heads = [run.head().due_at_ms for run in self._runs]
        if self._late:
            heads.append(self._late[0].due_at_ms)
        return min(heads, default=None)

    def load(self, rows: Rows, until: Key) -> None:
        """Add all messages from `loaded_until` to `until`, sorted."""
        if len(rows):
            self._add_run(_Run(rows))
        self.loaded_until = until

    def add(self, messages: Iterable[Pending]) -> bool:
        """Add new messages; those after `loaded_until` are left to a later load.

        Returns whether any was added.
        """
        until = self.loaded_until
        before = self._count
        for message in messages:
            if message[:3] <= until:
                heapq.heappush(self._late, message)
                self._count += 1
        if len(self._late) >= LATE_MAX:
            self._late.sort()
            late, self._late = self._late, []
            self._count -= len(late)
            self._add_run(_Run(Rows(late)))
        if self._count > self._loaded_max + self._loaded_max // 4:
            self._let_go()
        return self._count != before

    def take(self, now_ms: int, count: int) -> Rows:
        """Remove and return up to `count` due messages, the earliest due time first."""
        taken = Rows()
        while len(taken) < count:
            part = self._take_some(now_ms, count - len(taken))
            if not len(part):
                break
            taken.add(part)
        self._count -= len(taken)
        return taken

    def _take_some(self, now_ms: int, count: int) -> Rows:
        """Take from the first run up to where the next one begins, or from the late arrivals."""
        heads = sorted((run.head(), number) for number, run in enumerate(self._runs))
        if self._late and (not heads or self._late[0][:3] <= heads[0][0]):
            return self._take_late(now_ms, count, heads[0][0] if heads else end_of(now_ms))
        if not heads or heads[0][0].due_at_ms > now_ms:
            return Rows()
        others = [heads[1][0].due_at_ms] if len(heads) > 1 else []
        others += [self._late[0].due_at_ms] if self._late else []
        run = self._runs[heads[0][1]]
        taken = run.take(min([now_ms, *others]), count)
        if not len(run):
            self._runs.pop(heads[0][1])
        return taken

    def _take_late(self, now_ms: int, count: int, before: Key) -> Rows:
        """Take from the late arrivals, up to where the first run begins."""
        late, until = self._late, min(before, end_of(now_ms))
        taken: list[Pending] = []
        while late and late[0][:3] <= until and len(taken) < count:
            taken.append(heapq.heappop(late))
        return Rows(taken)

    def _add_run(self, run: _Run) -> None:
        self._runs.append(run)
        self._count += len(run)
        if len(self._runs) <= RUNS_MAX:
            return
        self._runs.sort(key=len)
        small, self._runs = self._runs[: RUNS_MAX // 2], self._runs[RUNS_MAX // 2 :]
        merged = Rows()
        for one in small:
            merged.add(one.left())
        merged.sort()
        self._runs.append(_Run(merged))

    def let_go_after(self, until: Key) -> None:
        """Drop all messages after a point of the order: a later load finds them."""
        self._gather()
        for run in self._runs:
            run.cut(until)
        self._runs = [run for run in self._runs if len(run)]
        self._count = sum(map(len, self._runs))
        self.loaded_until = min(self.loaded_until, until)

    def _gather(self) -> None:
        """Make a run of the single arrivals."""
        self._late.sort()
        late, self._late = self._late, []
        if late:
            self._runs.append(_Run(Rows(late)))

    def _let_go(self) -> None:
        """Keep about the first `loaded_max` messages."""
        self._gather()
        best = filter(None, map(self._best_key, self._runs))
        self.let_go_after(max(best, default=self.loaded_until))

    def _best_key(self, run: _Run) -> Key | None:
        """The last message of a run such that all runs hold at most `loaded_max` up to it."""
        index = bisect_right(
            range(len(run.rows)),
            self._loaded_max,
            lo=run.first,
            key=lambda place: self._count_upto(run.rows.key(place)),
        )
        return run.rows.key(index - 1) if index > run.first else None

    def _count_upto(self, key: Key) -> int:
        return sum(run.after(key) - run.first for run in self._runs)


#: The longest bucket: how far after the beginning of a bucket its due times may be.
BUCKET_MS_MAX: Final = 3_600_000
#: Messages of one load. While twice as many are sorted nothing else is done: about 0.05 s.
LOAD_MAX: Final = 62_500

T = TypeVar("T")


def frozen_sequences(schedule: Schedule) -> dict[int, int]:
    """Bucket → the sequence after its last message, for buckets with pending messages."""
    return {bucket: next_ for bucket, next_, pending in schedule.states() if pending}


def latest_bucket_ms(schedule: Schedule, due_at_ms: int) -> int:
    """The last bucket that may hold messages due then or before.

    A message due before the log's own time goes to the bucket of that time, because earlier buckets
    may be removed. The log is ahead of the clock for long after a message was stored while the
    clock was wrong.
    """
    return max(due_at_ms, schedule.stored_at_ms)


class Load:
    """One load: everything due up to `until_ms`, or as much as there is room for.

    It covers the messages that `frozen` counts. The caller collects later arrivals in `arrivals`
    and checks them when the load has ended. Unreadable messages are recorded in `damage` and
    skipped.
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
        #: Loading begins after this point.
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
        """Continue while there is time; returns whether it has ended."""
        return all(has_time() for _ in self._parts)

    def _run(self) -> Iterator[None]:
        """The load as a generator that yields at points where other work may run."""
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
            for columns, states in self._unless_damaged(
                bucket, self._columns(bucket, last.due_at_ms)
            ):
                found.extend(columns, _wanted(columns, states, self.after, last))
                if len(found) > 2 * room:
                    found, last = _first(found, room)
                yield
        if len(found) > room:
            found, last = _first(found, room)
        found.sort()
        # If too many messages arrived meanwhile, the wheel has dropped its last part.
        if self.wheel.loaded_until == self.after:
            self.wheel.load(found, last)
            self.count = len(found)

    def _columns(self, bucket: int, last_ms: int) -> Iterator[tuple[Columns, DelayedStates]]:
        states = self._schedule.states_of(bucket)
        if states is None:
            return
        within = self.after.due_at_ms, last_ms
        on_damage = partial(self._damage.hold_part, bucket)
        next_sequence = self._frozen[bucket]
        for columns in self._sorted.columns(
            bucket, next_sequence, within=within, on_damage=on_damage
        ):
            yield columns, states

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
    """The messages of these that are due first, as many as there is room for, and where they end."""
    until_ms = sorted(found.due_at_ms)[room] - 1
    first = found.due_until(until_ms)
    if len(first) > room // 2:
        return first, end_of(until_ms)
    found.sort()  # too many are due at one moment
    return found.part(0, room), found.key(room - 1)


def _wanted(columns: Columns, states: DelayedStates, after: Key, last: Key) -> list[int]:
    """Indexes of the pending messages after `after`, up to `last`."""
    bucket, sequences, due_at_ms = columns.bucket, columns.sequences, columns.due_at_ms
    first_ms, last_ms = after.due_at_ms, last.due_at_ms
    # Comparing numbers first saves most look-ups when a bucket is loaded in parts.
    near = [index for index, due_ms in enumerate(due_at_ms) if first_ms <= due_ms <= last_ms]
    pending = states.pending([sequences[index] for index in near])
    return [
        index
        for index in map(near.__getitem__, pending)
        if first_ms < due_at_ms[index] < last_ms
        or after < (due_at_ms[index], bucket, sequences[index]) <= last
    ]


#: How far ahead messages are loaded, and how long before that time is used up the next load begins.
AHEAD_MS: Final = 600_000
AGAIN_MS: Final = 60_000
#: How long a load runs before the messages that became due are released.
LOAD_SLICE_S: Final = 0.02


class NearFuture:
    """The messages of one schedule that are in memory. Call `begin` first."""

    def __init__(
        self, schedule: Schedule, clock: Clock, limits: ServiceLimits, damage: Damage
    ) -> None:
        """`damage` records unreadable messages; they are skipped."""
        self._schedule = schedule
        self._clock = clock
        self._loaded_max = limits.delayed_loaded
        self._damage = damage
        self._sorted = SortedBuckets(schedule, messages_min=limits.delayed_unsorted)
        self._soon = Wheel(end_of(0), loaded_max=self._loaded_max)
        self._overdue = Wheel(end_of(0), loaded_max=self._loaded_max)
        #: Messages due by that time, in these buckets and up to these sequences, are treated as
        #: overdue; no buckets once all are loaded.
        self._overdue_until_ms = 0
        self._overdue_frozen: dict[int, int] = {}
        #: The load under way.
        self._loading: Load | None = None

    def begin(self, now_ms: int) -> None:
        """Treat all pending messages that are due before now as overdue."""
        self._overdue_until_ms = now_ms - 1
        self._overdue_frozen = frozen_sequences(self._schedule)
        self._soon.loaded_until = end_of(self._overdue_until_ms)
        # A due time of 0 has a place in the order, too.
        self._overdue.loaded_until = end_of(-1)

    @property
    def loaded(self) -> int:
        """How many messages are in memory."""
        return len(self._soon) + len(self._overdue)

    @property
    def loaded_until_ms(self) -> int:
        """All messages due before this time are in memory, except overdue ones."""
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
        """Load messages that are due soon, for a limited time."""
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
        """Forget the messages read from these buckets, and treat those that are due as overdue.

        Requires: nothing is overdue or being loaded.
        """
        for bucket in buckets:
            self._schedule.read_anew(bucket)
        frozen = frozen_sequences(self._schedule)
        self._sorted.keep(frozen.keys() - buckets)
        # Due messages are loaded as overdue, and the rest again with the others.
        self._soon.let_go_after(end_of(now_ms))
        self._overdue_until_ms = now_ms
        self._overdue.loaded_until = end_of(-1)
        self._overdue_frozen = {one: next_ for one, next_ in frozen.items() if one in buckets}

    def close(self) -> None:
        """Remove the files of sorted buckets."""
        self._sorted.keep(())

    def _add(self, arrival: Arrival, after: Key | None = None) -> None:
        """Add new messages to the wheel as far as it reaches; only those after `after`."""
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
        """The next load: messages due now, then those overdue at the start, then the rest."""
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
