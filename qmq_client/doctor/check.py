"""The type of the doctor's checks; `catalogue.py` lists them."""

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
    """One thing that the doctor checks."""

    id: str
    severity: Severity
    #: Id of the promise in `docs/guarantees.md`; empty for a note.
    promise: str
    #: Where it applies: kinds of database, or the broker.
    where: tuple[str, ...]
    #: The meaning of a finding.
    meaning: str


def check_of(
    id_: str, severity: Severity, promise: str, where: tuple[str, ...], meaning: str
) -> Check:
    """An entry of a catalogue."""
    return Check(id=id_, severity=severity, promise=promise, where=where, meaning=meaning)
