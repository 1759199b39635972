"""What a piece of work calls, counted and not timed: functions of Python and of C."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

_Result = TypeVar("_Result")


def called_by(work: Callable[[], _Result]) -> tuple[_Result, list[tuple[str, str]]]:
    """What `work` returns, and its thread's calls: `call` or `c_call`, and the file of the code.

    The file of a `c_call` is its caller's. No garbage is collected meanwhile: what others left behind
    would be ended within, and counted.
    """
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event in {"call", "c_call"}:
            calls.append((event, frame.f_code.co_filename))

    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        result = work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return result, calls
