"""The memory layer of delayed messages: those of the near future, ordered by due time.

Loaded messages are sorted columns, *runs*, of 48 bytes a message; single late arrivals gather in a
small heap until they make a run. Everything up to one point of the order, `loaded_until`, is here,
and nothing behind it. What arrives behind it is found by a later load, and if there is too much,
moving the point back drops the excess. So memory is bounded, however many messages one bucket
holds.

A load covers the messages known when it began (frozen sequences). Arrivals during the load are put
aside and checked when the point has moved: none is lost, and none is here twice except for a race
that the writer settles.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable
from typing import Final

from qmq_broker.service.delay.rows import Key, Pending, Rows, end_of

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
        """The index behind the last message up to `key`."""
        return bisect_right(range(len(self.rows)), key, lo=self.first, key=self.rows.key)

    def take(self, due_at_ms: int, count: int) -> Rows:
        """Remove up to `count` messages that are due by then."""
        after = bisect_right(self.rows.due_at_ms, due_at_ms, self.first)
        after = min(after, self.first + count)
        taken = self.rows.part(self.first, after)
        self.first = after
        return taken

    def left(self) -> Rows:
        """What is not gone."""
        return self.rows.part(self.first, len(self.rows))

    def cut(self, until: Key) -> None:
        """Drop everything behind `until`."""
        self.rows = self.rows.part(self.first, self.after(until))
        self.first = 0


class Wheel:
    """Messages of the near future. For one thread at a time."""

    def __init__(self, first: Key, *, loaded_max: int) -> None:
        """This wheel ignores everything up to `first`."""
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
        """Add everything from `loaded_until` to `until`, sorted."""
        if len(rows):
            self._add_run(_Run(rows))
        self.loaded_until = until

    def add(self, messages: Iterable[Pending]) -> bool:
        """Add new messages; those behind `loaded_until` are left to a later load.

        Whether any was added.
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
        """Remove up to `count` messages that are due, longest due first."""
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

    def let_go_behind(self, until: Key) -> None:
        """Drop everything behind a point of the order: a later load finds it."""
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
        self.let_go_behind(max(best, default=self.loaded_until))

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
