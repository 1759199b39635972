"""Forked children that do some work and end, whatever becomes of the tests around them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Final

#: A child that hangs ends itself after so long.
CHILD_S: Final = 30


def forked(work: Callable[[], bool]) -> int:
    """The process id of a child that does this work, which must return True."""
    child = os.fork()
    if not child:
        code = 1
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(CHILD_S)
        with suppress(BaseException):
            code = 0 if work() else 2
        os._exit(code)
    return child


def code_of(child: int) -> int:
    """Its exit code: 0 where its work returned True, negative where it hung."""
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)
