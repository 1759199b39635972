"""What the checker says: findings per oracle, counts, and their JSON form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import msgspec

from tests.kit.events import Event

#: Findings kept per oracle. A lost segment is a hundred thousand findings; the first few explain it.
FINDINGS_MAX: Final = 50
#: Events kept with one finding.
EVIDENCE_MAX: Final = 10

Count = int | dict[str, int]


class Oracle(StrEnum):
    """The questions put to a history."""

    LOST = "LOST"  # committed, yet not stored or not delivered
    GHOST = "GHOST"  # seen, yet its transaction was undone
    ALIEN = "ALIEN"  # seen where nobody sent it
    ALTERED = "ALTERED"  # other bytes than were sent
    DUPLOG = "DUPLOG"  # stored twice
    DUPDEL = "DUPDEL"  # delivered again without excuse
    EFFECT = "EFFECT"  # not exactly one effect
    ORDER = "ORDER"  # per key, not in commit order
    OFFSET = "OFFSET"  # sequences not dense, not immutable or not in append order
    EARLY = "EARLY"  # before its due time
    LATE = "LATE"  # long after its due time
    FENCE = "FENCE"  # a write or an ack by somebody who was no longer the owner
    STUCK = "STUCK"  # not drained, or something left behind
    BLAME = "BLAME"  # an error answer without a fault
    RECOVERY = "RECOVERY"  # too slow after the heal
    HISTORY = "HISTORY"  # the history itself is too incomplete to judge


#: Ids of the promises an oracle speaks for, when a finding does not name its own.
PROMISES_OF: Final[Mapping[Oracle, tuple[str, ...]]] = {
    Oracle.LOST: ("O1", "B1", "B3", "C1"),
    Oracle.GHOST: ("S1", "S2", "S3"),
    Oracle.ALIEN: ("B3", "B4"),
    Oracle.ALTERED: ("S9", "B4"),
    Oracle.DUPLOG: ("O5", "B7", "D3"),
    Oracle.DUPDEL: ("C1", "C3"),
    Oracle.EFFECT: ("C5",),
    Oracle.ORDER: ("O4", "C7"),
    Oracle.OFFSET: ("B8", "B2"),
    Oracle.EARLY: ("D1",),
    Oracle.LATE: ("D2",),
    Oracle.FENCE: ("O3", "C3"),
    Oracle.STUCK: ("O1", "C8"),
    Oracle.BLAME: ("B10", "W8"),
    Oracle.RECOVERY: ("O1",),
    Oracle.HISTORY: (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One violation."""

    oracle: Oracle
    #: Promises it breaks.
    promises: tuple[str, ...]
    #: Messages it is about; empty when about none.
    message_ids: tuple[str, ...]
    #: One sentence for a person.
    sentence: str
    #: Events that show it, at most `EVIDENCE_MAX`.
    evidence: tuple[Event, ...]


@dataclass(slots=True)
class Findings:
    """Collects findings while the oracles run: all are counted, the first of each oracle kept."""

    kept: list[Finding] = field(default_factory=list)
    totals: Counter[Oracle] = field(default_factory=Counter)
    #: Further figures, by the name they have in the verdict.
    counts: Counter[str] = field(default_factory=Counter)
    #: Excused extra deliveries by the name of the excuse.
    excused: Counter[str] = field(default_factory=Counter)

    def add(
        self,
        oracle: Oracle,
        sentence: str,
        *,
        message_ids: tuple[str, ...] = (),
        evidence: tuple[Event, ...] = (),
        promises: tuple[str, ...] | None = None,
    ) -> None:
        """Note a violation."""
        self.totals[oracle] += 1
        if self.totals[oracle] > FINDINGS_MAX:
            return
        self.kept.append(
            Finding(
                oracle=oracle,
                promises=PROMISES_OF[oracle] if promises is None else promises,
                message_ids=message_ids,
                sentence=sentence,
                evidence=evidence[:EVIDENCE_MAX],
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The judgement on one history."""

    #: The first findings of each oracle.
    findings: tuple[Finding, ...]
    #: Number of all findings by oracle; an oracle without findings is missing.
    totals: Mapping[Oracle, int]
    #: Figures of the run; those per group or kind are dictionaries.
    counts: Mapping[str, Count]

    @property
    def ok(self) -> bool:
        """Whether no oracle found anything."""
        return not self.totals

    def to_json(self) -> str:
        """The verdict as indented JSON, evidence included."""
        tree: dict[str, Any] = {
            "ok": self.ok,
            "totals": {str(oracle): total for oracle, total in self.totals.items()},
            "counts": dict(self.counts),
            "findings": [_finding_tree(finding) for finding in self.findings],
        }
        return msgspec.json.format(msgspec.json.encode(tree), indent=2).decode()

    def __str__(self) -> str:
        """One line when clean, else one more per kept finding."""
        if self.ok:
            return "ok"
        head = ", ".join(f"{oracle} {total}" for oracle, total in self.totals.items())
        return "\n".join([head, *(f"{f.oracle}: {f.sentence}" for f in self.findings)])


def _finding_tree(finding: Finding) -> dict[str, Any]:
    return {
        "oracle": str(finding.oracle),
        "promises": finding.promises,
        "message_ids": finding.message_ids,
        "sentence": finding.sentence,
        "evidence": [
            {"process": event.process, "event": msgspec.to_builtins(event)}
            for event in finding.evidence
        ],
    }
