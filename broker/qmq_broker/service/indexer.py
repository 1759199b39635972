"""Background work: the key index, summaries of segments, and spare segments made ahead.

The threads of this process share one interpreter, so work saved here leaves more time for senders.
During heavy writes, and for a moment afterwards, the index may lag up to a limit, and searches scan
the missing part of the log. Beyond the limit, and when few messages arrive, the work is done in
small steps of a few hundred messages, each followed by a rest that is a multiple of the step's
time. No failure here stops the broker.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import Final

from qmq_broker.storage.index.key_index import IndexStep
from qmq_broker.storage.store import Store
from qmq_client.clock import Clock

_log = logging.getLogger(__name__)
#: Log bytes of one step, at least one frame: about a millisecond.
STEP_BYTES: Final = 128 * 1024
#: More log than this per second counts as heavy writes.
BUSY_BYTES_PER_S: Final = 4 * 1024 * 1024
#: How far the index may lag during heavy writes: a search then takes 0.1 s longer.
LAG_BYTES_MAX: Final = 64 * 1024 * 1024
#: Rest after a step, as a multiple of its time: during heavy writes a tenth of a core is used.
REST_WHILE_BUSY: Final = 9
REST_WHILE_QUIET: Final = 1
#: How long to rest when there is nothing to do, and the span over which the rate of writes is
#: measured.
IDLE_S: Final = 0.1
#: How long writers count as busy after a burst: otherwise the index would work on one burst while the next one arrives.
BUSY_S: Final = 1.0
_REST_S_MIN: Final = 0.0005
_REST_S_MAX: Final = 1.0


class Indexer:
    """The thread that indexes. Life cycle: `run` in a thread until `stop`, or `step` by hand."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._stopped = threading.Event()
        #: Time and offset at which the current measurement of the write rate began.
        self._since_s = clock.monotonic_s()
        self._since_offset = store.written_offset
        self._busy_until_s = self._since_s
        #: Whether there were heavy writes recently.
        self.is_busy = False

    def look(self) -> bool:
        """Measure the write rate; returns whether a step is due."""
        now_s, written_offset = self._clock.monotonic_s(), self._store.written_offset
        if written_offset - self._since_offset > BUSY_BYTES_PER_S * max(
            now_s - self._since_s, IDLE_S
        ):
            self._busy_until_s = now_s + BUSY_S
        if now_s - self._since_s >= IDLE_S:
            self._since_s, self._since_offset = now_s, written_offset
        self.is_busy = now_s < self._busy_until_s
        if not self.is_busy:
            return True
        return self._store.durable_offset - self._store.index.indexed_offset > LAG_BYTES_MAX

    def step(self) -> IndexStep:
        """One bounded step of the index, and one of the summaries of sealed segments."""
        done = self._store.index.step(STEP_BYTES)
        has_more = self._store.summaries.step(STEP_BYTES)
        return replace(done, is_unfinished=done.is_unfinished or has_more)

    def run(self) -> None:
        """Step and rest until `stop`."""
        rest_s = 0.0
        while not self._stopped.wait(rest_s):
            rest_s = IDLE_S
            is_due = self.look()
            began_s = self._clock.monotonic_s()
            try:
                has_more = self._store.spare_maker.step(is_busy=self.is_busy)
                done = self.step() if is_due else IndexStep()
            except Exception:  # the top of this thread's loop
                _log.exception("key index stopped until the next start")
                return
            if done.is_unfinished or has_more:
                work_s = self._clock.monotonic_s() - began_s
                rest_s = self._rest_s(work_s)
                if has_more:  # filling a spare takes disk bandwidth from commits
                    rest_s = max(rest_s, min(work_s * REST_WHILE_BUSY, _REST_S_MAX))

    def stop(self) -> None:
        """Let `run` end. Safe to call twice."""
        self._stopped.set()

    def _rest_s(self, work_s: float) -> float:
        rest_s = work_s * (REST_WHILE_BUSY if self.is_busy else REST_WHILE_QUIET)
        return min(max(rest_s, _REST_S_MIN), _REST_S_MAX)
