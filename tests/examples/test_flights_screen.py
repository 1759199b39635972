"""What the demo shows, on a terminal and without one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from examples.flights.screen import Screen


def test_a_terminal_gets_a_bar_with_a_speed_for_each_service() -> None:
    output = io.StringIO()
    with Screen(10, 20, Console(file=output, force_terminal=True, width=120)) as screen:
        screen.show("departures", 10)
        screen.show("tallies", 25)
    text = output.getvalue()
    assert "10/10" in text
    assert "20/20" in text  # what comes again does not count beyond the end
    assert "/s" in text


def test_without_a_terminal_lines_say_how_far_each_service_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Screen(10, 20, Console(file=io.StringIO(), force_terminal=False)) as screen:
        screen.show("departures", 3)
    assert "departures 3/10" in capsys.readouterr().err
