"""The number of crash states of a run, summed up over all test processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.crash.enumeration import SEED

PROPERTY = "crash_states"


@pytest.fixture
def count_states(record_property: Callable[[str, object], None]) -> Callable[[int], None]:
    """Tell how many different crash states a test has checked."""
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
        text = f"{sum(found):,} different crash states checked, seed {SEED}"
        terminalreporter.write_line(text)
