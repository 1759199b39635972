"""The kit that interrupts work where Python would: every look, once each, and with what it raises."""

from __future__ import annotations

import gc
import signal
import threading
from contextlib import suppress
from typing import Any

import pytest

from tests.kit.interrupting import Interruption, at_each_look


def twice(value: int) -> int:
    return value + value


def work() -> list[int]:
    doubles = []
    for each in range(2):
        doubles.append(twice(each))
    return doubles


def test_each_look_is_found_once() -> None:
    calls: list[int] = []
    places = [one.place for one in each_of(lambda: calls.append(1))]
    assert places[-1] == ""
    assert len(calls) == len(places) - 1
    functions = {place.rpartition(" ")[2] for place in places if place}
    assert {"work", "twice"} <= functions


def each_of(act: Any) -> list[Interruption]:
    found = []
    for interruption in at_each_look(act, within=[__file__]):
        interruption.around(work)
        found.append(interruption)
    return found


def test_what_is_raised_comes_out() -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    interruption = Interruption(fail, within=[__file__], at=1)
    with pytest.raises(KeyboardInterrupt):
        interruption.around(work)
    assert interruption.place


class Circle:
    """Garbage for the collector alone, which says goodbye by a function that looks."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        twice(1)


def test_garbage_is_not_interrupted_in_place_of_the_work() -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    def leave_garbage() -> None:
        for each in range(10):
            Circle()
            twice(each)

    raised = 0
    before = gc.get_threshold()
    gc.set_threshold(2)
    try:
        for interruption in at_each_look(fail, within=[__file__]):
            try:
                interruption.around(leave_garbage)
            except KeyboardInterrupt:
                raised += 1
    finally:
        gc.set_threshold(*before)
    assert raised == interruption.at > 20


def test_other_files_do_not_count() -> None:
    interruption = Interruption(lambda: pytest.fail("never"), within=[signal.__file__], at=0)
    interruption.around(work)
    assert not interruption.place


def stuck_after(enter: Any, is_free: Any) -> list[str]:
    """Where what is raised leaves a lock taken."""

    def fail() -> None:
        raise KeyboardInterrupt

    places = []
    for interruption in at_each_look(fail, within=[__file__, threading.__file__]):
        lock = enter()

        def hold(lock: Any = lock) -> None:
            with lock:
                twice(1)

        with suppress(KeyboardInterrupt):
            interruption.around(hold)
        if not is_free(lock):
            places.append(interruption.place)
    return places


def test_a_lock_is_left_in_order_and_a_condition_is_not() -> None:
    """Which is why no lock of ours that a main thread may take is entered through a condition."""

    def is_free(lock: Any) -> bool:
        taken: list[bool] = []
        other = threading.Thread(target=lambda: taken.append(lock.acquire(blocking=False)))
        other.start()
        other.join()
        return taken[0]

    assert stuck_after(threading.Lock, is_free) == []
    assert stuck_after(threading.RLock, is_free) == []
    assert stuck_after(threading.Condition, is_free) != []
