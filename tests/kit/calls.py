"""What a piece of work calls, counted and not timed: functions of Python and of C."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple, TypeVar

_Result = TypeVar("_Result")


class Call(NamedTuple):
    """One call: `call` or `c_call`, the file of the code and the function's name.

    Both are the caller's where what is called is written in C.
    """

    kind: str
    file: str
    function: str


def called_by(work: Callable[[], _Result]) -> tuple[_Result, list[Call]]:
    """What `work` returns, and its thread's calls.

    No garbage is collected meanwhile: what others left behind would be ended within, and counted.
    """
    calls: list[Call] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event in {"call", "c_call"}:
            code = frame.f_code
            calls.append(Call(event, code.co_filename, code.co_name))

    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        result = work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return result, calls
