"""Chooses which commits of a table to merge into one.

A run of `ingest` leaves a file in every table that it has rows for, so short runs leave thousands
of small files. A commit's name says which part of the log it holds, so the names alone tell what to
merge: consecutive commits, none of them longer than all later ones together, as soon as there are
enough of them or they fill a file. A merged file is merged again only into one at least twice as
long. So each row is rewritten a few times, and of `n` small runs about log `n` files remain.

A merged commit says of its range what a single run over the whole range would have said.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from qmq_pipeline.tables.commits import ALTERED, ALTERED_COUNT, EXPIRED, DataFile, RangeFacts
from qmq_pipeline.tables.sequences import joined

#: Enough commits to be worth a merge: each costs readers of the table one file to open.
MERGE_COMMITS: Final = 32
#: Bytes of log that make a full file. A merge holds twice as much in memory at most.
MERGED_BYTES: Final = 16 * 1024 * 1024
#: The same for outboxes, whose rows have no body.
MERGED_ROWS: Final = 100_000
#: A full file is not merged again, so fewer commits are enough.
_FULL_COMMITS: Final = 4
#: How long merged files stay, for queries that are reading them.
MERGED_KEPT_S: Final = 3_600.0


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """One commit: the part of the log that it holds, by its name. For an outbox, rows are counted in place of bytes."""

    first: int
    next: int
    name: str

    @property
    def bytes(self) -> int:
        """The length of that part."""
        return self.next - self.first


def counted_spans(spans: Iterable[Span]) -> list[Span]:
    """The spans that no other one contains, in order of the log."""
    counted: list[Span] = []
    for one in sorted(spans, key=lambda span: (span.first, -span.next)):
        if not counted or one.next > counted[-1].next:
            counted.append(one)
    return counted


def mergeable(spans: Sequence[Span], *, commits_min: int, bytes_enough: int) -> list[list[Span]]:
    """Lists of commits to be merged into one each, in order of the log. Requires: `counted_spans`."""
    found: list[list[Span]] = []
    some: list[Span] = []
    held = 0
    for one in reversed(spans):
        if some and not (one.bytes <= held < bytes_enough and one.next == some[-1].first):
            found.append(some[::-1])
            some, held = [], 0
        if one.bytes < bytes_enough:
            some.append(one)
            held += one.bytes
    found.append(some[::-1])
    return [
        one
        for one in reversed(found)
        if len(one) >= (_FULL_COMMITS if _held(one) >= bytes_enough else commits_min)
    ]


def _held(spans: Iterable[Span]) -> int:
    return sum(one.bytes for one in spans)


def between_gaps(ranges: Iterable[RangeFacts]) -> Iterator[list[RangeFacts]]:
    """Groups of ranges that can be merged; a range that expired unread stays by itself."""
    some: list[RangeFacts] = []
    for one in ranges:
        if one.notes.get(EXPIRED):
            yield from ([some] if some else [])
            yield [one]
            some = []
        else:
            some.append(one)
    yield from ([some] if some else [])


def merged_facts(ranges: Sequence[RangeFacts], files: Iterable[DataFile]) -> RangeFacts:
    """The facts of these ranges as one. Requires: they follow each other."""
    assert all(one.next == other.first for one, other in pairwise(ranges))
    at_ms = [one for one in ranges if one.last_at_ms]
    return RangeFacts(
        source=ranges[0].source,
        first=ranges[0].first,
        next=ranges[-1].next,
        rows=sum(one.rows for one in ranges),
        files=tuple(files),
        sequences=joined(one.sequences for one in ranges),
        lost=joined(one.lost for one in ranges),
        first_at_ms=at_ms[0].first_at_ms if at_ms else 0,
        last_at_ms=at_ms[-1].last_at_ms if at_ms else 0,
        notes=_notes(ranges),
    )


def _notes(ranges: Sequence[RangeFacts]) -> dict[str, Any]:
    """The notes of the last range, where the next run continues, and the altered records of all."""
    notes = {name: value for name, value in ranges[-1].notes.items() if name != ALTERED}
    altered = [row for one in ranges for row in one.notes.get(ALTERED, ())]
    if altered:
        notes[ALTERED] = altered
        notes[ALTERED_COUNT] = sum(one.notes.get(ALTERED_COUNT, 0) for one in ranges)
    return notes
