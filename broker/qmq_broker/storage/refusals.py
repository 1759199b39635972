"""Log lines about work that the disk, or a full queue, has no room for.

Many kinds of work need disk space, in several threads, and each tries again until there is some. So
a full disk is logged once for each kind of work, then at the 2nd, 4th, 8th … refusal of any kind,
and when it has ended.
"""

from __future__ import annotations

import logging
from threading import Lock
from typing import Final

from qmq_client.clock import Clock

_log = logging.getLogger(__name__)
#: The outage has ended when nothing was refused for this long; waiting work tries again within a second or two.
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
        """Record that work of this kind, a name from the code, was refused and will be tried again."""
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
        """Log the end of refusals. Call it about every second."""
        with self._lock:
            if not self._count or self._clock.monotonic_s() - self._last_at_s < PEACE_S:
                return
            count, seconds = self._count, self._last_at_s - self._began_at_s
            self._count = 0
            self._kinds.clear()
        _log.warning("nothing is refused any more: refusals=%d seconds=%.0f", count, seconds)
