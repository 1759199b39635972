"""Log lines of the watchdog."""

from __future__ import annotations

import pytest

from qmq_watchdog.events import event_line


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("orders", "orders"),
        ("größer", "größer"),
        ("no such table", '"no such table"'),
        ("a\nb", '"a\\nb"'),
        ("a\rb", "a\\rb"),
        ("\x1b[2J", "\\x1b[2J"),
        ("said \x9b2J", '"said \\x9b2J"'),
        (True, "true"),
        (0.250, "0.25"),
    ],
)
def test_a_field_is_shown_on_one_line_and_steers_no_terminal(value: object, shown: str) -> None:
    assert event_line("sweep.failed", {"error": value}) == f"sweep.failed error={shown}"


def test_fields_that_say_nothing_are_left_out() -> None:
    assert event_line("sweep.done", {"error": "", "rows": None, "sent": 0}) == "sweep.done sent=0"
