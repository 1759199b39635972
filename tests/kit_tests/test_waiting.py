"""Waiting for what nobody announces ends when it is so, and at the deadline."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.kit.waiting import becomes, wait_for


def after(looks: int) -> Callable[[], bool]:
    """Is so at this look and from then on."""
    left = [looks]

    def look() -> bool:
        left[0] -= 1
        return left[0] <= 0

    return look


def test_it_returns_at_the_first_look_that_finds_it_so() -> None:
    wait_for(after(1), within_s=0.0)
    wait_for(after(3))
    assert becomes(after(2))


def test_what_does_not_come_to_be_fails_with_the_complaint_of_the_end() -> None:
    looks: list[int] = []
    with pytest.raises(AssertionError, match="after 1"):
        wait_for(lambda: looks.append(1), lambda: f"after {len(looks)}", within_s=0.0)
    with pytest.raises(AssertionError, match="it did not happen"):
        wait_for(lambda: False, within_s=0.0)
    assert not becomes(lambda: False, within_s=0.0)
