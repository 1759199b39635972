"""The start of a group: the four forms of a position, as a text and back.

`earliest` is the oldest existing message, `latest` the next one to arrive, `time:<ms>` the first
that was stored at this time or later (ms since 1970 UTC), `sequence:<n>` exactly this one. A
sequence or time without a message (deleted, or in the future) means the nearest existing one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from qmq_client.wire.errors import InvalidMessageError
from qmq_client.wire.shown import shorten

_NUMBERED: Final = re.compile(r"(time|sequence):([0-9]{1,18})\Z")


class StartKind(StrEnum):
    """The kind of a start."""

    EARLIEST = "earliest"
    LATEST = "latest"
    TIME = "time"
    SEQUENCE = "sequence"


@dataclass(frozen=True, slots=True)
class Start:
    """One start; `str()` gives its form on the wire."""

    kind: StartKind
    #: Milliseconds of a time, or the sequence; 0 for the others.
    number: int = 0

    def __str__(self) -> str:
        if self.kind in (StartKind.EARLIEST, StartKind.LATEST):
            return self.kind
        return f"{self.kind}:{self.number}"


def parse_start(text: str, *, field: str = "start") -> Start:
    """Parse a start; raises `InvalidMessageError`."""
    if text in (StartKind.EARLIEST, StartKind.LATEST):
        return Start(StartKind(text))
    numbered = _NUMBERED.match(text)
    if numbered is None:
        raise InvalidMessageError(
            field=field,
            limit="earliest, latest, time:<ms since 1970> or sequence:<number>",
            value=shorten(text),
            remedy="Give a starting position.",
        )
    return Start(StartKind(numbered[1]), int(numbered[2]))
