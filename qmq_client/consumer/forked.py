"""Ends a forked child of a handler when it returns out of the handler.

The child has a copy of everything its parent works with: the message and its lease, the open
transaction of the inbox, connections, the event loop. All of these belong to the parent, and an ack
or a COMMIT of the child would use the parent's sockets. An `await` returns to the loop as well: in
the child the loop would run the other handlers' tasks (Python 3.14 refuses that, and the child
would wait forever).
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Generator
from functools import wraps
from types import coroutine
from typing import Any, Final, NoReturn

_LOG: Final = logging.getLogger("qmq.consumer")
_AWAITED: Final = (
    "a child that a handler forked may not await: the event loop is its parent's. Let it do its work "
    "without `await` or under `asyncio.run`, and end it with `os._exit`"
)
#: The interface of a coroutine for an event loop.
_Work = Coroutine[Any, Any, Any] | Generator[Any, Any, Any]


class Forks:
    """Counts the forks that led to this process; cheaper to read than the process id."""

    count = 0

    @classmethod
    def add(cls) -> None:
        """Runs in each child before any other code."""
        cls.count += 1


os.register_at_fork(after_in_child=Forks.add)


def keep_in_process(function: Callable[..., Any], *, is_async: bool) -> Callable[..., Any]:
    """The same function; only the process that entered it can return from it."""
    return _keep_async(function) if is_async else _keep_plain(function)


def _keep_plain(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*values: Any, **named: Any) -> Any:
        before = Forks.count
        try:
            returned = function(*values, **named)
        except BaseException as error:
            if before != Forks.count:
                _end_child(error)
            raise
        if before != Forks.count:
            _end_child(None)
        return returned

    return call


def _keep_async(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    async def call(*values: Any, **named: Any) -> Any:
        return await _steps(function(*values, **named))

    return call


def keep_task_in_process(
    loop: asyncio.AbstractEventLoop, work: _Work, **named: Any
) -> asyncio.Task[Any]:
    """Make a task that only the current process can continue.

    For `loop.set_task_factory` of the handlers' loop; it also covers tasks that a handler creates.
    """
    return asyncio.Task(_awaited(work), loop=loop, **named)


async def _awaited(work: _Work) -> Any:
    return await _steps(work)


@coroutine
def _steps(work: _Work) -> Generator[Any, Any, Any]:
    """Like `await work` (PEP 380), with a check of the process before the loop continues."""
    before = Forks.count
    resume: Callable[[Any], Any] = work.send
    given: Any = None
    while True:
        try:
            waits_for = resume(given)
        except StopIteration as ended:
            if before != Forks.count:
                _end_child(None)
            return ended.value
        except BaseException as error:
            if before != Forks.count:
                _end_child(error)
            raise
        finally:
            given = None  # avoids a reference cycle between the error and this frame
        if before != Forks.count:
            _end_child(RuntimeError(_AWAITED))
        try:
            resume, given = work.send, (yield waits_for)
        except GeneratorExit:
            work.close()
            raise
        except BaseException as error:
            resume, given = work.throw, error


def _end_child(error: BaseException | None) -> NoReturn:
    """End as a program does, but without the `atexit` handlers, which belong to the parent."""
    code = 0 if error is None else 1
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        _LOG.error("forked_child_failed process=%d", os.getpid(), exc_info=error)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):  # the stream is missing, or has no reader
            continue
    os._exit(code & 0xFF)
