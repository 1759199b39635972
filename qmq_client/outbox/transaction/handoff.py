"""From the commit hook to the publisher: a bounded queue that never blocks and never raises.

What does not fit is dropped and counted: its rows are stored, fall due by themselves, and the
watchdog sends them. That is the whole back-pressure of the direct path.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final

import msgspec

from qmq_client.outbox.row import OutboxRow

#: More messages than will ever wait: the taker is awake.
_NEVER: Final = sys.maxsize


# Made by each commit with messages, so it is a type that takes a fifth of a dataclass's time.
class HandOver(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The messages of one transaction, on their way to the publisher."""

    rows: tuple[OutboxRow, ...]
    #: The owner that the rows were stored with.
    token: bytes
    #: Monotonic seconds when the first row was written; the time until they fall due runs from then.
    written_at_s: float
    #: Whether the commit is proven. If not, only rows that another connection can see may be sent.
    is_certain: bool


class HandoffQueue:
    """Filled by any number of threads, emptied by one."""

    def __init__(
        self,
        messages_max: int,
        on_dropped: Callable[[HandOver], object] = lambda _: None,
    ) -> None:
        """`on_dropped`: called with what did not fit, in the committing thread; must not raise."""
        self._messages_max = messages_max
        self._on_dropped = on_dropped
        # Reentrant: a signal handler may commit in the middle of `put`. Entered as itself and not through a
        # condition, whose `with` is written in Python and may be left locked by what a handler raises.
        self._lock = threading.RLock()
        self._waiting: deque[HandOver] = deque()
        #: Changed in single steps, and never below what waits, so it is right wherever it is interrupted.
        self._messages = 0
        #: What the taker sleeps at.
        self._rings: SimpleQueue[None] = SimpleQueue()
        #: The taker is rung for when this many messages wait.
        self._wake_at = _NEVER
        self._is_closed = False
        self.handed_over = 0
        self.dropped = 0

    def put(self, handed: HandOver) -> None:
        """Add unless full; wakes the taker if it waits for that.

        An empty queue accepts even what is larger than the whole queue: otherwise it would never
        fit.
        """
        count = len(handed.rows)
        with self._lock:
            self.handed_over += count
            waiting = self._messages + count if self._waiting else count
            is_full = waiting > self._messages_max and waiting > count
            is_dropped = is_full or self._is_closed
            if is_dropped:
                self.dropped += count
            else:
                self._messages = waiting
                try:
                    self._waiting.append(handed)
                finally:  # also if a signal handler raises here: it was added
                    if self._messages >= self._wake_at:
                        self._wake_at = _NEVER
                        self._rings.put(None)
        if is_dropped:
            self._on_dropped(handed)

    def close(self) -> None:
        """From now on drop everything: nobody will take it."""
        with self._lock:
            self._is_closed = True

    def take(self, messages_max: int) -> list[HandOver]:
        """Whole transactions in order, about `messages_max` messages, at least one if any wait."""
        taken: list[HandOver] = []
        count = 0
        with self._lock:
            while self._waiting and count < messages_max:
                handed = self._waiting.popleft()
                taken.append(handed)
                count += len(handed.rows)
            self._messages = self._messages - count if self._waiting else 0
        return taken

    def wait(self, seconds: float | None, *, messages: int = 1) -> None:
        """Sleep until `messages` wait, `wake` is called, or the time is over. For the taker."""
        with self._lock:
            is_enough = self._messages >= messages
            self._wake_at = _NEVER if is_enough else messages
        with suppress(Empty):
            self._rings.get(timeout=0.0 if is_enough else seconds)
            while True:  # what they announce is there: one look is enough for all
                self._rings.get_nowait()
        self._wake_at = _NEVER

    def wake(self) -> None:
        """End the taker's sleep, or its next one."""
        self._rings.put(None)

    def __len__(self) -> int:
        return self._messages if self._waiting else 0
