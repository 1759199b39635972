"""Whether the database of an inbox takes ids, and how long to leave it alone while it does not.

While it is away, no handler can begin and no message is at fault: the consumer gives back what it
holds and pulls nothing. What an error means is not read out of the error: an id that no message
has is noted, in a transaction that is undone. If that fails, it is not because of a message.
However many consumers of a process use one inbox, one of them probes for all.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from qmq_client.clock import Clock
from qmq_client.consumer.counters import Counters
from qmq_client.consumer.error_texts import error_text, in_one_line
from qmq_client.consumer.outage import OutageLog
from qmq_client.retry import Backoff

if TYPE_CHECKING:
    from qmq_client.inbox import Inbox
    from qmq_client.inbox.async_inbox import AsyncInbox

_LOG: Final = logging.getLogger("qmq.consumer")
#: Between two probes. The cap is what a server that comes back has to bear: each process asks once in
#: this time, and finds it back late by that.
PROBE_BACKOFF: Final = Backoff(first_ms=100, factor=2.0, max_ms=5_000, jitter=0.5)

#: What is left of a pause counts from here on: rounded sums of seconds are a little more or less.
_PAUSE_S_MIN: Final = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Prober:
    """A consumer that may ask for all that use its inbox."""

    #: Raises unless the inbox would take a message now.
    probe: Callable[[], None]
    #: Whether a stop can end it; it must then be waited for, until it has let go of its connection.
    can_be_cancelled: bool
    consumer: str
    counters: Counters


class InboxOutage:
    """That of the consumers whose inboxes are at one place. Thread safe: one thread probes."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._log = OutageLog("inbox", clock)
        self._turn = threading.Lock()
        self._failures = 0
        #: What a probe found that failed holds until then.
        self._again_at_s = float("-inf")
        #: Of those that pull, the thread that probes just now and that nobody can end. It holds no message.
        self.puller: threading.Thread | None = None

    @property
    def is_open(self) -> bool:
        """Whether the last probe failed."""
        return self._failures > 0

    def is_cause(self, prober: Prober) -> bool:
        """After an error of the inbox: whether the database is away, for whatever message."""
        if self.is_open:
            return True
        with self._turn:
            return self._is_away(prober)

    def pause_s(self, prober: Prober) -> float:
        """How long to wait before the next pull: nothing unless the database is still away."""
        if not self.is_open:
            return 0.0
        if not self._turn.acquire(blocking=False):  # a probe may take as long as a driver waits
            return PROBE_BACKOFF.first_ms / 1000
        try:
            self.puller = None if prober.can_be_cancelled else threading.current_thread()
            return max(_PAUSE_S_MIN, self._left_s()) if self._is_away(prober) else 0.0
        finally:
            self.puller = None
            self._turn.release()

    def _is_away(self, prober: Prober) -> bool:
        """What the last probe found, while that holds, and else the next one."""
        return self._left_s() >= _PAUSE_S_MIN or not self._is_over(prober)

    def _left_s(self) -> float:
        return self._again_at_s - self._clock.monotonic_s()

    def _is_over(self, prober: Prober) -> bool:
        try:
            prober.probe()
        except Exception as error:  # whatever a driver raises where its server is away
            self._failures += 1
            delay_s = PROBE_BACKOFF.delay_ms(self._failures, random.random()) / 1000
            self._again_at_s = self._clock.monotonic_s() + delay_s
            prober.counters.add("inbox_failures")
            text = in_one_line(error_text(error))
            if line := self._log.failed(f"consumer={prober.consumer} error={text}"):
                _LOG.warning("%s", line)
            return False
        self._failures, self._again_at_s = 0, float("-inf")
        if line := self._log.answered():
            _LOG.info("%s consumer=%s", line, prober.consumer)
        return True


class InboxOutages:
    """Those of one process, by the place of the inbox."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._outages: dict[object, InboxOutage] = {}

    def of(self, inbox: Inbox | AsyncInbox | None) -> InboxOutage:
        """The one of all inboxes at the place of this; the one that never begins for none."""
        place = None if inbox is None else inbox.place
        return self._outages.setdefault(place, InboxOutage(self._clock))

    def pullers(self) -> set[threading.Thread]:
        """Threads that do nothing but probe, perhaps until their driver gives up."""
        return {one.puller for one in self._outages.values() if one.puller is not None}
