"""The number of crash states of a run, summed up over all test processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.crash.enumeration import CHECKED, SEED

PROPERTY = "crash_states"
#: A default run crashes recoveries and second lives in one of so many.
OPENED = 2
#: Such a test is up to a quarter of a minute of pure processor time, and waits for nobody.
ENUMERATION_S_MAX = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever counts crash states may take the time that they take on a small, busy machine."""
    for item in items:
        if "count_states" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(ENUMERATION_S_MAX))


@pytest.fixture
def one_in(request: pytest.FixtureRequest) -> int:
    """Of so many crash states one is checked; each of them before a release."""
    return 1 if request.config.getoption("--release") else CHECKED


@pytest.fixture
def sparser(one_in: int) -> int:
    """Of so many openings one is crashed, beside what a test leaves out anyway."""
    return min(one_in, OPENED)


@pytest.fixture
def count_states(record_property: Callable[[str, object], None]) -> Callable[[int], None]:
    """Tell how many different crash states a test has gone through."""
    return lambda states: record_property(PROPERTY, states)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many there were."""
    found = [
        states
        for report in terminalreporter.stats.get("passed", [])
        for name, states in report.user_properties
        if name == PROPERTY
    ]
    if found:
        is_release = terminalreporter.config.getoption("--release")
        checked = "each" if is_release else f"a sample, one in {CHECKED} and all of rare outcomes,"
        text = f"{sum(found):,} different crash states, {checked} checked, seed {SEED}"
        terminalreporter.write_line(text)
