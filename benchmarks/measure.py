"""How figures are taken: in turns, in rounds, and never without their spread.

A machine that others use moves every absolute figure by a factor of two, so what is compared runs
in turns within one round (A B, then B A, …) and ratios are made within the round and only then
summed up. Pure computation on values that the benchmarks hand in; `interleave` merely calls.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

Outcome = TypeVar("Outcome")


class Effort(StrEnum):
    """How much is run. Only `FULL` makes figures to rely on."""

    #: Some milliseconds of each code path, for the tests.
    TINY = "tiny"
    #: Three short rounds: a look while working.
    QUICK = "quick"
    FULL = "full"

    @property
    def rounds(self) -> int:
        """Rounds of each benchmark; below five the median says little."""
        return {Effort.TINY: 1, Effort.QUICK: 3, Effort.FULL: 5}[self]

    def pick(self, *, tiny: int, quick: int, full: int) -> int:
        """The size that belongs to this effort."""
        return {Effort.TINY: tiny, Effort.QUICK: quick, Effort.FULL: full}[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """What a row shows of its samples."""

    min: float
    median: float
    max: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Requires: at least one sample."""
        return cls(min=min(samples), median=statistics.median(samples), max=max(samples))


def interleave(
    variants: Mapping[str, Callable[[], Outcome]], *, rounds: int
) -> dict[str, list[Outcome]]:
    """Run every variant once in each round, in the order given and then in the reverse of it.

    The outcomes of one variant stand in the order of the rounds, so that `paired_ratios` compares
    what ran side by side.
    """
    outcomes: dict[str, list[Outcome]] = {name: [] for name in variants}
    for i in range(rounds):
        for name in list(variants)[:: 1 if i % 2 == 0 else -1]:
            outcomes[name].append(variants[name]())
    return outcomes


def paired_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """The ratio of each round. Requires: equally many of both."""
    return [above / below for above, below in zip(numerators, denominators, strict=True)]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all values do not exceed (nearest rank).

    Requires: at least one value, 0 < share ≤ 1.
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def elapsed_s(work: Callable[[], object]) -> float:
    """Seconds by the wall that one call takes."""
    started_ns = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - started_ns) / 1e9
