"""The corpus of hand-made histories: good ones pass, bad ones are found by exactly one oracle."""

from __future__ import annotations

import pytest

from tests.kit.checker import check
from tests.kit.verdict import Oracle
from tests.kit_tests.bad_fates import BAD_FATES
from tests.kit_tests.bad_runs import BAD_RUNS
from tests.kit_tests.case import Case
from tests.kit_tests.good_fates import GOOD_FATES
from tests.kit_tests.good_runs import GOOD_RUNS
from tests.kit_tests.scenes import Scene

GOOD = (*GOOD_FATES, *GOOD_RUNS)
BAD = (*BAD_FATES, *BAD_RUNS)


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.sentence)
def test_a_good_history_passes(case: Case) -> None:
    verdict = check(case.scene(Scene()).events, groups=case.groups, promises=case.promises)
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.sentence)
def test_a_bad_history_is_found_by_exactly_one_oracle(case: Case) -> None:
    verdict = check(case.scene(Scene()).events, groups=case.groups, promises=case.promises)
    assert set(verdict.totals) == {case.oracle}, str(verdict)
    assert verdict.findings[0].sentence


def test_every_oracle_has_two_bad_histories() -> None:
    found = [case.oracle for case in BAD]
    assert {oracle: found.count(oracle) >= 2 for oracle in Oracle} == dict.fromkeys(Oracle, True)
