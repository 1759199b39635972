"""F25: the broker is killed under load, again and again; the history of all of it is judged."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

import pytest

from tests.faults.store_judged import judged

KILLS: Final = 20
KILLS_BEFORE_A_RELEASE: Final = 1_000


def _nothing_else(_: random.Random) -> None:
    """A killed process is all that happens: what it wrote is with the operating system."""


@pytest.mark.timeout(0)
def test_F25_B1_B3_B7_B8_C1_a_broker_killed_under_load_loses_alters_and_doubles_nothing(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kills = KILLS_BEFORE_A_RELEASE if request.config.getoption("--release") else KILLS
    verdict = judged(tmp_path / "data", kills, kind="crash", after_each=_nothing_else)
    assert verdict.ok, verdict
    print(verdict.to_json())
