"""What is said of a handler that fails: of few failures each, of many of one kind as many as people read.

While a handler's own peer is away, its messages fail all in the same way, perhaps a thousand in a
second. What is not told is counted, and nothing is hidden by it: the broker has the last error of
each message, and one that becomes a dead letter has a line of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from traceback import walk_tb
from typing import Final

from qmq_client.clock import Clock
from qmq_client.consumer.error_texts import in_one_line, with_causes

_LOG: Final = logging.getLogger("qmq.consumer")
#: Failures of one kind that are told in one span. With fewer than this in a minute, each is.
TOLD_MAX: Final = 10
#: The first span, and how long none must fail before all is well. Each span that had too many is
#: followed by one of twice its length, up to the second.
_SPAN_S: Final = 60.0
_SPAN_S_MAX: Final = 3_600.0
#: Kinds that are told apart; all further ones are one kind, so that errors cannot use up memory.
_KINDS_MAX: Final = 100
_FURTHER: Final = 0


class _Span:
    """A time in which failures of one kind are counted."""

    __slots__ = ("began_at_s", "failed_at_s", "failures", "span_s", "text")

    def __init__(self, now_s: float, *, span_s: float, text: str) -> None:
        self.began_at_s = self.failed_at_s = now_s
        self.span_s = span_s
        #: Of the last error.
        self.text = text
        self.failures = 0

    def is_over(self, now_s: float) -> bool:
        return now_s - self.began_at_s >= self.span_s or now_s - self.failed_at_s >= _SPAN_S


class HandlerFailures:
    """Those of one consumer. Thread safe."""

    def __init__(self, consumer: str, clock: Clock) -> None:
        self._consumer = consumer
        self._clock = clock
        self._lock = threading.Lock()
        self._spans: dict[int, _Span] = {}

    def failed(self, error: BaseException, text: str) -> bool:
        """One more; whether it is to be told."""
        kind = _kind(error)
        with self._lock:
            self._end_spans()
            if kind not in self._spans and len(self._spans) >= _KINDS_MAX:
                kind = _FURTHER
            now_s = self._clock.monotonic_s()
            span = self._spans.setdefault(kind, _Span(now_s, span_s=_SPAN_S, text=text))
            span.failures += 1
            span.failed_at_s, span.text = now_s, text
            return span.failures <= TOLD_MAX

    def look(self) -> None:
        """Tell what was counted in spans that are over. Call it about once a second."""
        if self._spans:
            with self._lock:
                self._end_spans()

    def close(self) -> None:
        """Tell what was counted and not told: no look will come."""
        with self._lock:
            for span in self._spans.values():
                self._tell_count(span)
            self._spans.clear()

    def _end_spans(self) -> None:
        now_s = self._clock.monotonic_s()
        for kind, span in [one for one in self._spans.items() if one[1].is_over(now_s)]:
            del self._spans[kind]
            if span.failures > TOLD_MAX:
                self._tell_count(span)
                longer_s = min(2 * span.span_s, _SPAN_S_MAX)
                self._spans[kind] = _Span(now_s, span_s=longer_s, text=span.text)
            elif span.span_s > _SPAN_S:
                _LOG.info(
                    "handler_failures_over consumer=%s last_error=%s",
                    self._consumer,
                    in_one_line(span.text),
                )

    def _tell_count(self, span: _Span) -> None:
        untold = span.failures - TOLD_MAX
        if untold <= 0:
            return
        _LOG.warning(
            "handler_failures consumer=%s seconds=%.1f failures=%d untold=%d last_error=%s",
            self._consumer,
            span.failed_at_s - span.began_at_s,
            span.failures,
            untold,
            in_one_line(span.text),
        )


def _kind(error: BaseException) -> int:
    """Equal for errors that came out of the same lines of code, with the same causes."""
    return hash(tuple((type(one), *_lines(one)) for one in with_causes(error)))


def _lines(error: BaseException) -> Iterator[tuple[str, int]]:
    for frame, number in walk_tb(error.__traceback__):
        yield frame.f_code.co_filename, number
