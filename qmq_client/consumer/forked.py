"""Where a child that a handler forked ends, when it comes back out of the handler.

It has a copy of everything that its parent works with: the message and its lease, the open
transaction of the inbox, connections, the event loop. Each of them belongs to the parent, and an ack
or a COMMIT of the child's would go over the parent's own sockets.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, Final, NoReturn

_LOG: Final = logging.getLogger("qmq.consumer")


class Forks:
    """How many forks are behind this process; cheaper to ask than the number of the process."""

    count = 0

    @classmethod
    def add(cls) -> None:
        """Runs in each child before anything else."""
        cls.count += 1


os.register_at_fork(after_in_child=Forks.add)


def keep_in_process(function: Callable[..., Any], *, is_async: bool) -> Callable[..., Any]:
    """The same function, out of which nobody comes but the process that went in."""
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
        before = Forks.count
        try:
            returned = await function(*values, **named)
        except BaseException as error:
            if before != Forks.count:
                _end_child(error)
            raise
        if before != Forks.count:
            _end_child(None)
        return returned

    return call


def _end_child(error: BaseException | None) -> NoReturn:
    """End as a program does, but without the handlers of `atexit`, which are the parent's."""
    code = 0 if error is None else 1
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        _LOG.error("forked_child_failed process=%d", os.getpid(), exc_info=error)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):  # there is none, or nobody reads it
            continue
    os._exit(code & 0xFF)
