"""Workers for the tests of the benchmarks' processes."""

from __future__ import annotations

import sys

from benchmarks.worker import Control


def add(control: Control, *, first: int) -> None:
    """Say hello, then the sum of what was given and what is told."""
    print("this must not garble the lines")
    control.tell("hello")
    control.tell(first + control.hear())


def fail(control: Control) -> None:
    """End with a message."""
    control.tell("hello")
    sys.exit("no such luck")


def wait_for_ever(control: Control) -> None:
    """Never end by itself."""
    control.tell("hello")
    while True:
        control.hear()
