"""Is the order per key kept: ORDER, in the log and in groups that asked for it.

Only certain orders are judged: two transactions that overlapped may stand either way round, and
what a crash may have settled unseen counts as settled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tests.kit.events import Event
from tests.kit.excuses import CRASHES, NEVER_NS
from tests.kit.ledger import Copy, Ledger, Sent
from tests.kit.verdict import Findings, Oracle


@dataclass(frozen=True, slots=True)
class _Placed:
    """A message of a key and the sequence it got."""

    sent: Sent
    sequence: int


def order(ledger: Ledger, findings: Findings) -> None:
    """ORDER: sequences follow the commit order; the next waits until the previous is settled."""
    ordered_groups = {name: group for name, group in ledger.groups.items() if group.is_ordered}
    subjects = set(ledger.promises.ordered_subjects)
    subjects.update(*(group.subjects for group in ordered_groups.values()))
    if not subjects:
        return
    for (subject, _), placed in _by_key(ledger, subjects).items():
        _judge_log(findings, placed)
        for name, group in ordered_groups.items():
            if subject in group.subjects:
                _judge_group(ledger, findings, name, placed)


def _by_key(ledger: Ledger, subjects: Iterable[str]) -> dict[tuple[str, str], list[_Placed]]:
    wanted = frozenset(subjects)
    by_key: dict[tuple[str, str], list[_Placed]] = {}
    for sent in ledger.owed:
        attempt = sent.attempt
        sequence = ledger.first_sequence.get(attempt.message_id)
        if attempt.key and attempt.subject in wanted and sequence is not None:
            by_key.setdefault((attempt.subject, attempt.key), []).append(_Placed(sent, sequence))
    for placed in by_key.values():
        placed.sort(key=lambda one: one.sequence)
    return by_key


def _judge_log(findings: Findings, placed: list[_Placed]) -> None:
    """Walk in log order; a message committed before an earlier-placed one began is out of order."""
    latest: Sent | None = None
    last_of: dict[str, Sent] = {}
    for one in placed:
        sent, attempt = one.sent, one.sent.attempt
        committed_ns = NEVER_NS if sent.committed_ns is None else sent.committed_ns
        if latest is not None and committed_ns < latest.attempt.at_ns:
            _misplaced(findings, latest, sent)
        sibling = last_of.get(attempt.transaction_id)
        if attempt.transaction_id and sibling is not None and sibling.position > sent.position:
            _misplaced(findings, sibling, sent)
        else:
            last_of[attempt.transaction_id] = sent
        if latest is None or attempt.at_ns > latest.attempt.at_ns:
            latest = sent


def _misplaced(findings: Findings, ahead: Sent, behind: Sent) -> None:
    ids = (ahead.attempt.message_id, behind.attempt.message_id)
    findings.add(
        Oracle.ORDER,
        f"message {ids[0]} of key {ahead.attempt.key} stands before {ids[1]}, "
        "which was committed or sent earlier",
        message_ids=ids,
        evidence=(ahead.attempt, behind.attempt),
        promises=("O4",),
    )


def _judge_group(ledger: Ledger, findings: Findings, group: str, placed: list[_Placed]) -> None:
    settled_ns, blocker = -1, ""
    for one in placed:
        copy = (group, one.sent.attempt.message_id)
        deliveries = ledger.deliveries.get(copy)
        if not deliveries:
            continue  # LOST, or dead by its age: neither is a matter of order
        if deliveries[0].at_ns < settled_ns:
            evidence: tuple[Event, ...] = (
                *ledger.deliveries[group, blocker][:2],
                *ledger.acked.get((group, blocker), ())[:2],
                deliveries[0],
            )
            findings.add(
                Oracle.ORDER,
                f"group {group} got message {copy[1]} of key {one.sent.attempt.key} "
                f"before {blocker} was settled",
                message_ids=(blocker, copy[1]),
                evidence=evidence,
                promises=("C7",),
            )
        free_ns = _earliest_settlement_ns(ledger, copy)
        if free_ns > settled_ns:
            settled_ns, blocker = free_ns, copy[1]


def _earliest_settlement_ns(ledger: Ledger, copy: Copy) -> int:
    """The earliest time at which the broker may have taken this copy as settled."""
    deliveries = ledger.deliveries[copy]
    times = [ack.began_ns for ack in ledger.acked.get(copy, ())]
    times += [ack.began_ns for ack in ledger.ack_unknown.get(copy, ())]
    if copy in ledger.dead:
        # A broker that lost its last moments makes the last attempt, and the dead letter, once more.
        last = max(delivery.attempt for delivery in deliveries)
        times += [delivery.at_ns for delivery in deliveries if delivery.attempt == last]
        if copy in ledger.last_given_ns:
            times.append(ledger.last_given_ns[copy])
    if times:
        return min(times)
    for delivery in deliveries:
        holder = {delivery.consumer, delivery.process}
        spans = ledger.faults.against(holder, CRASHES)
        if any(span.end_ns >= delivery.at_ns for span in spans):
            return delivery.at_ns
    return NEVER_NS
