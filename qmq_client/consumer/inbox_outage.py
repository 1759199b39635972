"""Whether the database of an inbox takes ids, and how long to leave it alone while it does not.

While it is away, no handler can begin and no message is at fault: the consumer gives back what it
holds and pulls nothing. What an error means is not read out of the error: an id that no message
has is noted, in a transaction that is undone. If that fails, it is not because of a message.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from typing import Final

from qmq_client.clock import Clock
from qmq_client.consumer.counters import Counters
from qmq_client.consumer.delivery import error_text, in_one_line
from qmq_client.consumer.outage import OutageLog
from qmq_client.retry import Backoff

_LOG: Final = logging.getLogger("qmq.consumer")
#: Between two probes. The cap is what a server that comes back has to bear: each consumer of each
#: process asks once in this time, and finds it back late by that.
PROBE_BACKOFF: Final = Backoff(first_ms=100, factor=2.0, max_ms=5_000, jitter=0.5)


class InboxOutage:
    """That of one consumer. Thread safe: one thread probes, the others wait for what it finds."""

    def __init__(
        self, probe: Callable[[], None], consumer: str, *, counters: Counters, clock: Clock
    ) -> None:
        """`probe` raises unless the inbox would take a message now."""
        self._probe = probe
        self._consumer = consumer
        self._counters = counters
        self._log = OutageLog("inbox", clock)
        self._turn = threading.Lock()
        self._failures = 0

    @property
    def is_open(self) -> bool:
        """Whether the last probe failed."""
        return self._failures > 0

    def is_cause(self) -> bool:
        """After an error of the inbox: whether the database is away, for whatever message."""
        with self._turn:
            return self.is_open or not self._is_over()

    def pause_s(self) -> float:
        """How long to wait before the next pull: nothing unless the database is still away."""
        if not self.is_open:
            return 0.0
        with self._turn:
            if self._is_over():
                return 0.0
            return PROBE_BACKOFF.delay_ms(self._failures, random.random()) / 1000

    def _is_over(self) -> bool:
        try:
            self._probe()
        except Exception as error:  # whatever a driver raises where its server is away
            self._failures += 1
            self._counters.add("inbox_failures")
            text = in_one_line(error_text(error))
            if line := self._log.failed(f"consumer={self._consumer} error={text}"):
                _LOG.warning("%s", line)
            return False
        self._failures = 0
        if line := self._log.answered():
            _LOG.info("%s consumer=%s", line, self._consumer)
        return True
