"""Every promise of the whole way, held in worlds where anything may go wrong; one seed is one world."""

from __future__ import annotations

import pytest

from tests.simulation.conftest import Tell
from tests.simulation.database import Databases
from tests.simulation.play import play

WORLDS = 150
WORLDS_IN_RELEASE = 40_000
#: Of one test, so that several test processes share them.
WORLDS_OF_A_TEST = 10


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" not in metafunc.fixturenames:
        return
    config = metafunc.config
    if (seed := config.getoption("--seed")) is not None:
        portions = [range(seed, seed + 1)]
    else:
        count = WORLDS_IN_RELEASE if config.getoption("--release") else WORLDS
        firsts = range(0, count, WORLDS_OF_A_TEST)
        portions = [range(first, first + WORLDS_OF_A_TEST) for first in firsts]
    metafunc.parametrize("seeds", portions, ids=[f"{one[0]}-{one[-1]}" for one in portions])


def test_every_promise_is_kept_whatever_happens_on_the_whole_way(
    seeds: range, worlds: Databases, must_be_good: Tell
) -> None:
    for seed in seeds:
        must_be_good(play(seed, worlds))
