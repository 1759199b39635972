"""The worlds are worth something: each bug of the list is met within a few of those that can meet it."""

from __future__ import annotations

from itertools import count, islice

import pytest

from tests.simulation.database import Databases
from tests.simulation.plan import plan_of
from tests.simulation.planted import BUGS, Bug
from tests.simulation.play import play

WORLDS_MAX = 40


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_a_planted_bug_is_met(bug: Bug, worlds: Databases, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = (seed for seed in count() if bug.suits(plan_of(seed)))
    bug.plant(monkeypatch)
    assert any(play(seed, worlds).faults for seed in islice(seeds, WORLDS_MAX))
