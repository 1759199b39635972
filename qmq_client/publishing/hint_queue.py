"""The publish queue: committed messages for the publisher; bounded, never blocks and never raises.

Hints that do not fit are dropped and counted: their rows are stored and fall due, and the watchdog
sends them. The direct path has no other back-pressure.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final

from qmq_client.outbox.sending.notes import Hint

#: More messages than will ever wait, so that an awake taker is not woken.
_NEVER: Final = sys.maxsize


class HintQueue:
    """Filled by any number of threads, emptied by one."""

    def __init__(
        self, messages_max: int, on_dropped: Callable[[Hint], object] = lambda _: None
    ) -> None:
        """`on_dropped`: called with hints that did not fit, in the thread that put them; must not raise."""
        self._messages_max = messages_max
        self._on_dropped = on_dropped
        #: Reentrant: the garbage collector may end a session in the middle of `put`.
        self._lock = threading.RLock()
        self._waiting: deque[Hint] = deque()
        self._messages = 0
        #: The condition on which the taker sleeps.
        self._rings: SimpleQueue[None] = SimpleQueue()
        #: The taker is woken when this many messages wait.
        self._wake_at = _NEVER
        self._is_closed = False
        self.enqueued = 0
        self.dropped = 0

    def put(self, hint: Hint) -> None:
        """Add a hint unless the queue is full; wakes the taker if it waits for it.

        An empty queue accepts even a hint larger than the queue, which would otherwise never fit.
        """
        count = len(hint.rows)
        with self._lock:
            self.enqueued += count
            waiting = self._messages + count
            is_dropped = self._is_closed or (bool(self._waiting) and waiting > self._messages_max)
            if is_dropped:
                self.dropped += count
            else:
                self._messages = waiting
                self._waiting.append(hint)
                if waiting >= self._wake_at:
                    self._wake_at = _NEVER
                    self._rings.put(None)
        if is_dropped:
            self._on_dropped(hint)

    def close(self) -> None:
        """Drop all further hints, because the publisher has ended."""
        with self._lock:
            self._is_closed = True

    def take(self, messages_max: int) -> list[Hint]:
        """Whole hints in order, about `messages_max` messages, at least one if any wait."""
        taken: list[Hint] = []
        count = 0
        with self._lock:
            while self._waiting and count < messages_max:
                taken.append(self._waiting.popleft())
                count += len(taken[-1].rows)
            self._messages -= count
        return taken

    def wait(self, seconds: float | None, *, messages: int = 1) -> None:
        """Sleep until `messages` wait, `wake` is called, or the time is over. For the taker."""
        with self._lock:
            is_enough = self._messages >= messages
            self._wake_at = _NEVER if is_enough else messages
        with suppress(Empty):
            self._rings.get(timeout=0.0 if is_enough else seconds)
            while True:  # their condition is met now: one check is enough for all
                self._rings.get_nowait()
        self._wake_at = _NEVER

    def wake(self) -> None:
        """End the taker's sleep, or its next one."""
        self._rings.put(None)

    def __len__(self) -> int:
        return self._messages
