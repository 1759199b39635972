"""The worlds are worth something: each bug of the list is met by those of a default run."""

from __future__ import annotations

import pytest

from tests.simulation.database import Databases
from tests.simulation.plan import plan_of
from tests.simulation.planted import BUGS, Bug
from tests.simulation.play import play
from tests.simulation.test_worlds import WORLDS


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_a_planted_bug_is_met(bug: Bug, worlds: Databases, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = [seed for seed in WORLDS if bug.suits(plan_of(seed))]
    bug.plant(monkeypatch)
    found = any(play(seed, worlds).faults for seed in seeds)
    assert found, (
        "by none of the worlds of a default run: look for one that does, and give it to them"
    )
