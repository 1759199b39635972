"""The thread of a publisher: it sleeps, steps, stops within a deadline, and decides nothing.

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

#: After an unexpected error, or a callback that would end the process, before continuing.
_PAUSE_S = 1.0
#: How long a thread may take to notice that its connections are gone.
_ABORT_S = 1.0
#: How long the thread of a producer that was garbage collected continues.
_ABANDONED_S = 10.0
#: How often a caller of `flush` looks whether the thread is still there.
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
        """`on_end` gives up what the publisher used; called once the publisher is done."""
        self._publisher = publisher
        self._on_end = on_end
        self._clock = clock
        self._is_background = is_background
        #: Held by the thread that steps the publisher: its own while it lives, or a caller's for a while.
        #: Reentrant for a callback in the middle of a caller's step, which finds `_is_at_work`.
        self._step_lock = threading.RLock()
        self._is_at_work = False
        #: Of callers that start one, so that they do not start many; a thread that is one too many ends.
        self._starting = threading.RLock()
        self._thread: threading.Thread | None = None
        #: Asked at every send, before `ensure_running`; the thread's own `is_alive` takes a lock.
        self.is_running = False
        self._has_failed_to_start = False
        #: Callers that wait until nothing is left to do; changed in single steps.
        self._flushes: dict[threading.Event, None] = {}
        self._is_idle = True
        self._close_at_s: float | None = None

    def ensure_running(self) -> bool:
        """Start the thread unless it runs, is not wanted or was closed; whether it runs. Raises nothing.

        When the system has no thread to give, what is sent waits for the next call or the watchdog.
        """
        return self.is_running or (self._is_background and self._start())

    def start_soon(self) -> None:
        """The same without waiting for the thread: here a transaction is open, perhaps with a lock.

        A thread that starts is waited for by its starter, and with gevent all other greenlets run meanwhile.
        """
        if not self.is_running and self._is_background:
            with suppress(RuntimeError):  # no thread to give: the next call tells
                _thread.start_new_thread(self._start, ())

    def _start(self) -> bool:
        with self._starting:
            # One that is starting while Python ends would never run, and its starter wait forever.
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
        """Wait until nothing is left to do, hurrying; whether that was so before the deadline.

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
        """Have the thread try again to delete what the database refused a while ago."""
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
        """Send what can be sent until the deadline and leave the rest; safe to repeat.

        False when the thread is still in a call that does not return.
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
        """Have the thread send what it has, for a while, and end. Waits for nothing and takes no lock."""
        if self._close_at_s is None:
            self._close_at_s = self._clock.monotonic_s() + _ABANDONED_S
        self._publisher.queue.wake()

    def join_aborted(self) -> None:
        """Wait for a thread whose transport was closed under it."""
        if self._thread is not None:
            self._thread.join(_ABORT_S)

    def _is_done(self) -> bool:
        # In this order: the thread declares itself busy before it takes anything from the queue, so
        # what was there before this look is in one of the two places.
        return not len(self._publisher.queue) and self._is_idle

    def _work_here(self, end_s: float) -> bool:
        with self._step_lock:
            if self._is_at_work:
                return False  # a callback in the middle of it
            self._is_at_work = True
            try:
                with called_by(self._publisher.receipts):
                    return self._step_until_idle(end_s)
            finally:
                self._is_at_work = False
                if (
                    self._close_at_s is not None
                ):  # also if it was closed meanwhile, by that callback
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
            return  # another one was faster
        try:
            self._thread = threading.current_thread()
            self.is_running = True
            with called_by(self._publisher.receipts):
                self._step_until_closed()
        finally:
            self.is_running, self._is_idle = False, True  # a dead thread does no more
            self._step_lock.release()

    def _step_until_closed(self) -> None:
        publisher = self._publisher
        while not self._is_over():
            self._is_idle = False
            try:
                done = publisher.step(self._clock.monotonic_s(), is_hurried=self._is_hurried)
            except BaseException:  # the top of the loop: no callback ends it, not even SystemExit
                _log.exception("publisher step failed")
                publisher.queue.wait(_PAUSE_S)
                continue
            flushes = self._flushes.copy()  # those who came later have to wait for the next step
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
