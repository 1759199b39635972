"""Runs async handlers on one event loop in a separate thread.

Workers submit a coroutine and wait for it, so concurrency, leases and stopping are the same as
for sync handlers, and objects that handlers share (pools, clients) belong to one loop only. No
handler can end the loop of the others: if a handler stops the loop, or its task raises an exit, the
loop continues.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Coroutine, Iterable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from qmq_client.consumer.forked import keep_task_in_process

_LOG: Final = logging.getLogger("qmq.consumer")
_Result = TypeVar("_Result")
#: Time for cancelled tasks to end: a connection that is not returned keeps the locks of its transaction.
_LAST_WORDS_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Exit:
    error: BaseException


class AsyncCalls:
    """The loop thread. Started by the first call; calls may come from any thread.

    Ends with `stop`, or when no caller is left, because callers that only drain do not call `stop`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()
        #: The futures that workers wait for.
        self._under_way: set[Future[Any]] = set()
        #: Whether a stop has cancelled the running calls.
        self.is_cancelled = False

    @property
    def is_running(self) -> bool:
        """Whether there has been a call, and no stop since."""
        return self._loop is not None

    def call(
        self, coroutine: Coroutine[Any, Any, _Result], *, timeout_s: float | None = None
    ) -> _Result:
        """Run a coroutine to its end; returns what it returns and raises what it raises.

        Raises `TimeoutError` after `timeout_s`; the coroutine continues. Raises `CancelledError` also when
        a stop has cancelled the calls and ended the loop, before the call or under it: then no loop is left to run it.
        """
        with self._lock:  # so that the loop ends before the call or after it
            if self.is_cancelled and not self.is_running:
                coroutine.close()
                raise CancelledError
            loop, under_way = self._running_loop(), self._under_way
            future = asyncio.run_coroutine_threadsafe(_guard(coroutine), loop)
            under_way.add(future)
        future.add_done_callback(under_way.discard)
        ended = future.result(timeout_s)
        if isinstance(ended, _Exit):
            raise ended.error
        return ended

    def cancel(self) -> None:
        """Cancel every call under way."""
        self.is_cancelled = True
        loop = self._loop
        if loop is not None and loop.is_running():
            loop.call_soon_threadsafe(_cancel_all, loop)

    def stop(self, timeout_s: float) -> None:
        """End the loop and its thread. Safe to call twice."""
        with self._lock:
            loop, thread, ends = self._loop, self._thread, self._ends
            self._loop = self._thread = None
            if loop is None or thread is None:
                return
            loop.call_soon_threadsafe(_end, loop, ends)
        thread.join(timeout_s)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        """Requires: the lock."""
        if self._loop is None:
            loop = self._loop = asyncio.new_event_loop()
            loop.set_task_factory(keep_task_in_process)
            ends = self._ends = threading.Event()
            under_way = self._under_way = set()
            self._thread = threading.Thread(
                target=_run, args=(loop, ends, under_way), name="qmq-async-handlers", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, _end_unused, self._thread, loop, ends).atexit = False
        return self._loop


async def _guard(coroutine: Coroutine[Any, Any, _Result]) -> _Result | _Exit:
    # These two would end the loop under all other handlers; the worker raises them instead.
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        return _Exit(error)


def _run(
    loop: asyncio.AbstractEventLoop, ends: threading.Event, under_way: set[Future[Any]]
) -> None:
    asyncio.set_event_loop(loop)
    try:
        while not ends.is_set():
            _run_until_stopped(loop)
        _end_tasks(loop)
        loop.run_until_complete(loop.shutdown_asyncgens())
        # Futures of calls that ignore the cancellation: their workers would wait forever.
        for left in list(under_way):
            left.cancel()
    finally:
        loop.close()


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    except (SystemExit, KeyboardInterrupt) as error:
        # From a task that a handler created: the code that awaits it gets the same error, and stops cleanly.
        _LOG.warning("loop_kept error=%s raised_by=task", type(error).__name__)


def _end(loop: asyncio.AbstractEventLoop, ends: threading.Event) -> None:
    """On the loop's own thread, so that a handler cannot stop the loop between the two."""
    ends.set()
    loop.stop()


def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the tasks, and wait for them and for tasks that they create to clean up."""
    ends_at_s = loop.time() + _LAST_WORDS_S
    _cancel_all(loop)
    loop.run_until_complete(asyncio.sleep(0))
    while (tasks := asyncio.all_tasks(loop)) and (left_s := ends_at_s - loop.time()) > 0:
        loop.run_until_complete(asyncio.wait(tasks, timeout=left_s))


def _end_unused(
    thread: threading.Thread, loop: asyncio.AbstractEventLoop, ends: threading.Event
) -> None:
    if thread.is_alive():  # not after a stop, and not in a forked child, whose parent owns it
        with suppress(RuntimeError):  # an earlier stop may be closing it
            loop.call_soon_threadsafe(_end, loop, ends)


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    # One step later: the last call has started by then, and is notified.
    loop.call_soon(_cancel, asyncio.all_tasks(loop))


def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        if not task.cancelling():  # a second cancellation would interrupt its cleanup
            task.cancel()
