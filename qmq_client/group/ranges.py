"""Ranges of numbers: each with a value (`Spans`), or only as a set (`RangeSet`).

Leases, redeliveries and acked pull sequences are kept as ranges, never one by one: a pull of a
thousand messages is one lease, and its ack ends one lease. All ranges are half open.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, Self, TypeVar


class Span(Protocol):
    """A value that holds for every number from `first` to below `next`."""

    @property
    def first(self) -> int:
        """The first number, inclusive."""
        ...

    @property
    def next(self) -> int:
        """One after the last number."""
        ...

    @property
    def memory_bytes(self) -> int:
        """The memory of the span, roughly."""
        ...

    def cut(self, first: int, next_: int) -> Self:
        """The same value for a part of the range."""
        ...


S = TypeVar("S", bound=Span)


class Spans(Generic[S]):
    """Spans in order, without overlaps."""

    __slots__ = ("_spans", "count", "memory_bytes")

    def __init__(self) -> None:
        self._spans: list[S] = []
        #: How many numbers all spans cover together.
        self.count = 0
        #: The memory of all spans, roughly.
        self.memory_bytes = 0

    def __iter__(self) -> Iterator[S]:
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)

    def add(self, span: S) -> None:
        """Add a span. Requires: none of its numbers is covered yet."""
        spans = self._spans
        index = bisect_left(spans, span.first, key=_first)
        assert index == len(spans) or span.next <= spans[index].first, "spans overlap"
        assert index == 0 or spans[index - 1].next <= span.first, "spans overlap"
        spans.insert(index, span)
        self.count += span.next - span.first
        self.memory_bytes += span.memory_bytes

    def copy(self) -> Spans[S]:
        """An independent copy."""
        copied: Spans[S] = Spans()
        copied._spans, copied.count = self._spans.copy(), self.count
        copied.memory_bytes = self.memory_bytes
        return copied

    def at(self, number: int) -> S | None:
        """The span that covers `number`."""
        index = bisect_right(self._spans, number, key=_first) - 1
        if index < 0 or self._spans[index].next <= number:
            return None
        return self._spans[index]

    def take(self, first: int, next_: int) -> list[S]:
        """Remove the range and return its spans; the rest of a cut span stays."""
        from_index, to_index = self._part(first, next_)
        taken = self._spans[from_index:to_index]
        if not taken:
            return []
        pieces = [_cut(span, first, next_) for span in taken]
        kept: list[S] = []
        if taken[0].first < first:
            kept.append(taken[0].cut(taken[0].first, first))
        if taken[-1].next > next_:
            kept.append(taken[-1].cut(next_, taken[-1].next))
        self._spans[from_index:to_index] = kept
        self.count -= sum(piece.next - piece.first for piece in pieces)
        self.memory_bytes += sum(span.memory_bytes for span in kept) - sum(
            span.memory_bytes for span in taken
        )
        return pieces

    def change(self, first: int, next_: int, change: Callable[[S], S]) -> list[S]:
        """Replace each piece in the range by `change` of it; returns the new pieces."""
        pieces = [change(piece) for piece in self.take(first, next_)]
        for piece in pieces:
            self.add(piece)
        return pieces

    def _part(self, first: int, next_: int) -> tuple[int, int]:
        spans = self._spans
        from_index = bisect_right(spans, first, key=_first) - 1
        if from_index < 0 or spans[from_index].next <= first:
            from_index += 1
        return from_index, max(from_index, bisect_left(spans, next_, key=_first))


class RangeSet:
    """A set of numbers kept as merged ranges in order."""

    __slots__ = ("_firsts", "_nexts")

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._nexts: list[int] = []

    def __len__(self) -> int:
        return len(self._firsts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._firsts, self._nexts, strict=True)

    def add(self, first: int, next_: int) -> None:
        """Add the range and merge it with its neighbours."""
        if first >= next_:
            return
        from_index = bisect_left(self._nexts, first)
        to_index = bisect_right(self._firsts, next_)
        if from_index < to_index:
            first = min(first, self._firsts[from_index])
            next_ = max(next_, self._nexts[to_index - 1])
        self._firsts[from_index:to_index] = [first]
        self._nexts[from_index:to_index] = [next_]

    def missing(self, first: int, next_: int) -> list[tuple[int, int]]:
        """The parts of this range that are not in the set."""
        parts: list[tuple[int, int]] = []
        index = bisect_right(self._nexts, first)
        while first < next_ and index < len(self._firsts):
            if self._firsts[index] > first:
                parts.append((first, min(next_, self._firsts[index])))
            first = self._nexts[index]
            index += 1
        if first < next_:
            parts.append((first, next_))
        return parts

    def forget_lowest(self, kept: int) -> None:
        """Keep only the `kept` highest ranges."""
        surplus = len(self._firsts) - kept
        if surplus > 0:
            del self._firsts[:surplus], self._nexts[:surplus]


def _first(span: Span) -> int:
    return span.first


def _cut(span: S, first: int, next_: int) -> S:
    if first <= span.first and span.next <= next_:
        return span
    return span.cut(max(first, span.first), min(next_, span.next))
