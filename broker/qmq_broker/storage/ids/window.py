"""The dedupe window: the message ids that were stored recently, with the frame of each.

An id is remembered together with its subject: the same id under another subject is another message,
so a caller that may send to one subject cannot block messages of another.

An id is a producer instance and a dense counter, so the ids of a frame are a few runs of counters,
and a million ids are a few thousand runs of 24 bytes each. A window keeps at least the last
`ids_max` ids or the last `age_ms`, whichever is less, in eight generations; the oldest generation
is dropped as a whole. Time is the log's own (`stored_at_ms` of frames), so that replaying the log
gives the same window. Only retention may make it forget by the clock, when nothing can be stored.

There are eight tables, although a look-up checks each: a generation is dropped at once, and its
first frame marks the beginning of a snapshot of the window and of the log that a start reads. A
single table would save about 1.5 microseconds per request, but would need the generation of each
run, and a pass that removes an old generation piece by piece between commits. With two tables the
window, and the log that a start reads, would be half as long again as promised, instead of an
eighth.

Not for: deciding whether a repeat has the same content, which needs the stored record
(`repeats.py`). An id added here may be acknowledged only after the next sync.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from qmq_broker.storage.ids.runs import IdRun, SubjectIds

GENERATIONS: Final = 8


class IdRunPlace(NamedTuple):
    """Ids that were stored before, with their place."""

    run: IdRun
    #: Offset of the frame, or another number that the caller gave for it.
    place: int


class Known(NamedTuple):
    """Ids of one subject that were stored before, with their frames."""

    subject: str
    run: IdRun
    #: Offset of the frame.
    place: int


class RunColumns(NamedTuple):
    """Many runs as columns, with the last counter of each: the one after it may not fit 64 bits."""

    instances: array[int]
    firsts: array[int]
    lasts: array[int]
    places: array[int]


class RunTable:
    """Runs of ids of one subject that do not overlap, each with a place."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        #: One run as a tuple (first, next, place), several as sorted columns: instances from hashed
        #: ids mostly have one run, real producers have many.
        self._runs: dict[int, tuple[int, int, int] | _Columns] = {}

    def find(self, run: IdRun) -> list[IdRunPlace]:
        """The parts of `run` that are in the table."""
        known = self._runs.get(run.instance)
        if known is None:
            return []
        if isinstance(known, _Columns):
            return known.find(run)
        first, after, place = known
        first, after = max(first, run.first_counter), min(after, run.next_counter)
        return [IdRunPlace(IdRun(run.instance, first, after), place)] if first < after else []

    def add_sorted(self, columns: RunColumns) -> None:
        """Add many runs, sorted by instance and counter.

        Requires: no part of them is in the table yet.
        """
        instances, firsts, lasts, places = columns
        if len(set(instances)) == len(instances) and self._runs.keys().isdisjoint(instances):
            afters = [last + 1 for last in lasts]
            self._runs.update(zip(instances, zip(firsts, afters, places, strict=True), strict=True))
            return
        first = 0
        while first < len(instances):
            instance = instances[first]
            after = bisect_right(instances, instance, first)
            if after == first + 1:
                self.add(IdRun(instance, firsts[first], lasts[first] + 1), places[first])
            else:
                part = (firsts[first:after], lasts[first:after], places[first:after])
                self._columns_of(instance).extend(*part)
            first = after

    def add(self, run: IdRun, place: int) -> None:
        """Add a run. Requires: no part of it is in the table yet."""
        known = self._runs.get(run.instance)
        if known is None:
            self._runs[run.instance] = (run.first_counter, run.next_counter, place)
            return
        self._columns_of(run.instance).add(run.first_counter, run.next_counter, place)

    def _columns_of(self, instance: int) -> _Columns:
        """The columns of an instance, created if it has none."""
        known = self._runs.get(instance)
        if isinstance(known, _Columns):
            return known
        columns = self._runs[instance] = _Columns()
        if known is not None:
            columns.add(*known)
        return columns


class _Columns:
    """Many runs of one instance, sorted; 24 bytes each."""

    __slots__ = ("_firsts", "_lasts", "_places")

    def __init__(self) -> None:
        self._firsts = array("Q")
        #: The last counter of each run, not the one after it, which may not fit 64 bits.
        self._lasts = array("Q")
        self._places = array("Q")

    def find(self, run: IdRun) -> list[IdRunPlace]:
        if run.first_counter > self._lasts[-1]:
            return []
        found = []
        index = max(0, bisect_right(self._firsts, run.first_counter) - 1)
        while index < len(self._firsts) and self._firsts[index] < run.next_counter:
            first = max(self._firsts[index], run.first_counter)
            after = min(self._lasts[index] + 1, run.next_counter)
            if first < after:
                found.append(IdRunPlace(IdRun(run.instance, first, after), self._places[index]))
            index += 1
        return found

    def extend(self, firsts: array[int], lasts: array[int], places: array[int]) -> None:
        """Extend with sorted runs.

        If they belong at the end, as usual, they are copied as a whole.
        """
        if not self._firsts or firsts[0] > self._firsts[-1]:
            self._firsts += firsts
            self._lasts += lasts
            self._places += places
            return
        for first, last, place in zip(firsts, lasts, places, strict=True):
            self.add(first, last + 1, place)

    def add(self, first: int, after: int, place: int) -> None:
        index = bisect_right(self._firsts, first)
        self._firsts.insert(index, first)
        self._lasts.insert(index, after - 1)
        self._places.insert(index, place)


class Era(NamedTuple):
    """Identifies a generation of a window: the offset of its first frame, and the time when it was stored."""

    first_offset: int
    first_stored_at_ms: int


class Added(NamedTuple):
    """One frame that was added to a window."""

    era: Era
    offset: int
    stored_at_ms: int
    ids: SubjectIds


class _Generation:
    __slots__ = ("era", "ids", "last_stored_at_ms", "tables")

    def __init__(self, era: Era) -> None:
        self.tables: defaultdict[str, RunTable] = defaultdict(RunTable)
        self.ids = 0
        self.era = era
        self.last_stored_at_ms = era.first_stored_at_ms


class DedupeWindow:
    """The ids of the newest frames. Belongs to the writer thread.

    Requires of the caller: frames are added in the order of their offsets.
    """

    def __init__(self, *, ids_max: int, age_ms: int) -> None:
        self._ids_max = ids_max
        self._age_ms = age_ms
        #: Newest first, because repeats are mostly of recent messages.
        self._generations: list[_Generation] = []
        self.ids = 0
        #: Called with each added frame; `journal.py` stores them for a restart.
        self.on_added: Callable[[Added], object] = lambda _: None

    @property
    def is_empty_for_good(self) -> bool:
        """Whether the options disable the window."""
        return not self._ids_max or not self._age_ms

    @property
    def first_offset(self) -> int | None:
        """Offset of the oldest frame in the window; None if it is empty."""
        return self._generations[-1].era.first_offset if self._generations else None

    def find(self, ids: SubjectIds) -> list[Known]:
        """The remembered ones of these ids, with the offsets of their frames."""
        found: list[Known] = []
        for subject, runs in ids.items():
            for generation in self._generations:
                table = generation.tables.get(subject)
                if table is not None:
                    found += [Known(subject, *known) for run in runs for known in table.find(run)]
        return found

    def add(self, ids: SubjectIds, *, offset: int, stored_at_ms: int) -> None:
        """Remember the ids of a frame. Requires: none of them is remembered yet."""
        if self.is_empty_for_good:
            return
        generation = self._newest(offset, stored_at_ms)
        generation.last_stored_at_ms = stored_at_ms
        for subject, runs in ids.items():
            table = generation.tables[subject]
            for run in runs:
                table.add(run, offset)
                count = run.next_counter - run.first_counter
                generation.ids += count
                self.ids += count
        self.forget(stored_at_ms)
        self.on_added(Added(generation.era, offset, stored_at_ms, ids))

    def restore(
        self, era: Era, columns: Mapping[str, RunColumns], *, last_stored_at_ms: int
    ) -> None:
        """Restore the ids of one generation from before a restart: sorted columns by subject.

        Requires: generations are restored in order.
        """
        if self.is_empty_for_good:
            return
        if not self._generations or self._generations[0].era != era:
            self._generations.insert(0, _Generation(era))
        generation = self._generations[0]
        generation.last_stored_at_ms = last_stored_at_ms
        for subject, runs in columns.items():
            generation.tables[subject].add_sorted(runs)
            count = sum(runs.lasts) - sum(runs.firsts) + len(runs.firsts)
            generation.ids += count
            self.ids += count
        self.forget(last_stored_at_ms)

    def forget(self, now_ms: int) -> None:
        """Forget the ids that a frame stored at `now_ms` would push out."""
        while self._generations:
            oldest = self._generations[-1]
            is_old = oldest.last_stored_at_ms + self._age_ms < now_ms
            if not is_old and self.ids - oldest.ids < self._ids_max:
                return
            self._generations.pop()
            self.ids -= oldest.ids

    def _newest(self, offset: int, stored_at_ms: int) -> _Generation:
        if self._generations:
            newest = self._generations[0]
            is_full = newest.ids * GENERATIONS >= self._ids_max
            age_ms = stored_at_ms - newest.era.first_stored_at_ms
            if not is_full and age_ms * GENERATIONS < self._age_ms:
                return newest
        self._generations.insert(0, _Generation(Era(offset, stored_at_ms)))
        return self._generations[0]
