"""F24: the power is cut under a broker at work: real system calls, on a file system that forgets."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

import pytest

from tests.faults.store_fuse import cut_power, mounted
from tests.faults.store_judged import judged
from tests.kit.verdict import Oracle, Verdict

CUTS: Final = 6
CUTS_BEFORE_A_RELEASE: Final = 300


def judged_cuts(place: Path, cuts: int) -> Verdict:
    """A broker under load, whose power is cut so often, and the verdict on it."""

    def cut(rng: random.Random) -> None:
        cut_power(place, rng.randrange(2**30))

    return judged(place / "data", cuts, kind="power_cut", after_each=cut)


@pytest.mark.timeout(0)
def test_B1_B3_B7_B8_C1_whatever_a_power_cut_leaves_of_a_broker_at_work_nothing_is_lost(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    cuts = CUTS_BEFORE_A_RELEASE if request.config.getoption("--release") else CUTS
    with mounted(tmp_path / "disk") as place:
        verdict = judged_cuts(place, cuts)
    assert verdict.ok, verdict


def test_a_file_system_that_forgets_what_was_synced_is_noticed(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", is_forgetful=True) as place:
        verdict = judged_cuts(place, 1)
    assert verdict.totals.get(Oracle.LOST, 0) > 0, verdict
