"""A flag that a signal handler may set in the thread that waits for it."""

from __future__ import annotations

from contextlib import suppress
from math import inf
from queue import Empty, SimpleQueue
from typing import Final

#: Interval of wake-ups: a signal that arrives after Python's last check and before the thread
#: sleeps does not wake it; its handler runs at the next wake-up.
_LOOK_S: Final = 0.25


class SignalFlag:
    """Like `threading.Event` with one thread that waits, but `set` never waits for a lock.

    Python runs signal handlers in the main thread, between any two of its steps. If a signal
    arrives while that thread is inside `Event.wait` or `Event.clear`, the interrupted thread holds
    the event's lock, and `Event.set` waits forever. `SimpleQueue.put` is reentrant by its
    documentation.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._wakings: SimpleQueue[None] = SimpleQueue()

    def is_set(self) -> bool:
        """Whether the flag is set."""
        return self._is_set

    def set(self) -> None:
        """Set the flag, and wake the waiting thread. Safe in signal handlers and in any thread."""
        if not self._is_set:
            self._is_set = True
            self._wakings.put(None)

    def clear(self) -> None:
        """Clear the flag; only for the waiting thread. A concurrent `set` is not lost."""
        self._is_set = False
        with suppress(Empty):
            self._wakings.get_nowait()

    def wait(self, timeout_s: float = inf) -> bool:
        """Block until it is set, or `timeout_s` has passed; returns whether it is set."""
        left_s = timeout_s
        while not self._is_set and left_s > 0:
            look_s = min(left_s, _LOOK_S)
            with suppress(Empty):
                self._wakings.get(timeout=look_s)
            left_s -= look_s
        return self._is_set
