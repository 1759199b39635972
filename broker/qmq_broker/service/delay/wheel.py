"""The memory layer of delayed messages: those of the near future, in the order of their due times.

Loaded messages are sorted columns, *runs*, of 48 bytes a message; single late arrivals gather in a
small heap until they make a run. Everything up to one point of the order, `loaded_until`, is here, and
nothing behind it: what arrives behind it is found by a later load, and what would be too much is let
go by taking the point back. So memory is bounded however many messages one bucket holds.

A load looks at the messages that were known when it began (frozen sequences). What arrives while it
runs is put aside and looked at when the point has moved: it is neither lost nor, but for a race that
the writer settles, here twice.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import islice
from operator import itemgetter, le
from typing import Final, NamedTuple

from qmq_broker.storage.schedule.columns import Columns

#: Single arrivals before they become a run.
LATE_MAX: Final = 4096
#: Runs before the small ones become one.
RUNS_MAX: Final = 32
_HIGHEST: Final = 1 << 64
#: Column types: due time, bucket, sequence, source, place; record length, number of the subject.
_CODES: Final = "QQQQQII"


class Key(NamedTuple):
    """A place in the order of release."""

    due_at_ms: int
    bucket: int
    sequence: int


class Pending(NamedTuple):
    """One message that waits for its time, in the order of `Key`."""

    due_at_ms: int
    bucket: int
    sequence: int
    source: int
    place: int
    record_bytes: int
    #: Number of its subject.
    subject: int


def end_of(due_at_ms: int) -> Key:
    """The place behind everything that is due then."""
    return Key(due_at_ms, _HIGHEST, _HIGHEST)


class Rows:
    """Messages as columns in the order of the fields of `Pending`: 48 bytes each."""

    __slots__ = ("columns",)

    def __init__(self, messages: Sequence[Pending] = ()) -> None:
        values: Iterable[Iterable[int]] = zip(*messages, strict=True) if messages else [()] * 7
        self.columns = [array(code, each) for code, each in zip(_CODES, values, strict=True)]

    def __len__(self) -> int:
        return len(self.columns[0])

    def key(self, index: int) -> Key:
        """Where one of them stands in the order of release."""
        due_at_ms, bucket, sequence, *_ = self.columns
        return Key(due_at_ms[index], bucket[index], sequence[index])

    def extend(self, columns: Columns, indexes: Sequence[int]) -> None:
        """Put some messages of a bucket behind these."""
        sources: tuple[array[int] | None, ...] = (
            columns.due_at_ms,
            None,
            columns.sequences,
            columns.sources,
            columns.places,
            columns.record_bytes,
            columns.subjects,
        )
        is_all = len(indexes) == len(columns)
        for column, source in zip(self.columns, sources, strict=True):
            if source is None:
                column.extend(array(column.typecode, [columns.bucket]) * len(indexes))
            else:
                column.extend(source if is_all else _picked(source, indexes))

    def sort(self) -> None:
        """Into the order of release. Sorting indexes by one column after the other is stable."""
        due_at_ms, buckets, sequences = self.columns[:3]
        order: Sequence[int] = range(len(self))
        if not (_is_sorted(buckets) and _is_sorted(sequences)):
            order = sorted(order, key=sequences.__getitem__)
            if not _is_sorted(buckets):
                order = sorted(order, key=buckets.__getitem__)
        first_ms = min(due_at_ms, default=0)
        after_ms = [due_ms - first_ms for due_ms in due_at_ms]  # small numbers are sorted faster
        order = sorted(order, key=after_ms.__getitem__)
        self.columns = [_picked(column, order) for column in self.columns]

    def part(self, first: int, after: int) -> Rows:
        """A copy of some of them."""
        rows = Rows()
        rows.columns = [column[first:after] for column in self.columns]
        return rows

    def messages(self) -> list[Pending]:
        """All of them as values."""
        return list(map(Pending._make, zip(*self.columns, strict=True)))


def _picked(column: array[int], indexes: Sequence[int]) -> array[int]:
    """Some values of a column in this order."""
    # Several at once by an itemgetter, which is no loop of ours; it gives one alone as no sequence.
    values = itemgetter(*indexes)(column) if len(indexes) > 1 else [column[one] for one in indexes]
    return array(column.typecode, values)


def _is_sorted(column: array[int]) -> bool:
    return all(map(le, column, islice(column, 1, None)))


class _Run:
    """Sorted messages; those below `first` are gone."""

    __slots__ = ("first", "rows")

    def __init__(self, rows: Rows) -> None:
        """Requires: sorted."""
        self.first = 0
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows) - self.first

    def head(self) -> Key:
        return self.rows.key(self.first)

    def after(self, key: Key) -> int:
        """The index behind the last message up to `key`."""
        return bisect_right(range(len(self.rows)), key, lo=self.first, key=self.rows.key)

    def take(self, due_at_ms: int, count: int) -> list[Pending]:
        """Remove up to `count` messages that are due then or before."""
        after = bisect_right(self.rows.columns[0], due_at_ms, self.first)
        after = min(after, self.first + count)
        taken = self.rows.part(self.first, after).messages()
        self.first = after
        return taken

    def left(self) -> Rows:
        """What is not gone."""
        return self.rows.part(self.first, len(self.rows))

    def cut(self, until: Key) -> None:
        """Let go of everything behind `until`."""
        self.rows = self.rows.part(self.first, self.after(until))
        self.first = 0


class Wheel:
    """Messages of the near future. For one thread at a time."""

    def __init__(self, first: Key, *, loaded_max: int) -> None:
        """`first`: everything up to there is nobody's business here."""
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
        """When the next of them is due; None for none."""
        heads = [run.head().due_at_ms for run in self._runs]
        if self._late:
            heads.append(self._late[0].due_at_ms)
        return min(heads, default=None)

    def load(self, rows: Rows, until: Key) -> None:
        """Everything from `loaded_until` to `until`, sorted."""
        if len(rows):
            self._add_run(_Run(rows))
        self.loaded_until = until

    def add(self, messages: Iterable[Pending]) -> bool:
        """New messages; those behind `loaded_until` are for a later load. Whether any is taken."""
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

    def take(self, now_ms: int, count: int) -> list[Pending]:
        """Remove up to `count` messages that are due, the longest due first."""
        taken: list[Pending] = []
        while len(taken) < count:
            part = self._take_some(now_ms, count - len(taken))
            if not part:
                break
            taken += part
        self._count -= len(taken)
        return taken

    def _take_some(self, now_ms: int, count: int) -> list[Pending]:
        """From the run that begins first, up to where the next one begins."""
        heads = sorted((run.head(), number) for number, run in enumerate(self._runs))
        if self._late and (not heads or self._late[0][:3] <= heads[0][0]):
            if self._late[0].due_at_ms > now_ms:
                return []
            return [heapq.heappop(self._late)]
        if not heads or heads[0][0].due_at_ms > now_ms:
            return []
        others = [heads[1][0].due_at_ms] if len(heads) > 1 else []
        others += [self._late[0].due_at_ms] if self._late else []
        run = self._runs[heads[0][1]]
        taken = run.take(min([now_ms, *others]), count)
        if not len(run):
            self._runs.pop(heads[0][1])
        return taken

    def _add_run(self, run: _Run) -> None:
        self._runs.append(run)
        self._count += len(run)
        if len(self._runs) <= RUNS_MAX:
            return
        self._runs.sort(key=len)
        small, self._runs = self._runs[: RUNS_MAX // 2], self._runs[RUNS_MAX // 2 :]
        merged = Rows()
        for one in small:
            for column, more in zip(merged.columns, one.left().columns, strict=True):
                column.extend(more)
        merged.sort()
        self._runs.append(_Run(merged))

    def let_go_behind(self, until: Key) -> None:
        """Let go of everything behind a point of the order: it is for a later load."""
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
        """The last message of a run with no more than `loaded_max` of all runs up to it, if any."""
        index = bisect_right(
            range(len(run.rows)),
            self._loaded_max,
            lo=run.first,
            key=lambda place: self._count_upto(run.rows.key(place)),
        )
        return run.rows.key(index - 1) if index > run.first else None

    def _count_upto(self, key: Key) -> int:
        return sum(run.after(key) - run.first for run in self._runs)
