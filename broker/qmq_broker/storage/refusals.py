"""Log lines about work that the disk, or a full queue, has no room for.

Work of many kinds needs room, in several threads, and all of it tries again until there is some. So
a full disk is logged for each kind of work once, then at the 2nd, 4th, 8th … refusal of any kind, and
when it is over.
"""

from __future__ import annotations

import logging
from threading import Lock
from typing import Final

from qmq_client.clock import Clock

_log = logging.getLogger(__name__)
#: It is over when nothing was refused for so long; whatever waits tries again within a second or two.
PEACE_S: Final = 10.0


class Refusals:
    """Refusals in a row; for any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = Lock()
        self._count = 0
        self._began_at_s = self._last_at_s = 0.0
        #: Kinds of work that were refused since it began.
        self._kinds: set[str] = set()

    def note(self, work: str, reason: object) -> None:
        """Work of this kind, a name from the code, was refused and will be tried again."""
        with self._lock:
            self._last_at_s = self._clock.monotonic_s()
            if not self._count:
                self._began_at_s = self._last_at_s
            self._count += 1
            is_logged = work not in self._kinds or self._count & (self._count - 1) == 0
            self._kinds.add(work)
            count, seconds = self._count, self._last_at_s - self._began_at_s
        if is_logged:
            _log.warning(
                "refused: work=%s refusals=%d seconds=%.0f reason=%s", work, count, seconds, reason
            )

    def look(self) -> None:
        """Tell if it is over. Call it every second or so."""
        with self._lock:
            if not self._count or self._clock.monotonic_s() - self._last_at_s < PEACE_S:
                return
            count, seconds = self._count, self._last_at_s - self._began_at_s
            self._count = 0
            self._kinds.clear()
        _log.warning("nothing is refused any more: refusals=%d seconds=%.0f", count, seconds)
