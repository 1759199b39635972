"""What is told of an error, in the log and to the broker: bounded, in lines of its own, without parameters.

What an error says may come out of a message, and out of a statement's parameters.
"""

from __future__ import annotations

import traceback
from typing import Final

from qmq_client.wire.shown import printable

#: Of an error's text, this much goes to the broker's history and to the log.
ERROR_CHARACTERS_MAX: Final = 500
#: Of a traceback, this much goes to the log: both ends of a deep one.
TRACEBACK_CHARACTERS_MAX: Final = 8_000


def error_text(error: BaseException) -> str:
    """Type and text of an error, bounded, without the statement parameters of SQLAlchemy."""
    original = getattr(error, "orig", None)
    name = type(error).__name__
    if isinstance(original, BaseException):
        name, error = f"{name} ({type(original).__name__})", original
    try:
        text = f"{name}: {error}"
    except Exception as broken:  # an error's own __str__ may be wrong
        text = f"{name}: its text cannot be read ({type(broken).__name__})"
    return _sendable(text)


def reason_text(reason: object) -> str:
    """What an application gives as the reason of an outcome, bounded; an error is one, too."""
    if isinstance(reason, BaseException):
        return error_text(reason)
    return _sendable("" if reason is None else str(reason))


def _sendable(text: str) -> str:
    # A lone surrogate would keep the whole request from being sent, with the outcomes of others.
    return text.encode(errors="backslashreplace").decode()[:ERROR_CHARACTERS_MAX]


def in_one_line(text: str) -> str:
    """What came out of a message or a handler, as a field of the log: it begins no other line."""
    return text.encode("unicode_escape").decode()


def error_traceback(error: BaseException) -> str:
    """Lines that tell where it was raised, bounded and without statement parameters.

    What it says may come out of a message: each line is indented, so that none can be taken for a
    line of the log, and nothing in it steers a terminal.
    """
    _hide_parameters(error)
    try:
        text = "".join(traceback.format_exception(error)).rstrip()
    except Exception as broken:  # what an error makes of itself may be wrong
        text = f"its traceback cannot be read ({type(broken).__name__})"
    if len(text) > TRACEBACK_CHARACTERS_MAX:
        half = TRACEBACK_CHARACTERS_MAX // 2
        text = f"{text[:half]}\n[…]\n{text[-half:]}"
    return "".join(f"\n  {printable(line)}" for line in text.split("\n"))


def _hide_parameters(error: BaseException) -> None:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if getattr(one, "hide_parameters", None) is False:
            one.hide_parameters = True  # type: ignore[attr-defined]  # the line above found it
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
