"""A route that goes on in the very callback that tells what it waits for.

A task of asyncio begins in the next iteration of the loop, and goes on in the one behind each event. Every
iteration is a call to the system and one more wait for the interpreter's lock, just while another thread
wants it for the next commit. A route of the short way begins when its head was read, and goes on when its
commit is told; for all else it waits as a task does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Outcome(Generic[T]):
    """What a route waits for, once: it goes on within `set_result` or `set_exception`.

    Belongs to the loop thread, and is for coroutines of `Driven` alone. Requires of whoever sets it: to be
    ready for all that the route then does.
    """

    __slots__ = ("_error", "_is_done", "_result", "go_on")

    def __init__(self) -> None:
        self._is_done = False
        self._result: T
        self._error: Exception | None = None
        #: Called when it is set, if somebody waits by then.
        self.go_on: Callable[[], None] | None = None

    def done(self) -> bool:
        """Whether it was set."""
        return self._is_done

    def set_result(self, result: T, /) -> None:
        """Go on with this. Requires: it was not set."""
        self._result = result
        self._set()

    def set_exception(self, error: Exception, /) -> None:
        """Go on by raising this. Requires: it was not set."""
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
    """A coroutine under way: `go_on` begins it, and `on_end` is called behind its end.

    A failure that it lets out is told to the loop, as that of a task is.
    """

    __slots__ = ("_coroutine", "_on_end")

    def __init__(self, coroutine: Coroutine[Any, None, None], on_end: Callable[[], None]) -> None:
        self._coroutine = coroutine
        self._on_end = on_end

    def go_on(self, _: object = None) -> None:
        """Run until it waits again or ends. Requires: it waits for nothing that has not come."""
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
            elif awaited is None:  # a bare yield, as of `asyncio.sleep(0)`
                asyncio.get_running_loop().call_soon(self.go_on)
            else:  # what a task does with a future
                awaited._asyncio_future_blocking = False
                awaited.add_done_callback(self.go_on)
