"""Starts a thread where no signal handler runs.

What a handler raises inside `Thread.start` leaves a thread that waits for its starter for ever, or one
that `threading.enumerate` lists and that never runs. So `start` is called by another thread, a bare
one, which comes about in one step of C.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import Final

#: How long a caller waits at most for the thread that it starts.
_BEGIN_S: Final = 1.0


def start_thread(run: Callable[[], object], *, name: str) -> None:
    """Run it in a daemon thread of this name.

    Raises `RuntimeError` when the system has no thread to give, as while Python ends. When a signal
    handler raises instead, the thread may run or not.
    """
    began, refusals = threading.Lock(), list[RuntimeError]()
    began.acquire()
    _thread.start_new_thread(_start, (run, name, began, refusals))
    began.acquire(timeout=_BEGIN_S)
    if refusals:
        raise refusals[0]


def _start(
    run: Callable[[], object], name: str, began: threading.Lock, refusals: list[RuntimeError]
) -> None:
    # A bare thread logs nothing: that would list it in `threading` for ever.
    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        refusals.append(error)
    finally:
        began.release()
