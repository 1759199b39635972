"""Calls at a later time, and an end while one is being made."""

from __future__ import annotations

import threading

import pytest

from qmq_client.clock import SYSTEM_CLOCK
from qmq_watchdog.daemon import Waits
from tests.kit.waiting import DEADLINE_S, wait_for


def test_a_call_is_made_at_its_time_or_when_all_are_made_now() -> None:
    made, first, second = [], threading.Event(), threading.Event()

    def call(name: str, event: threading.Event) -> None:
        made.append(name)
        event.set()

    waits = Waits()
    waits.start()
    now_ms = SYSTEM_CLOCK.now_ms()
    waits.call_at(now_ms + 3_600_000, call, "in an hour", second)
    waits.call_at(now_ms, call, "now", first)
    assert first.wait(DEADLINE_S)
    assert made == ["now"]
    waits.call_all_now()
    assert second.wait(DEADLINE_S)
    waits.end()
    assert made == ["now", "in an hour"]


@pytest.mark.parametrize("more", [0, 3])
def test_an_end_while_a_call_is_being_made_waits_for_it_and_spoils_nothing(more: int) -> None:
    begun, going_on = threading.Event(), threading.Event()
    made: list[int] = []

    def call(number: int) -> None:
        if not number:  # from elsewhere, others would have to wait for this one
            for other in range(1, 1 + more):
                waits.call_at(0, call, other)
        begun.set()
        assert going_on.wait(DEADLINE_S)
        made.append(number)

    waits = Waits()
    waits.start()
    waits.call_at(0, call, 0)
    assert begun.wait(DEADLINE_S)
    ending = threading.Thread(target=waits.end)
    ending.start()
    wait_for(lambda: not waits.is_running, "the end begins", within_s=DEADLINE_S)
    assert ending.is_alive()
    going_on.set()
    ending.join(DEADLINE_S)
    assert not ending.is_alive()
    assert made
