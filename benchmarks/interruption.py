"""Ctrl-C and SIGTERM, such that neither is lost.

A handler raises `KeyboardInterrupt` where the program happens to be, and Python drops what is raised
inside a weak reference's callback. So the handler also leaves a note, and whoever is about to start
or to wait for something looks at it.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_asked: list[int] = []


def listen() -> None:
    """From now on both signals interrupt the command."""
    for number in _SIGNALS:
        signal.signal(number, interrupt)


def interrupt(number: int, _frame: FrameType | None) -> None:
    """The handler; only the first signal raises, so that a second one cannot cut the clean-up."""
    is_first = not _asked
    _asked.append(number)
    if is_first:
        raise KeyboardInterrupt


def check() -> None:
    """Raise `KeyboardInterrupt` when a signal came and its own exception got lost."""
    if _asked:
        raise KeyboardInterrupt
