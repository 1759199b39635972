"""Ranges with and without values, against sets of numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from qmq_client.group.ranges import RangeSet, Spans

NUMBERS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Painted:
    first: int
    next: int
    colour: int

    @property
    def memory_bytes(self) -> int:
        return 10 + self.colour

    def cut(self, first: int, next_: int) -> Painted:
        return replace(self, first=first, next=next_)


def some_range() -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, NUMBERS), st.integers(0, NUMBERS)).map(
        lambda pair: (min(pair), max(pair) + 1)
    )


@given(st.lists(some_range()), some_range())
def test_a_range_set_holds_what_was_added_and_names_what_is_missing(
    added: list[tuple[int, int]], asked: tuple[int, int]
) -> None:
    ranges, model = RangeSet(), set[int]()
    for first, next_ in added:
        ranges.add(first, next_)
        model.update(range(first, next_))
    assert {number for first, next_ in ranges for number in range(first, next_)} == model
    bounds = [bound for pair in ranges for bound in pair]
    assert bounds == sorted(set(bounds)), "merged, apart and in order"
    missing = [number for part in ranges.missing(*asked) for number in range(*part)]
    assert missing == [number for number in range(*asked) if number not in model]


@given(st.lists(some_range(), min_size=1), st.integers(0, 5))
def test_a_range_set_forgets_its_lowest_ranges(added: list[tuple[int, int]], kept: int) -> None:
    ranges = RangeSet()
    for pair in added:
        ranges.add(*pair)
    before = list(ranges)
    ranges.forget_lowest(kept)
    assert list(ranges) == (before[-kept:] if kept else [])


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "take", "change"]), some_range(), st.integers(0, 3)),
        max_size=30,
    ),
    some_range(),
)
def test_spans_behave_like_a_mapping_of_numbers(
    steps: list[tuple[str, tuple[int, int], int]], asked: tuple[int, int]
) -> None:
    spans: Spans[Painted] = Spans()
    model: dict[int, int] = {}
    for step, (first, next_), colour in steps:
        held = {n: model[n] for n in range(first, next_) if n in model}
        if step == "add" and not held:
            spans.add(Painted(first=first, next=next_, colour=colour))
            model.update(dict.fromkeys(range(first, next_), colour))
        elif step == "take":
            assert numbers(spans.take(first, next_)) == held
            for number in held:
                del model[number]
        elif step == "change":
            changed = spans.change(first, next_, lambda span: replace(span, colour=9))
            assert numbers(changed) == dict.fromkeys(held, 9)
            model.update(dict.fromkeys(held, 9))
    assert numbers(list(spans)) == model
    assert spans.count == len(model)
    assert (
        spans.memory_bytes == spans.copy().memory_bytes == sum(span.memory_bytes for span in spans)
    )
    assert numbers(spans.copy().take(*asked)) == {n: model[n] for n in range(*asked) if n in model}
    assert numbers(list(spans)) == model
    at = spans.at(asked[0])
    assert (None if at is None else at.colour) == model.get(asked[0])


def numbers(spans: list[Painted]) -> dict[int, int]:
    return {number: span.colour for span in spans for number in range(span.first, span.next)}
