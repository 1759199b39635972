"""The text of an error for the log and the broker: bounded, one line, without parameters.

The text of an error may come from a message, or from a statement's parameters. While a handler's own
peer is unreachable, its messages fail in the same way, perhaps a thousand per second: a few failures
of each kind are logged in full, the others are counted. The broker keeps the last error of each message,
and each dead letter has a line of its own.
"""

from __future__ import annotations

import logging
import threading
import traceback
from asyncio import CancelledError
from collections.abc import Iterator
from itertools import islice
from traceback import walk_tb
from typing import Final

from qmq_client.clock import Clock
from qmq_client.group.history import TEXTS_MAX, joined_texts
from qmq_client.wire.errors import QmqError
from qmq_client.wire.shown import printable

#: Characters of an error's text in the broker's history and the log.
ERROR_CHARACTERS_MAX: Final = 500
#: Characters of a traceback in the log; a deep one is cut in the middle.
TRACEBACK_CHARACTERS_MAX: Final = 8_000
#: Number of causes of an error that are included.
_CAUSES_MAX: Final = 10


def error_text(error: BaseException) -> str:
    """Type and text of an error and of its causes, bounded, without SQLAlchemy's statement parameters."""
    texts: list[str] = []
    for one in islice(with_causes(error), TEXTS_MAX):
        if type(one).__name__.startswith("_"):
            continue  # an internal error that wraps another one
        text = _own_text(one)
        said = text.partition(": ")[2]
        if not said or not any(
            said in known for known in texts
        ):  # SQLAlchemy repeats its driver's text
            texts.append(text)
        if isinstance(one, QmqError):  # its text already contains the cause
            break
    return caused_by(*texts)


def caused_by(*texts: str) -> str:
    """Join a text and those of its causes, bounded; each keeps a share of the length."""
    return joined_texts(texts, ERROR_CHARACTERS_MAX)


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """The error, then its causes, in the order of a traceback; of several errors the first."""
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
            return  # caused by a stop, and not the cause of a handler's error


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
    """The reason of an outcome as an application passes it, a text or an error; bounded."""
    if isinstance(reason, BaseException):
        return error_text(reason)
    return _sendable("" if reason is None else str(reason))


def _sendable(text: str) -> str:
    # A lone surrogate would make the whole request unsendable, with the outcomes of other messages.
    return text.encode(errors="backslashreplace").decode()[:ERROR_CHARACTERS_MAX]


def in_one_line(text: str) -> str:
    """Text from a message or a handler as a field of the log, without line breaks."""
    return text.encode("unicode_escape").decode()


def error_traceback(error: BaseException) -> str:
    """The traceback of an error as lines, bounded and without statement parameters.

    The text may come from a message: each line is indented, so that none can be mistaken for a line
    of the log, and control characters are escaped.
    """
    _hide_parameters(error)
    try:
        text = "".join(traceback.format_exception(error)).rstrip()
    except Exception as broken:  # an error's own methods may fail
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


_LOG: Final = logging.getLogger("qmq.consumer")
#: Failures of one kind that are logged in one span. With fewer than this in a minute, all of them.
LOGGED_MAX: Final = 10
#: The first span, also the time without failures after which the failures count as ended; and the
#: longest span. A span with too many failures is followed by one of twice its length.
_SPAN_S: Final = 60.0
_SPAN_S_MAX: Final = 3_600.0
#: Kinds that are distinguished; all further ones count as one kind, so that errors cannot use up memory.
_KINDS_MAX: Final = 100
_FURTHER: Final = 0


class _Span:
    """A time in which failures of one kind are counted."""

    __slots__ = ("began_at_s", "failed_at_s", "failures", "span_s", "text")

    def __init__(self, now_s: float, *, span_s: float, text: str) -> None:
        self.began_at_s = self.failed_at_s = now_s
        self.span_s = span_s
        #: The text of the last error.
        self.text = text
        self.failures = 0

    def is_over(self, now_s: float) -> bool:
        return now_s - self.began_at_s >= self.span_s or now_s - self.failed_at_s >= _SPAN_S


class HandlerFailures:
    """The failures of one consumer. Thread safe."""

    def __init__(self, consumer: str, clock: Clock) -> None:
        self._consumer = consumer
        self._clock = clock
        self._lock = threading.Lock()
        self._spans: dict[int, _Span] = {}

    def failed(self, error: BaseException, text: str) -> bool:
        """Count one more; returns whether to log it."""
        kind = _kind(error)
        with self._lock:
            self._end_spans()
            if kind not in self._spans and len(self._spans) >= _KINDS_MAX:
                kind = _FURTHER
            now_s = self._clock.monotonic_s()
            span = self._spans.setdefault(kind, _Span(now_s, span_s=_SPAN_S, text=text))
            span.failures += 1
            span.failed_at_s, span.text = now_s, text
            return span.failures <= LOGGED_MAX

    def look(self) -> None:
        """Log counts of ended spans. Call it about once a second."""
        if self._spans:
            with self._lock:
                self._end_spans()

    def close(self) -> None:
        """Log failures that were counted but not logged."""
        with self._lock:
            for span in self._spans.values():
                self._log_count(span)
            self._spans.clear()

    def _end_spans(self) -> None:
        now_s = self._clock.monotonic_s()
        for kind, span in [one for one in self._spans.items() if one[1].is_over(now_s)]:
            del self._spans[kind]
            if span.failures > LOGGED_MAX:
                self._log_count(span)
                longer_s = min(2 * span.span_s, _SPAN_S_MAX)
                self._spans[kind] = _Span(now_s, span_s=longer_s, text=span.text)
            elif span.span_s > _SPAN_S:
                _LOG.info(
                    "handler_failures_over consumer=%s last_error=%s",
                    self._consumer,
                    in_one_line(span.text),
                )

    def _log_count(self, span: _Span) -> None:
        unlogged = span.failures - LOGGED_MAX
        if unlogged <= 0:
            return
        _LOG.warning(
            "handler_failures consumer=%s seconds=%.1f failures=%d unlogged=%d last_error=%s",
            self._consumer,
            span.failed_at_s - span.began_at_s,
            span.failures,
            unlogged,
            in_one_line(span.text),
        )


def _kind(error: BaseException) -> int:
    """A key that is equal for errors from the same lines of code with the same causes."""
    return hash(tuple((type(one), *_lines(one)) for one in with_causes(error)))


def _lines(error: BaseException) -> Iterator[tuple[str, int]]:
    for frame, number in walk_tb(error.__traceback__):
        yield frame.f_code.co_filename, number
