"""The type of the doctor's checks; `catalogue.py` lists them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    """The severity of a finding."""

    #: A promise does not hold.
    BREAKS = "breaks"
    #: A promise holds now but may be broken later, or work is delayed.
    RISK = "risk"
    #: For information.
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of the doctor."""

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
