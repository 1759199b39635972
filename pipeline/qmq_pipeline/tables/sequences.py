"""Runs of sequences of each subject, as counts and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

#: subject → runs (first, next), in order.
Runs = Mapping[str, Sequence[Sequence[int]]]
#: How many runs a text names.
_NAMED_MAX: Final = 5


def count_in(runs: Runs) -> int:
    """The number of sequences in these runs."""
    return sum(after - first for some in runs.values() for first, after in some)


def named(runs: Runs) -> str:
    """For messages: `orders 120 to 149, payments 7`, and how many more."""
    texts = [
        f"{subject} {first}" + (f" to {after - 1}" if after - first > 1 else "")
        for subject, some in sorted(runs.items())
        for first, after in some
    ]
    more = len(texts) - _NAMED_MAX
    return ", ".join(texts[:_NAMED_MAX]) + (f" and {more:,} more runs" if more > 0 else "")
