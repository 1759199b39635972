"""Which commits are merged into one: few are left, and none is written often."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from qmq_pipeline.tables.merging import Span, mergeable


@pytest.mark.parametrize("seed", range(10))
def test_there_are_always_few_commits_and_each_row_is_written_few_times(seed: int) -> None:
    """Of random runs, some of them thousands of times as long as others."""
    draw = random.Random(seed)
    commits_min, enough = draw.choice((4, 32)), 1_000_000
    spans: list[Span] = []
    written = end = 0
    sizes = [draw.choice((1, 100, 10_000, 400_000)) for _ in range(3)]
    for _ in range(2_000):
        size = draw.randint(1, draw.choice(sizes))
        spans.append(Span(end, end + size, ""))
        end += size
        for some in mergeable(spans, commits_min=commits_min, bytes_enough=enough):
            assert all(one.next == other.first for one, other in pairwise(some))
            made = Span(some[0].first, some[-1].next, "")
            assert made.bytes < 2 * enough
            written += made.bytes
            at = spans.index(some[0])
            spans[at : at + len(some)] = [made]
        # Behind each file that is full: what is too few to be merged, of twice the length each time.
        assert len(spans) < (1 + end // enough) * 4 + commits_min * enough.bit_length()
    assert written < end * (1 + enough.bit_length())
    assert sum(one.bytes for one in spans) == end


def test_tables_of_old_short_runs_are_merged_too_from_the_first_to_the_last() -> None:
    spans = [Span(number, number + 1, "") for number in range(100_000)]
    found = mergeable(spans, commits_min=32, bytes_enough=1_000)
    assert [one for some in found for one in some] == spans
    assert {len(some) for some in found} == {1_000}
