"""Does only the owner change things: FENCE, for outbox rows and for leases.

A statement is judged by its beginning and the takeover by its end, so that two that overlapped
are never an accusation.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.kit.events import Acked, Delivered, Event, OwnerWrite
from tests.kit.ledger import Copy, Ledger
from tests.kit.verdict import Findings, Oracle


def fence(ledger: Ledger, findings: Findings) -> None:
    """FENCE: a write by somebody who lost the row changes nothing; a stale ack is refused."""
    for message_id, writes in ledger.owner_writes.items():
        _judge_row(findings, message_id, writes)
    for copy, deliveries in ledger.deliveries.items():
        if len(deliveries) > 1:
            for ack in ledger.acked.get(copy, ()):
                _judge_ack(ledger, findings, copy, deliveries, ack)


def _judge_row(findings: Findings, message_id: str, writes: Sequence[OwnerWrite]) -> None:
    effective = [write for write in writes if write.changed_rows > 0]
    for write in effective:
        if write.changed_rows > 1:
            _report_row(findings, message_id, "one statement changed several rows", write)
        removal = _earlier(effective, write, "remove")
        if removal is not None:
            _report_row(findings, message_id, "a removed row was changed", removal, write)
            continue
        claim = _earlier(effective, write, "claim")
        if claim is not None and not _may_own(effective, write, claim):
            _report_row(findings, message_id, "a late owner changed the row", claim, write)


def _earlier(writes: Sequence[OwnerWrite], write: OwnerWrite, action: str) -> OwnerWrite | None:
    """The latest write of this action that was over before `write` began."""
    over = [w for w in writes if w.action == action and w.at_ns < write.began_ns and w is not write]
    return max(over, key=lambda one: one.at_ns, default=None)


def _may_own(writes: Sequence[OwnerWrite], write: OwnerWrite, claim: OwnerWrite) -> bool:
    """Whether the writer made this claim, or may have claimed the row since; a claim owns itself."""
    return any(
        own.action == "claim"
        and own.token == write.token
        and own.at_ns > claim.began_ns
        and own.began_ns < write.at_ns
        for own in writes
    )


def _report_row(findings: Findings, message_id: str, what: str, *evidence: Event) -> None:
    findings.add(
        Oracle.FENCE,
        f"outbox row of message {message_id}: {what}",
        message_ids=(message_id,),
        evidence=evidence,
        promises=("O3",),
    )


def _judge_ack(
    ledger: Ledger,
    findings: Findings,
    copy: Copy,
    deliveries: Sequence[Delivered],
    ack: Acked,
) -> None:
    """A confirmed ack is stale when a higher attempt was out since its own, before it began.

    Attempts are comparable only within one life of the broker, which may forget its last ones, and
    begin anew when a dead letter is replayed.
    """
    life = ledger.broker_life(ack.began_ns)
    holder = (ack.consumer, ack.attempt)
    own = [one.at_ns for one in deliveries if (one.consumer, one.attempt) == holder]
    since_ns = max((at_ns for at_ns in own if at_ns < ack.began_ns), default=0)
    for delivery in deliveries:
        if delivery.attempt <= ack.attempt or not since_ns < delivery.at_ns < ack.began_ns:
            continue
        if ledger.broker_life(delivery.at_ns) == life:
            findings.add(
                Oracle.FENCE,
                f"group {copy[0]}: the stale ack of message {copy[1]} by {ack.consumer} "
                f"was taken although {delivery.consumer} held it",
                message_ids=(copy[1],),
                evidence=(*deliveries, ack),
                promises=("C3",),
            )
            return
