"""Brings the key index up to the log's end, in a thread of its own and in small steps.

The threads of this process share one interpreter, so what is saved here is what senders get: a step
is some hundred messages, and behind it this thread rests for a multiple of the time that the step
took, longer while messages are coming in. The index may lag for it; a search looks through what is
missing. Nothing that goes wrong here ends the broker.
"""

from __future__ import annotations

import logging
import threading
from typing import Final

from qmq_broker.clock import Clock
from qmq_broker.storage.key_index import IndexStep
from qmq_broker.storage.store import Store

_log = logging.getLogger(__name__)
#: Log bytes of one step, at least one frame: about a millisecond.
STEP_BYTES: Final = 128 * 1024
#: Rest after a step, as a multiple of its time: a tenth of a processor while messages come in.
REST_WHILE_BUSY: Final = 9
REST_WHILE_QUIET: Final = 1
#: How long there is nothing to do before it is looked again.
IDLE_S: Final = 0.1
_REST_S_MIN: Final = 0.0005
_REST_S_MAX: Final = 1.0


class Indexer:
    """The thread that indexes. Life cycle: `run` in a thread until `stop`, or `step` by hand."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._stopped = threading.Event()
        self._written_offset = store.written_offset

    def step(self) -> IndexStep:
        """One bounded step of the index."""
        return self._store.index.step(STEP_BYTES)

    def run(self) -> None:
        """Step and rest until `stop`."""
        rest_s = 0.0
        while not self._stopped.wait(rest_s):
            began_s = self._clock.monotonic_s()
            try:
                done = self.step()
            except Exception:  # the top of this thread's loop
                _log.exception("key index stopped until the next start")
                return
            rest_s = IDLE_S
            if done.is_unfinished:
                rest_s = self._rest_s(self._clock.monotonic_s() - began_s)

    def stop(self) -> None:
        """Let `run` end. Safe to call twice."""
        self._stopped.set()

    def _rest_s(self, work_s: float) -> float:
        written_offset = self._store.written_offset
        is_busy = written_offset != self._written_offset
        self._written_offset = written_offset
        rest_s = work_s * (REST_WHILE_BUSY if is_busy else REST_WHILE_QUIET)
        return min(max(rest_s, _REST_S_MIN), _REST_S_MAX)
