"""Runs of sequences, as commits note them: what was read of each subject, and what was lost of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

#: subject → runs (first, next), in order.
Runs = Mapping[str, Sequence[Sequence[int]]]
#: How many runs a text names.
_NAMED_MAX: Final = 5


def joined(every: Iterable[Runs]) -> dict[str, list[tuple[int, int]]]:
    """Runs of each subject in order; adjacent ones become one."""
    found: dict[str, list[tuple[int, int]]] = {}
    for runs in every:
        for subject, some in runs.items():
            known = found.setdefault(subject, [])
            for first, after in some:
                if known and known[-1][1] == first:
                    known[-1] = (known[-1][0], int(after))
                else:
                    known.append((int(first), int(after)))
    return found


def count_in(runs: Runs) -> int:
    """How many sequences these are."""
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
