"""What is told of an error, in the log and to the broker: bounded, in lines of its own, without parameters.

What an error says may come out of a message, and out of a statement's parameters.
"""

from __future__ import annotations

import traceback
from asyncio import CancelledError
from collections.abc import Iterator
from itertools import islice
from typing import Final

from qmq_client.wire.errors import QmqError
from qmq_client.wire.shown import printable

#: Of an error's text, this much goes to the broker's history and to the log.
ERROR_CHARACTERS_MAX: Final = 500
#: Of a traceback, this much goes to the log: both ends of a deep one.
TRACEBACK_CHARACTERS_MAX: Final = 8_000
#: Of an error, this many causes are followed.
_CAUSES_MAX: Final = 10
#: An error and its causes whose texts go to the history: the bound leaves no room for more.
_TEXTS_MAX: Final = 3
_CAUSED_BY: Final = "; caused by "


def error_text(error: BaseException) -> str:
    """Type and text of an error and of its causes, bounded, without SQLAlchemy's statement parameters."""
    texts: list[str] = []
    for one in islice(with_causes(error), _TEXTS_MAX):
        if type(one).__name__.startswith("_"):
            continue  # carries another one within our own code
        text = _own_text(one)
        said = text.partition(": ")[2]
        if not said or not any(said in told for told in texts):  # SQLAlchemy repeats its driver's
            texts.append(text)
        if isinstance(one, QmqError):  # says itself what caused it
            break
    return caused_by(*texts)


def caused_by(*texts: str) -> str:
    """A text and those of its causes as one, bounded; each keeps its share."""
    whole = _CAUSED_BY.join(texts)
    if len(whole) <= ERROR_CHARACTERS_MAX:
        return whole
    each_max = (ERROR_CHARACTERS_MAX - len(_CAUSED_BY) * (len(texts) - 1)) // len(texts)
    return _CAUSED_BY.join(text[:each_max] for text in texts)


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """The error, then what led to it, as a traceback shows it; of several errors the first."""
    following: BaseException | None = error
    for _ in range(_CAUSES_MAX):
        if following is None:
            return
        yield following
        if isinstance(following, BaseExceptionGroup):
            following = following.exceptions[0]
        elif following.__cause__ is None and not following.__suppress_context__:
            following = following.__context__
        else:
            following = following.__cause__
        if isinstance(following, CancelledError):
            return  # of a stop, and no cause of what a handler says meanwhile


def _own_text(error: BaseException) -> str:
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
