"""One finding of the doctor, with the value that was read and the fix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from qmq_client.doctor.catalogue import CHECK_BY_ID
from qmq_client.doctor.check import Severity
from qmq_client.settings.masking import mask_secrets
from qmq_client.wire.limits import DEFAULT_LIMITS, Limits

_READ_CHARACTERS_MAX: Final = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Made by `found`."""

    id: str
    severity: Severity
    #: Id of the promise that is broken or at risk; empty for a note.
    promise: str
    #: The settings that were read, with names and values.
    read: str
    #: The meaning of the finding.
    meaning: str
    #: The statement or command that fixes it; several are separated by "; ".
    fix: str

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        names = ("id", "promise", "read", "meaning", "fix")
        return {name: getattr(self, name) for name in names} | {"severity": self.severity.value}


Findings = Iterator[Finding]


def found(id_: str, read: str, fix: str) -> Finding:
    """The finding of this check, with every password masked."""
    check = CHECK_BY_ID[id_]
    return Finding(
        id=check.id,
        severity=check.severity,
        promise=check.promise,
        read=mask_secrets(" ".join(read.split()))[:_READ_CHARACTERS_MAX],
        meaning=check.meaning,
        fix=fix,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Limits above which a value becomes a finding."""

    #: A transaction open for longer.
    transaction_s_max: float = 300.0
    #: A prepared transaction that is open for longer.
    prepared_s_max: float = 60.0
    #: A row that is overdue for longer; a watchdog claims one within seconds.
    overdue_s_max: float = 30.0
    #: A message waiting for longer.
    unsent_s_max: float = 600.0
    #: Difference between the clocks, beyond the time that asking takes.
    clock_s_max: float = 1.0
    #: Size limits of messages.
    limits: Limits = DEFAULT_LIMITS
