"""Log lines: an event name and its fields as `key=value`, one line each, control characters escaped.

Bodies of messages are never logged. A thread writes the lines: if the reader of standard error
stops reading, no other thread waits. Lines that do not fit into the buffer are dropped and counted.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Final

from qmq_broker.errors import StoreError
from qmq_client.wire.errors import QmqError
from qmq_client.wire.shown import printable, utc_text

_LOG: Final = logging.getLogger(__name__)
#: Most characters of one value.
_VALUE_CHARACTERS_MAX: Final = 2_000
#: Lines that wait to be written: a second of a busy log, and at most some megabytes.
LINES_WAITING_MAX: Final = 1_000
#: How long a process waits at its end for its last lines to be written.
_FLUSH_S: Final = 2.0
#: A line that is repeated is logged at once, then after this time, then after twice as long …
_REPEATED_AFTER_S: Final = 1.0
#: … and at least this often.
_REPEATED_AFTER_S_MAX: Final = 64.0


def log_event(
    logger: logging.Logger,
    level: int,
    event: str,
    *,
    error: BaseException | None = None,
    details: Mapping[str, object] | None = None,
    **named: object,
) -> None:
    """Write one line; `error` adds its type, text and place, `details` more fields."""
    if not logger.isEnabledFor(level):
        return
    named |= details or {}
    if error is not None:
        named["error"] = type(error).__name__
        named["reason"] = str(error)
        named["trace"] = " | ".join(
            f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_tb(error.__traceback__)[-8:]
        )
    parts = [event, *(f"{name}={show(value)}" for name, value in named.items())]
    logger.log(level, "%s", " ".join(parts))


def values(prefix: str, settings: object) -> dict[str, object]:
    """The fields of a dataclass for a log line, each as `prefix.name`."""
    assert is_dataclass(settings)
    return {f"{prefix}.{field.name}": getattr(settings, field.name) for field in fields(settings)}


def show(value: object) -> str:
    """A value of a log line: bounded, printable, quoted if it contains a space."""
    text = str(value)[:_VALUE_CHARACTERS_MAX]
    if text.isprintable() and text.isascii():
        if text and not any(character in text for character in ' "='):
            return text
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return ascii(text)


def start_logging(level: int) -> None:
    """Send every log line of this process to standard error."""
    # Not through its buffer: a thread that is stuck in it would prevent the process from ending.
    raw = getattr(sys.stderr.buffer, "raw", sys.stderr.buffer)
    handler = LogWriter(raw.write)
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    handler.start()
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # The server's own lines repeat lines of QMQ and add one for each hostile request.
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.ERROR)


def dropped_lines() -> int:
    """How many log lines of this process were dropped since its start, because earlier ones were not read."""
    return sum(
        handler.dropped
        for handler in logging.getLogger().handlers
        if isinstance(handler, LogWriter)
    )


class LogWriter(logging.Handler):
    """Writes log lines in a separate thread. Any thread may log, and none waits."""

    def __init__(self, write: Callable[[bytes], int | None]) -> None:
        """`write` writes some of the bytes and returns how many; it may block."""
        super().__init__()
        self._write = write
        self._lines: deque[str] = deque()
        self._changed = threading.Condition()
        self._is_writing = False
        #: Since the start.
        self.dropped = 0
        self._dropped_logged = 0

    def start(self) -> None:
        """Start writing."""
        threading.Thread(target=self._run, name="qmq-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue this line, or count it as dropped."""
        line = self.format(record)
        with self._changed:
            if len(self._lines) >= LINES_WAITING_MAX:
                self.dropped += 1
                return
            self._lines.append(line)
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all lines are written, but not for a reader that has stopped reading."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines and not self._is_writing, _FLUSH_S)

    def step(self) -> None:
        """Write the lines that wait. Blocks."""
        with self._changed:
            lines = list(self._lines)
            self._lines.clear()
            dropped, self._dropped_logged = self.dropped - self._dropped_logged, self.dropped
            self._is_writing = True
        if dropped:
            lines.append(self._warning(f"log_lines_dropped lines={dropped} total={self.dropped}"))
        for line in lines:
            self._write_whole(line.encode(errors="backslashreplace") + b"\n")
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
            self.step()

    def _warning(self, text: str) -> str:
        record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None)
        return self.format(record)

    def _write_whole(self, data: bytes) -> None:
        try:
            while data:
                data = data[self._write(data) or 0 :]
        except (OSError, ValueError):  # its reader has ended, or it was closed
            with self._changed:
                self.dropped += 1
                self._dropped_logged += 1


@dataclass(slots=True)
class _Repeated:
    next_at_s: float
    wait_s: float
    count: int = 0


class Repeats:
    """Limits a line that may be repeated without end: logged at once, then at doubling intervals.

    Belongs to one thread. Requires: the kinds are few.
    """

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Repeated] = {}

    def due(self, kind: Hashable, now_s: float, count: int = 1) -> int:
        """The number of occurrences to log now, including earlier unlogged ones; 0 for no line."""
        known = self._kinds.get(kind)
        if known is None:
            if not count:
                return 0
            known = self._kinds[kind] = _Repeated(now_s, _REPEATED_AFTER_S)
        known.count += count
        if not known.count or now_s < known.next_at_s:
            return 0
        if now_s - known.next_at_s > known.wait_s:  # it was quiet
            known.wait_s = _REPEATED_AFTER_S
        due, known.count = known.count, 0
        known.next_at_s = now_s + known.wait_s
        known.wait_s = min(2 * known.wait_s, _REPEATED_AFTER_S_MAX)
        return due


class FaultLog:
    """Logs errors of the disk or of files, which are not the caller's, each kind at doubling intervals."""

    def __init__(self) -> None:
        self._repeats = Repeats()

    def note(self, path: str, error: QmqError) -> None:
        """A request to this route was answered with this error. Call in the loop thread."""
        if not isinstance(error, StoreError):
            return
        now_s = asyncio.get_running_loop().time()
        times = self._repeats.due((path, error.code), now_s)
        if times:
            fields = {"path": path, "code": error.code, "reason": error, "times": times}
            log_event(_LOG, logging.ERROR, "request_failed", details=fields)


class _Formatter(logging.Formatter):
    """One line per record, even if other libraries put line breaks into it."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return utc_text(record.created)

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
