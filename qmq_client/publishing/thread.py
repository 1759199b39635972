"""The thread around a publisher: sleeps, steps, stops within a deadline. No decision is made here.

Started by the first send, so a process that never sends has no thread, and a forked child gets its
own with its first send. Without a thread (`background=False`) the caller of `flush` and `close` does
the work.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable

from qmq_client.clock import Clock
from qmq_client.publishing.publisher import Publisher
from qmq_client.publishing.stats import Pass

_log = logging.getLogger("qmq.publisher")

#: After an error that nobody foresaw (a callback of the application), before going on.
_PAUSE_S = 1.0
#: How long a thread may take to notice that its connections are gone.
_ABORT_S = 1.0


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
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        #: Asked at every send, before `ensure_running`; the thread's own `is_alive` takes a lock.
        self.is_running = False
        self._has_failed_to_start = False
        self._hurries = 0
        self._is_idle = True
        self._close_at_s: float | None = None

    def ensure_running(self) -> None:
        """Start the thread unless it runs, is not wanted or was closed; raises nothing.

        When the system has no thread to give, what is sent waits for the next call or the watchdog.
        """
        if self._is_background and not self.is_running:
            self._start()

    def _start(self) -> None:
        with self._changed:
            if self.is_running or self._close_at_s is not None:
                return
            if sys.is_finalizing():
                return  # it would never run, and whoever starts it wait for ever
            thread = threading.Thread(target=self._run, name="qmq-publisher", daemon=True)
            self.is_running = True
            try:
                thread.start()
            except RuntimeError as error:
                self.is_running = False
                if not self._has_failed_to_start:
                    _log.warning("no publisher thread, the watchdog sends the rows: %s", error)
                self._has_failed_to_start = True
            else:
                self._thread, self._has_failed_to_start = thread, False

    def flush(self, deadline_s: float) -> bool:
        """Wait until nothing is left to do, hurrying; whether that was so before the deadline."""
        end_s = self._clock.monotonic_s() + deadline_s
        if not self._is_background:
            return self._work_here(end_s)
        if len(self._publisher.queue):
            self.ensure_running()
        if self._thread is None:
            return not len(self._publisher.queue)
        with self._changed:
            self._hurries += 1
        self._publisher.queue.wake()
        try:
            with self._changed:
                return self._changed.wait_for(self._is_done, max(0.0, deadline_s))
        finally:
            with self._changed:
                self._hurries -= 1

    def close(self, deadline_s: float) -> bool:
        """Send what can be sent until the deadline and leave the rest; safe to repeat.

        False when the thread is still in a call that does not return.
        """
        end_s = self._clock.monotonic_s() + deadline_s
        with self._changed:
            if self._close_at_s is None:
                self._close_at_s = end_s
            thread = self._thread
        if thread is None:
            self._work_here(end_s)
            self._publisher.leave_all()
            self._on_end()
            return True
        self._publisher.queue.wake()
        if thread is threading.current_thread():
            return True  # from a callback: the loop ends after this step
        thread.join(max(0.0, deadline_s))
        return not thread.is_alive()

    def join_aborted(self) -> None:
        """Wait for a thread whose transport was closed under it."""
        if self._thread is not None:
            self._thread.join(_ABORT_S)

    def _is_done(self) -> bool:
        # The thread declares itself busy before it takes anything from the queue, so nothing is
        # ever in neither place. A dead thread does no more.
        thread = self._thread
        return (self._is_idle and not len(self._publisher.queue)) or (
            thread is not None and not thread.is_alive()
        )

    def _work_here(self, end_s: float) -> bool:
        while not self._publisher.is_idle:
            now_s = self._clock.monotonic_s()
            if now_s >= end_s:
                return False
            done = self._publisher.step(now_s, is_hurried=True)
            if done.wait_s:
                self._clock.sleep(min(done.wait_s, end_s - now_s))
        return True

    def _run(self) -> None:
        try:
            self._step_until_closed()
        finally:
            self.is_running = False

    def _step_until_closed(self) -> None:
        publisher = self._publisher
        while not self._is_over():
            with self._changed:
                self._is_idle = False
                is_hurried = self._hurries > 0 or self._close_at_s is not None
            try:
                done = publisher.step(self._clock.monotonic_s(), is_hurried=is_hurried)
            except BaseException:  # the top of the loop: no callback ends it, not even SystemExit
                _log.exception("publisher step failed")
                publisher.queue.wait(_PAUSE_S)
                continue
            with self._changed:
                self._is_idle = publisher.is_idle
                if self._is_idle:
                    self._changed.notify_all()
            self._sleep(done)
        publisher.leave_all()
        self._on_end()

    def _sleep(self, done: Pass) -> None:
        with self._changed:
            is_hurried, close_at_s = self._hurries > 0, self._close_at_s
        if close_at_s is not None:
            left_s = close_at_s - self._clock.monotonic_s()
            self._publisher.queue.wait(max(0.0, min(done.wait_s or 0.0, left_s)))
        elif is_hurried:
            self._publisher.queue.wait(done.wait_s)
        else:
            self._publisher.queue.wait(done.wait_s, messages=done.wake_at_messages)

    def _is_over(self) -> bool:
        end_s = self._close_at_s
        if end_s is None:
            return False
        return self._publisher.is_idle or self._clock.monotonic_s() >= end_s
