"""The thread of a publisher: it sleeps, calls `step`, and stops within a deadline.

Started by the first send, so a process that never sends has no thread, and a forked child gets its
own with its first send. Without a thread (`background=False`) the caller of `flush` and `close` does
the work.

The thread that steps the publisher, its own or a caller's, takes the step lock first.
"""

from __future__ import annotations

import _thread
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from qmq_client.clock import Clock
from qmq_client.publishing.callbacks import called_by, is_called_by, waits_for_itself
from qmq_client.publishing.publisher import Publisher
from qmq_client.publishing.stats import Pass

_log = logging.getLogger("qmq.publisher")

#: Pause after an unexpected error, or after a callback that would end the process.
_PAUSE_S = 1.0
#: How long a thread may take to notice that its connections are closed.
_ABORT_S = 1.0
#: How long the thread of a producer that was garbage collected continues.
_ABANDONED_S = 10.0
#: How often a caller of `flush` checks that the thread still runs.
_LOOK_S = 0.25


class PublisherThread:
    """Life cycle of one publisher; all methods from any thread."""

    def __init__(
        self,
        publisher: Publisher,
        clock: Clock,
        *,
        is_background: bool,
        on_end: Callable[[], None],
    ) -> None:
        """`on_end` closes the resources of the publisher; called once the publisher has ended."""
        self._publisher = publisher
        self._on_end = on_end
        self._clock = clock
        self._is_background = is_background
        #: Held by the thread that steps the publisher: its own thread, or temporarily a caller's.
        #: Reentrant for a callback in the middle of a caller's step, which is detected by
        #: `_is_at_work`.
        self._step_lock = threading.RLock()
        self._is_at_work = False
        #: The lock of callers that start the thread, so that they do not start several; a surplus thread ends.
        self._starting = threading.RLock()
        self._thread: threading.Thread | None = None
        #: Checked at every send, before `ensure_running`; the thread's own `is_alive` takes a lock.
        self.is_running = False
        self._has_failed_to_start = False
        #: Callers that wait for the end of all work; changed in atomic steps.
        self._flushes: dict[threading.Event, None] = {}
        self._is_idle = True
        self._close_at_s: float | None = None

    def ensure_running(self) -> bool:
        """Start the thread unless it runs, is disabled or was closed; returns whether it runs. Does not raise.

        If the system cannot start a thread, the messages wait for the next call or the watchdog.
        """
        return self.is_running or (self._is_background and self._start())

    def start_soon(self) -> None:
        """Like `ensure_running`, without waiting for the thread, because a transaction is open, perhaps with a lock.

        Starting a thread waits for it, and with gevent all other greenlets run meanwhile.
        """
        if not self.is_running and self._is_background:
            with suppress(RuntimeError):  # no thread could be started: the next call reports it
                _thread.start_new_thread(self._start, ())

    def _start(self) -> bool:
        with self._starting:
            # A thread that is started while Python exits would never run, and its starter would wait forever.
            if self.is_running or self._close_at_s is not None or sys.is_finalizing():
                return self.is_running
            try:
                threading.Thread(target=self._run, name="qmq-publisher", daemon=True).start()
            except RuntimeError as error:
                self._note_failed_start(error)
                return False
            self._has_failed_to_start = False
            return True

    def _note_failed_start(self, error: RuntimeError) -> None:
        has_failed_before, self._has_failed_to_start = self._has_failed_to_start, True
        if not has_failed_before:
            _log.warning("no publisher thread, the watchdog sends the rows: %s", error)

    def flush(self, deadline_s: float) -> bool:
        """Wait until all work is finished, without collecting batches; returns whether it was
        finished before the deadline.

        Raises `ConfigurationError` in a step of this publisher, as in a callback.
        """
        if is_called_by(self._publisher.receipts):
            raise waits_for_itself("flush")
        if not self._is_background:
            return self._work_here(self._clock.monotonic_s() + deadline_s)
        woken = threading.Event()
        self._retry_deletes()
        self._flushes[woken] = None
        try:
            return self._wait_until_done(woken, deadline_s)
        finally:
            self._flushes.pop(woken, None)

    def _retry_deletes(self) -> None:
        """Make the thread try refused deletes again."""
        if self._publisher.retry_deletes() and self.is_running:
            self._is_idle = False

    def _wait_until_done(self, woken: threading.Event, deadline_s: float) -> bool:
        self._publisher.queue.wake()
        left_s = deadline_s
        while not self._is_done():
            if left_s <= 0 or not self.ensure_running():
                return False
            if woken.wait(min(left_s, _LOOK_S)):
                return True
            left_s -= _LOOK_S
        return True

    def close(self, deadline_s: float) -> bool:
        """Send as many messages as possible until the deadline and leave the rest; safe to repeat.

        Returns False if the thread is still in a call that does not return.
        """
        end_s = self._clock.monotonic_s() + deadline_s
        self._retry_deletes()
        if self._close_at_s is None:
            self._close_at_s = end_s
        self._publisher.queue.wake()
        if is_called_by(self._publisher.receipts):
            return True  # in the middle of a step: the loop ends after it
        thread = self._thread
        if thread is not None:
            thread.join(max(0.0, deadline_s))
        if not self._step_lock.acquire(timeout=max(0.0, end_s - self._clock.monotonic_s())):
            return False
        try:
            self._work_here(end_s)
        finally:
            self._step_lock.release()
        return True

    def end_soon(self) -> None:
        """Make the thread send its messages, for a limited time, and end. Does not wait and takes no lock."""
        if self._close_at_s is None:
            self._close_at_s = self._clock.monotonic_s() + _ABANDONED_S
        self._publisher.queue.wake()

    def join_aborted(self) -> None:
        """Wait for a thread whose transport was closed."""
        if self._thread is not None:
            self._thread.join(_ABORT_S)

    def _is_done(self) -> bool:
        # In this order: the thread marks itself busy before it takes messages from the queue, so
        # earlier messages are in one of the two places.
        return not len(self._publisher.queue) and self._is_idle

    def _work_here(self, end_s: float) -> bool:
        with self._step_lock:
            if self._is_at_work:
                return False  # a callback in the middle of a step
            self._is_at_work = True
            try:
                with called_by(self._publisher.receipts):
                    return self._step_until_idle(end_s)
            finally:
                self._is_at_work = False
                if self._close_at_s is not None:  # also if that callback closed it meanwhile
                    self._end()

    def _step_until_idle(self, end_s: float) -> bool:
        self._publisher.retry_deletes()
        while not self._publisher.is_idle:
            now_s = self._clock.monotonic_s()
            if now_s >= end_s:
                return False
            done = self._publisher.step(now_s, is_hurried=True)
            if done.wait_s:
                self._clock.sleep(min(done.wait_s, end_s - now_s))
        return True

    def _run(self) -> None:
        if not self._step_lock.acquire(blocking=False):
            return  # another thread was faster
        try:
            self._thread = threading.current_thread()
            self.is_running = True
            with called_by(self._publisher.receipts):
                self._step_until_closed()
        finally:
            self.is_running, self._is_idle = False, True  # a dead thread does no more work
            self._step_lock.release()

    def _step_until_closed(self) -> None:
        publisher = self._publisher
        while not self._is_over():
            self._is_idle = False
            try:
                done = publisher.step(self._clock.monotonic_s(), is_hurried=self._is_hurried)
            except (
                BaseException
            ):  # the top of the loop: no callback may end it, not even by SystemExit
                _log.exception("publisher step failed")
                publisher.queue.wait(_PAUSE_S)
                continue
            flushes = self._flushes.copy()  # later callers must wait for the next step
            self._is_idle = publisher.is_idle
            if self._is_idle:
                for woken in flushes:
                    woken.set()
            self._sleep(done)
        self._end()

    @property
    def _is_hurried(self) -> bool:
        return bool(self._flushes) or self._close_at_s is not None

    def _end(self) -> None:
        self._publisher.leave_all()
        self._on_end()

    def _sleep(self, done: Pass) -> None:
        queue, close_at_s = self._publisher.queue, self._close_at_s
        if close_at_s is not None:
            left_s = close_at_s - self._clock.monotonic_s()
            queue.wait(max(0.0, min(done.wait_s or 0.0, left_s)))
        elif self._is_hurried:
            queue.wait(done.wait_s)
        else:
            queue.wait(done.wait_s, messages=done.wake_at_messages)

    def _is_over(self) -> bool:
        end_s = self._close_at_s
        if end_s is None:
            return False
        return self._publisher.is_idle or self._clock.monotonic_s() >= end_s
