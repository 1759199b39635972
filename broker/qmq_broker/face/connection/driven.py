"""A route that continues inside the very callback that brings what it waits for.

An asyncio task starts in the next iteration of the loop, and continues in the one after each event.
Every iteration is a system call and one more wait for the interpreter's lock, just while another
thread wants it for the next commit. A route of the short way starts as soon as its head was read,
and continues as soon as its commit is reported; for everything else it waits as a task does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Outcome(Generic[T]):
    """A one-time event for a route, which continues inside `set_result` or `set_exception`.

    Belongs to the loop thread, and is only for coroutines run by `Driven`. Whoever sets it must be
    ready for everything that the route does next.
    """

    __slots__ = ("_error", "_is_done", "_result", "go_on")

    def __init__(self) -> None:
        self._is_done = False
        self._result: T
        self._error: Exception | None = None
        #: Called when the event is set, if somebody waits by then.
        self.go_on: Callable[[], None] | None = None

    def done(self) -> bool:
        """Whether it was set."""
        return self._is_done

    def set_result(self, result: T, /) -> None:
        """Continue with this result. Requires: it was not set."""
        self._result = result
        self._set()

    def set_exception(self, error: Exception, /) -> None:
        """Continue by raising this error. Requires: it was not set."""
        self._error = error
        self._set()

    def __await__(self) -> Generator[Outcome[T], None, T]:
        if not self._is_done:
            yield self
        if self._error is not None:
            raise self._error
        return self._result

    def _set(self) -> None:
        self._is_done = True
        if self.go_on is not None:
            self.go_on()


class Driven:
    """A coroutine in progress: `go_on` starts it, and `on_end` is called after its end.

    An error that it does not catch is reported to the loop, as for a task.
    """

    __slots__ = ("_coroutine", "_on_end")

    def __init__(self, coroutine: Coroutine[Any, None, None], on_end: Callable[[], None]) -> None:
        self._coroutine = coroutine
        self._on_end = on_end

    def go_on(self, _: object = None) -> None:
        """Run until it waits again or ends. Requires: what it waits for has come."""
        try:
            awaited = self._coroutine.send(None)
        except StopIteration:
            self._on_end()
        except (Exception, asyncio.CancelledError) as error:
            self._on_end()
            told = {"message": "a route failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(told)
        else:
            if isinstance(awaited, Outcome):
                awaited.go_on = self.go_on
            elif awaited is None:  # a bare yield, as in `asyncio.sleep(0)`
                asyncio.get_running_loop().call_soon(self.go_on)
            else:  # what a task does with a future
                awaited._asyncio_future_blocking = False
                awaited.add_done_callback(self.go_on)
