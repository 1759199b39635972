"""The checker: one history in, one verdict out.

It never asks how the product works, only what was promised (`expectations.py`) and what was seen.
The questions are those of the Jepsen method: sets of attempted, committed, stored, delivered and
settled messages, with the truth of unknown outcomes read from the business table at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Final

from tests.kit.events import (
    Acked,
    AnyEvent,
    Delivered,
    Error,
    Fault,
    OwnerWrite,
    Stored,
    Torn,
    Unknown,
)
from tests.kit.expectations import Group, Promises
from tests.kit.ledger import Fate, Ledger
from tests.kit.oracles import delivery, fate, liveness, log, order, ownership
from tests.kit.verdict import Count, Findings, Oracle, Verdict

DEFAULT_PROMISES: Final = Promises()

ORACLES: Final = (
    fate.unsettled,
    fate.contradicted,
    fate.lost,
    fate.ghost,
    fate.alien,
    fate.altered,
    fate.effect,
    log.stored_twice,
    log.sequences,
    delivery.delivered_again,
    delivery.on_time,
    order.order,
    ownership.fence,
    liveness.stuck,
    liveness.blame,
    liveness.recovery,
)


def check(
    events: Iterable[AnyEvent],
    *,
    groups: Mapping[str, Group],
    promises: Promises = DEFAULT_PROMISES,
) -> Verdict:
    """Judge the events of one run, in any order."""
    ordered = sorted(events, key=attrgetter("at_ns"))
    ledger = Ledger(ordered, groups, promises)
    findings = Findings()
    for oracle in ORACLES:
        oracle(ledger, findings)
    return Verdict(
        findings=tuple(findings.kept),
        totals=dict(findings.totals),
        counts=_counts(ledger, findings),
    )


def _counts(ledger: Ledger, findings: Findings) -> dict[str, Count]:
    fates = Counter(sent.fate for sent in ledger.sent.values())
    deliveries = ledger.of(Delivered)
    effects: Counter[str] = Counter()
    for (group, _), rows in ledger.effects.items():
        effects[group] += sum(row.times for row in rows)
    first_deliveries = Counter(group for group, _ in ledger.deliveries)
    counts: dict[str, Count] = {
        "events": len(ledger.events),
        "attempted": len(ledger.sent),
        "committed": fates[Fate.COMMITTED],
        "rolled_back": fates[Fate.UNDONE],
        "unknown_transactions": len(ledger.of(Unknown)),
        "accepted": len(ledger.accepted),
        "stored": len(ledger.of(Stored)),
        "delivered": {name: first_deliveries[name] for name in ledger.groups},
        "redelivered": len(deliveries) - len(ledger.deliveries),
        "excused": dict(findings.excused),
        "acked": len(ledger.of(Acked)),
        "effects": {name: effects[name] for name in ledger.groups},
        "dead_letters": len(ledger.dead),
        "owner_writes_refused": sum(w.changed_rows == 0 for w in ledger.of(OwnerWrite)),
        "faults": dict(Counter(f.kind for f in ledger.of(Fault) if f.phase == "begin")),
        "errors": len(ledger.of(Error)),
        "torn_lines": len(ledger.of(Torn)),
        "lost": findings.counts["lost"],
        "ghosts": findings.totals[Oracle.GHOST],
        "effects_doubled": findings.counts["effects_doubled"],
    }
    counts.update({name: count for name, count in findings.counts.items() if name not in counts})
    return counts
