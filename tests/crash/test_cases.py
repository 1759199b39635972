"""Every case of the list has a test that is there, or says why it cannot happen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.crash.case import Case
from tests.crash.cases import CASES

TESTS = Path(__file__).resolve().parents[1]
#: Of each letter so many.
COUNTS = {"A": 12, "B": 15, "C": 12, "D": 9, "E": 9, "F": 11, "G": 9, "H": 6}


@pytest.fixture(scope="module")
def functions() -> set[str]:
    """The names of all tests."""
    return {
        name
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_case_is_shown_by_tests_that_are_there(case: Case, functions: set[str]) -> None:
    assert case.told
    assert bool(case.tests) != bool(case.absent), "tests, or a reason why not"
    assert set(case.tests) <= functions


def test_no_case_is_left_out() -> None:
    numbers = [name for letter, count in COUNTS.items() for name in _numbers(letter, count)]
    assert list(CASES) == numbers


def _numbers(letter: str, count: int) -> list[str]:
    if letter == "F":
        return ["F1", "F2", "F2b", *(f"F{n}" for n in range(3, count))]
    return [f"{letter}{n}" for n in range(1, count + 1)]
