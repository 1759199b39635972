"""Half-open runs of sequences: records what was touched, and tells whether a range contains some of it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Final

#: Above this number of runs the smallest gaps are closed: then too much counts as touched, never
#: too little.
RUNS_MAX: Final = 256


class RunList:
    """Runs in order; no two touch each other."""

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        self._runs: list[tuple[int, int]] = []
        for first, after in runs:
            self.add(first, after)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, first: int, after: int) -> None:
        """Add a run. Requires: it is not empty."""
        place = bisect_left(self._runs, first, key=lambda run: run[1])
        last = place
        while last < len(self._runs) and self._runs[last][0] <= after:
            first, after = min(first, self._runs[last][0]), max(after, self._runs[last][1])
            last += 1
        self._runs[place:last] = [(first, after)]
        if len(self._runs) > 2 * RUNS_MAX:
            self._coarsen()

    def overlaps(self, first: int, after: int) -> bool:
        """Whether any run overlaps this range."""
        place = bisect_left(self._runs, first + 1, key=lambda run: run[1])
        return place < len(self._runs) and self._runs[place][0] < after

    def _coarsen(self) -> None:
        gaps = [self._runs[i + 1][0] - self._runs[i][1] for i in range(len(self._runs) - 1)]
        closed = sorted(gaps)[len(self._runs) - RUNS_MAX - 1]
        runs, self._runs = self._runs, []
        for first, after in runs:
            if self._runs and first - self._runs[-1][1] <= closed:
                self._runs[-1] = (self._runs[-1][0], after)
            else:
                self._runs.append((first, after))
