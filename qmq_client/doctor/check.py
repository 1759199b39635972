"""What a check of the doctor is; which ones there are is in `catalogue.py`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    """How bad a finding is."""

    #: A promise does not hold.
    BREAKS = "breaks"
    #: A promise holds today and may not tomorrow, or work is held up.
    RISK = "risk"
    #: Good to know.
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that is looked at."""

    id: str
    severity: Severity
    #: Id of the promise in `docs/guarantees.md`; empty for a note.
    promise: str
    #: What it is about: kinds of database, or the broker.
    where: tuple[str, ...]
    #: What it means when found.
    meaning: str


def check_of(
    id_: str, severity: Severity, promise: str, where: tuple[str, ...], meaning: str
) -> Check:
    """A line of a catalogue."""
    return Check(id=id_, severity=severity, promise=promise, where=where, meaning=meaning)
