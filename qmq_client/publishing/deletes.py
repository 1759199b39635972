"""Rows that the broker has accepted and that are still to be deleted.

Gathered for a moment, so that one statement deletes many. While the database refuses, they are kept
and retried at growing intervals: neither a hurried publisher nor a long list may make it ask a
failing database in a tight loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

#: Ids that may wait while the database is locked; the rest fall due and become duplicates.
_IDS_MAX: Final = 100_000
#: This many are deleted at once instead of gathering more.
_IDS_AT_ONCE: Final = 500
_FIRST_PAUSE_S: Final = 0.1
#: The longest interval: no message waits for a delete, but its row falls due and is sent once more.
_PAUSE_S_MAX: Final = 2.0


class Deletes:
    """The ids, and when to delete them. Belongs to the thread that steps its publisher."""

    def __init__(self, delay_ms: int) -> None:
        self._delay_s = delay_ms / 1000
        #: In the order of their acceptance.
        self.message_ids: list[bytes] = []
        self._due_s = 0.0
        #: Not before this time, however hurried; and the last interval, 0 while the database answers.
        self._refused_until_s = float("-inf")
        self._pause_s = 0.0
        self._held_until_s = float("-inf")

    def add(self, message_ids: Sequence[bytes], now_s: float) -> None:
        """These were accepted."""
        if not self.message_ids:
            self._due_s = now_s + self._delay_s
        self.message_ids += message_ids
        del self.message_ids[:-_IDS_MAX]

    def hurry(self, now_s: float) -> None:
        """Others wait for these to be gone."""
        self._due_s = max(now_s, self._refused_until_s)

    def put_off(self, until_s: float) -> None:
        """Not before this time, unless hurried."""
        self._due_s = max(self._due_s, until_s)
        self._held_until_s = until_s

    def is_due(self, now_s: float, *, is_hurried: bool) -> bool:
        """Whether to delete now; `is_hurried`: without gathering."""
        if not self.message_ids or now_s < self._refused_until_s:
            return False
        if is_hurried:
            return True
        is_full = len(self.message_ids) >= _IDS_AT_ONCE
        return now_s >= self._held_until_s and (is_full or now_s >= self._due_s)

    def wait_s(self, now_s: float) -> float | None:
        """How long until they are due by themselves; None when there are none."""
        return self._due_s - now_s if self.message_ids else None

    def on_deleted(self) -> None:
        """All of them are gone."""
        self.message_ids = []
        self._pause_s = 0.0

    def on_failure(self, now_s: float) -> None:
        """The database refused: wait longer than the last time."""
        self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _PAUSE_S_MAX)
        self._due_s = self._refused_until_s = now_s + self._pause_s
