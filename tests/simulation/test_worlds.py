"""Every promise of the whole way, held in worlds where anything may go wrong; one seed is one world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest

from tests.simulation.conftest import Tell
from tests.simulation.database import Databases
from tests.simulation.play import play

#: The first worlds, and others, so that two of them meet each planted bug.
WORLDS: Final = (*range(40), 54, 83, 99, 165, 169, 193, 200, 663)
WORLDS_IN_RELEASE: Final = 40_000
#: Of one test, so that several test processes share them.
WORLDS_OF_A_TEST: Final = 10


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" not in metafunc.fixturenames:
        return
    config = metafunc.config
    seeds: Sequence[int] = range(WORLDS_IN_RELEASE) if config.getoption("--release") else WORLDS
    if (seed := config.getoption("--seed")) is not None:
        seeds = [seed]
    firsts = range(0, len(seeds), WORLDS_OF_A_TEST)
    portions = [seeds[first : first + WORLDS_OF_A_TEST] for first in firsts]
    metafunc.parametrize("seeds", portions, ids=[f"{one[0]}-{one[-1]}" for one in portions])


def test_every_promise_is_kept_whatever_happens_on_the_whole_way(
    seeds: Sequence[int], worlds: Databases, must_be_good: Tell
) -> None:
    for seed in seeds:
        must_be_good(play(seed, worlds))
