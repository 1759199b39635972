"""The history of a run: one file of JSON lines per process, merged by monotonic time.

There is no buffer in memory. A written event costs about 1.6 µs, all of it, and the only kinds
whose loss could never turn a bad history good are excuses, which are rare: buffering them saves
nothing and buffering the rest would hide faults (`events.py`). What is hot goes out together
instead: `write` takes any number of events and makes one system call.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from tests.kit.events import AnyEvent, Event, Started, Torn

SUFFIX: Final = ".jsonl"
#: Enough for sets of a few million messages, and half the JSON of a full digest.
HASH_BYTES: Final = 8

_PROCESS_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}\Z")
_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final[msgspec.json.Decoder[AnyEvent]] = msgspec.json.Decoder(AnyEvent)


class HistoryDamagedError(Exception):
    """A line cannot be read and no kill explains it. The run cannot be judged."""

    def __init__(self, *, path: Path, line: int) -> None:
        super().__init__(f"{path}, line {line}: not an event, and not where a process was killed")
        self.path = path
        self.line = line


class History:
    """Append-only writer of one process.

    Any thread may write. A SIGKILL at any instruction loses nothing that `write` returned for, for
    the bytes are the kernel's by then; a power cut may. Open it after a fork, not before.
    A process that comes back opens the same name again and appends.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def open(cls, directory: Path, process_name: str) -> History:
        """Open or create the file of `process_name` and note the start of the process."""
        if _PROCESS_NAME.match(process_name) is None:
            raise ValueError(f"not a process name: {process_name!r}")
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{process_name}{SUFFIX}"
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o644)
        size_bytes = os.fstat(descriptor).st_size
        if size_bytes and os.pread(descriptor, 1, size_bytes - 1) != b"\n":
            os.write(descriptor, b"\n")  # ends the line the killed predecessor left torn
        history = cls(descriptor)
        history.write(Started(pid=os.getpid()))
        return history

    def write(self, *events: Event) -> None:
        """Hand the events to the kernel in one system call, all or none of them seen by a reader."""
        lines = _ENCODER.encode_lines(events)
        written_bytes = os.write(self._descriptor, lines)
        if written_bytes != len(lines):
            raise OSError(f"short write to the history: {written_bytes} of {len(lines)} bytes")

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def read_histories(directory: Path) -> list[AnyEvent]:
    """All events of all processes in order of time, each with the name of its process.

    A line torn by a kill becomes a `Torn` event, so that it is counted.
    """
    events: list[AnyEvent] = []
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        events.extend(_read_file(path))
    events.sort(key=attrgetter("at_ns"))
    return events


def body_hash(body: bytes, headers: Mapping[str, str] | None = None) -> str:
    """A fingerprint of what the handler must see, independent of the product's own checksums."""
    digest = hashlib.blake2b(body, digest_size=HASH_BYTES)
    if headers:
        digest.update(f"\0{len(body)}{sorted(headers.items())}".encode())
    return digest.hexdigest()


def _read_file(path: Path) -> list[AnyEvent]:
    events: list[AnyEvent] = []
    torn_line = 0
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        event = _decoded(line)
        if torn_line and not isinstance(event, Started):
            raise HistoryDamagedError(path=path, line=torn_line)
        torn_line = 0
        if event is None:
            torn_line = number
            torn_at_ns = events[-1].at_ns if events else 0
            event = Torn(at_ns=torn_at_ns, size_bytes=len(line))
        msgspec.structs.force_setattr(event, "process", path.name.removesuffix(SUFFIX))
        events.append(event)
    return events


def _decoded(line: bytes) -> AnyEvent | None:
    if not line.endswith(b"\n"):
        return None  # even when it happens to parse: its writer never finished it
    try:
        return _DECODER.decode(line)
    except msgspec.DecodeError:
        return None
