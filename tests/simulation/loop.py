"""Event loops in the played world: asyncio's tasks and futures, turned by the scheduler.

The broker's face is asynchronous code, and so are some handlers: whoever waits in it waits here. A
*turn* is one event of the played world together with everything that becomes ready by it, in the order
in which it became ready, as asyncio's own loop does it. Work beside the loop is a strand of the process.

It has what tasks, futures, timers and `asyncio.to_thread` ask of a loop, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Final, TypeVar, cast

from qmq_broker.face.http.request_response import SteppedCoroutine
from qmq_client.consumer.async_calls import AsyncCalls
from tests.simulation.scheduler import Died, Process, Scheduler, Signal, Turn

_US_PER_S: Final = 1_000_000
_LOOK_US: Final = _US_PER_S
_Result = TypeVar("_Result")


class PlayedLoop:
    """The loop of one process, from its start until it dies. Turned in the hub."""

    def __init__(self, scheduler: Scheduler, process: Process) -> None:
        #: Told after each turn.
        self.on_turn: Callable[[], None] = lambda: None
        self._scheduler = scheduler
        self._process = process
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: dict[asyncio.TimerHandle, Turn] = {}
        #: Routes under way that are no tasks, in the order in which they began.
        self._stepped: dict[Coroutine[Any, None, None], None] = {}
        #: Coroutines of tasks under way, in the order in which they began.
        self._coroutines: dict[asyncio.Task[Any], Coroutine[Any, Any, Any]] = {}
        self._is_turning = False
        self._is_turn_coming = False
        # It is none by its class: most of what that asks for is about sockets and processes.
        self._asyncio_loop = cast("asyncio.AbstractEventLoop", self)

    def turn(self, call: Callable[[], object]) -> None:
        """One event, and all that becomes ready by it."""
        if self._process.is_dead:
            return
        self._is_turning = True
        asyncio._set_running_loop(self._asyncio_loop)
        try:
            call()
            while self._ready and not self._process.is_dead:
                self._ready.popleft()._run()
        except Died:
            return
        finally:
            asyncio._set_running_loop(None)
            self._is_turning = False
        self.on_turn()

    def drive(self, coroutine: Coroutine[Any, None, None]) -> None:
        """Begin what continues without a task, as the broker's routes do; see `SteppedCoroutine`."""
        self._stepped[coroutine] = None
        SteppedCoroutine(coroutine, lambda: self._stepped.pop(coroutine, None), set()).step()

    def start(self, coroutine: Coroutine[Any, Any, _Result], name: str) -> asyncio.Task[_Result]:
        """Begin a task that the caller looks after."""
        task = self.create_task(coroutine, name=name)
        self._coroutines[task] = coroutine
        task.add_done_callback(self._forget)
        return task

    def end(self) -> None:
        """The process is gone. What its tasks do in their `finally` blocks is done now, in order."""
        for turn in self._timers.values():
            turn.is_off = True
        for task, coroutine in self._coroutines.items():
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio's own way
            coroutine.close()
        for stepped in list(self._stepped):
            stepped.close()
        self._coroutines.clear()
        self._stepped.clear()
        self._ready.clear()

    def time(self) -> float:
        """Seconds of the world."""
        return self._scheduler.now_us / _US_PER_S

    def create_future(self) -> asyncio.Future[Any]:
        """See `AbstractEventLoop`."""
        return asyncio.Future(loop=self._asyncio_loop)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        """See `AbstractEventLoop`."""
        return asyncio.Task(coro, loop=self._asyncio_loop, name=name, context=context)

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """See `AbstractEventLoop`."""
        handle = asyncio.Handle(callback, args, self._asyncio_loop, context)
        self._ready.append(handle)
        if not self._is_turning and not self._is_turn_coming:
            self._is_turn_coming = True
            self._scheduler.after(0, f"{self._process.name} loop", self._turn_for_ready)
        return handle

    #: Strands are of the same thread.
    call_soon_threadsafe = call_soon

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """See `AbstractEventLoop`."""
        handle = asyncio.TimerHandle(when, callback, args, self._asyncio_loop, context)

        def ring() -> None:
            del self._timers[handle]
            self.turn(handle._run)

        delay_us = round(when * _US_PER_S) - self._scheduler.now_us
        self._timers[handle] = self._scheduler.after(delay_us, f"{self._process.name} timer", ring)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """See `AbstractEventLoop`."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def run_in_executor(
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """See `AbstractEventLoop`; as a strand."""
        done = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:  # whoever awaits it is told
                self.call_soon(_fail, done, error)
            else:
                self.call_soon(_resolve, done, result)

        self._process.spawn("beside its loop", work)
        return done

    def get_debug(self) -> bool:
        """Never."""
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """What a callback raised goes on; what is only thrown away late is nobody's concern."""
        if "exception" in context and not context.keys() & {"future", "task"}:
            raise context["exception"]

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        if (turn := self._timers.pop(handle, None)) is not None:
            turn.is_off = True

    def _turn_for_ready(self) -> None:
        self._is_turn_coming = False
        self.turn(_nothing)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._coroutines.pop(task, None)


class PlayedCalls(AsyncCalls):
    """What runs asynchronous handlers: a loop of the process, while the worker's strand waits."""

    def __init__(self, scheduler: Scheduler, process: Process) -> None:
        super().__init__()
        self.loop = PlayedLoop(scheduler, process)
        self._scheduler = scheduler
        self._process = process

    def call(
        self, coroutine: Coroutine[Any, Any, _Result], *, timeout_s: float | None = None
    ) -> _Result:
        """See `AsyncCalls.call`."""
        assert timeout_s is None
        done, task = Signal(), self.loop.start(coroutine, "a handler")
        task.add_done_callback(lambda _: self._scheduler.give(done))
        while not task.done():
            self._process.wait(done, _LOOK_US, "awaits a handler")
        return task.result()


def _must_be_well(task: asyncio.Task[None]) -> None:
    error = task.exception()
    if error is not None and not isinstance(error, Died):
        raise AssertionError(f"{task.get_name()} failed") from error


def _nothing() -> None:
    """Only what is ready."""


def _resolve(done: asyncio.Future[Any], result: object) -> None:
    if not done.done():
        done.set_result(result)


def _fail(done: asyncio.Future[Any], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)
