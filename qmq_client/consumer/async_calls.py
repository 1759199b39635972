"""Async handlers: one event loop on a thread of its own for all of them.

Workers hand a coroutine over and wait for it, so concurrency, leases and stopping are the same as
for sync handlers, and what handlers share on the loop (pools, clients) belongs to one loop only.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any


class AsyncCalls:
    """The loop thread. Started by the first call; calls may come from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine to its end; raises what it raises."""
        ended = asyncio.run_coroutine_threadsafe(_guard(coroutine), self._running_loop()).result()
        if ended is not None:
            raise ended

    def cancel(self) -> None:
        """Cancel every call under way."""
        loop = self._loop
        if loop is not None and loop.is_running():
            loop.call_soon_threadsafe(_cancel_all, loop)

    def stop(self, timeout_s: float) -> None:
        """End the loop and its thread. Safe to call twice."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout_s)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop = self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run, args=(loop,), name="qmq-async-handlers", daemon=True
                )
                self._thread.start()
            return self._loop


async def _guard(coroutine: Coroutine[Any, Any, Any]) -> BaseException | None:
    # These two would end the loop under all other handlers; the worker raises them instead.
    try:
        await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        return error
    return None


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        _cancel_all(loop)
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
