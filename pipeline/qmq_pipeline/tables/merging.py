"""Small files are merged: which commits of a log's table one commit is to stand for.

A run of `ingest` leaves a file in every table that it has rows for, so short runs leave thousands of small ones.
Commits of a log follow each other, and their names tell how much of the log they hold. So the names tell what to merge:
commits that follow each other, of which none holds more than all the later ones together, as soon as there are enough of
them or they fill a file. A file that was merged is so merged again only into one at least twice as long: each row is
written some few times, and of `n` small runs there remain about log `n` files.

What a merged commit says of its range is what the runs would have said that read it at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from qmq_pipeline.tables.commits import ALTERED, ALTERED_COUNT, EXPIRED, DataFile, RangeFacts

#: So many commits are worth a merge: each one costs whoever reads the table a file to open.
MERGE_COMMITS: Final = 32
#: Bytes of log that are enough for one file. A merge holds twice as much in memory at most.
MERGED_BYTES: Final = 16 * 1024 * 1024
#: The same for outboxes, whose rows have no body.
MERGED_ROWS: Final = 100_000
#: What fills a file is not merged again, so fewer are worth it.
_FULL_COMMITS: Final = 4
#: How long files stay that were merged, for those who read them right now.
MERGED_KEPT_S: Final = 3_600.0
Runs = Mapping[str, Sequence[Sequence[int]]]


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """One commit: the part of the log that it holds, by its name. Of an outbox rows are counted in place of bytes."""

    first: int
    next: int
    name: str

    @property
    def bytes(self) -> int:
        """How much of the log that is."""
        return self.next - self.first


def counted_spans(spans: Iterable[Span]) -> list[Span]:
    """Those that are in no other one, in order of the log."""
    counted: list[Span] = []
    for one in sorted(spans, key=lambda span: (span.first, -span.next)):
        if not counted or one.next > counted[-1].next:
            counted.append(one)
    return counted


def mergeable(spans: Sequence[Span], *, commits_min: int, bytes_enough: int) -> list[list[Span]]:
    """What is to be merged, each list into one, in order of the log. Requires: `counted_spans`."""
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
    """Ranges that can be one; what expired unread stays by itself."""
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
    """What these ranges say together. Requires: they follow each other."""
    assert all(one.next == other.first for one, other in pairwise(ranges))
    at_ms = [one for one in ranges if one.last_at_ms]
    return RangeFacts(
        source=ranges[0].source,
        first=ranges[0].first,
        next=ranges[-1].next,
        rows=sum(one.rows for one in ranges),
        files=tuple(files),
        sequences=_joined(one.sequences for one in ranges),
        lost=_joined(one.lost for one in ranges),
        first_at_ms=at_ms[0].first_at_ms if at_ms else 0,
        last_at_ms=at_ms[-1].last_at_ms if at_ms else 0,
        notes=_notes(ranges),
    )


def _notes(ranges: Sequence[RangeFacts]) -> dict[str, Any]:
    """Those of the end, as the next run goes on from them, and the altered records of all."""
    notes = {name: value for name, value in ranges[-1].notes.items() if name != ALTERED}
    altered = [row for one in ranges for row in one.notes.get(ALTERED, ())]
    if altered:
        notes[ALTERED] = altered
        notes[ALTERED_COUNT] = sum(one.notes.get(ALTERED_COUNT, 0) for one in ranges)
    return notes


def _joined(every: Iterable[Runs]) -> dict[str, list[tuple[int, int]]]:
    """Runs of each subject in order; those that follow each other become one."""
    joined: dict[str, list[tuple[int, int]]] = {}
    for runs in every:
        for subject, some in runs.items():
            known = joined.setdefault(subject, [])
            for first, after in some:
                if known and known[-1][1] == first:
                    known[-1] = (known[-1][0], int(after))
                else:
                    known.append((int(first), int(after)))
    return joined
