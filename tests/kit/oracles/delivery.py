"""Is each delivery right in number and time: DUPDEL, EARLY, LATE."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import attrgetter

from tests.kit.events import Delivered, Event
from tests.kit.excuses import SEEN_LATE, excuse_of
from tests.kit.expectations import NS_PER_MS
from tests.kit.ledger import Copy, Ledger, Sent, grouped
from tests.kit.verdict import Findings, Oracle


def delivered_again(ledger: Ledger, findings: Findings) -> None:
    """DUPDEL: every delivery after the first needs an excuse of its own."""
    for copy, deliveries in ledger.deliveries.items():
        if len(deliveries) > 1:
            for copies in _by_entry(ledger, copy, deliveries):
                _judge_extras(ledger, findings, copy, copies)


def _by_entry(
    ledger: Ledger, copy: Copy, deliveries: Sequence[Delivered]
) -> Iterable[Sequence[Delivered]]:
    """Two entries of one id (a matter of DUPLOG) are delivered once each."""
    if len(ledger.stored.get(copy[1], ())) < 2:
        return (deliveries,)
    return grouped(deliveries, attrgetter("sequence")).values()


def _judge_extras(
    ledger: Ledger, findings: Findings, copy: Copy, deliveries: Sequence[Delivered]
) -> None:
    settlements = ledger.settlements(copy)
    if len(ledger.stored.get(copy[1], ())) > 1:
        # An ack does not say of which entry it is: that of one is no ack of the other.
        settlements = replace(settlements, acked=())
    previous = deliveries[0]
    for extra in deliveries[1:]:
        excuse = excuse_of(previous, extra, settlements, ledger.faults, ledger.promises)
        if excuse is None:
            settled: tuple[Event, ...] = (*settlements.acked, *settlements.nacked)
            findings.add(
                Oracle.DUPDEL,
                f"group {copy[0]} got message {copy[1]} again at {extra.consumer} without excuse",
                message_ids=(copy[1],),
                evidence=(previous, extra, *settled),
            )
        else:
            findings.excused[excuse] += 1
        if excuse != SEEN_LATE:
            previous = extra


def on_time(ledger: Ledger, findings: Findings) -> None:
    """EARLY, LATE: the first delivery of a delayed message is at its due time or soon after."""
    delayed = [s for s in ledger.owed if s.attempt.due_ns or s.attempt.due_at_ms]
    if not delayed:
        return
    for name in ledger.groups:
        for sent in delayed:
            deliveries = ledger.deliveries.get((name, sent.attempt.message_id))
            if deliveries:
                _judge_time(ledger, findings, sent, deliveries[0])


def _judge_time(ledger: Ledger, findings: Findings, sent: Sent, first: Delivered) -> None:
    attempt = sent.attempt
    if first.broker_at_ms and first.broker_at_ms < attempt.due_at_ms:
        early_ms = attempt.due_at_ms - first.broker_at_ms
        _mistimed(findings, Oracle.EARLY, sent, first, f"{early_ms} ms early by the broker's clock")
        return
    if not attempt.due_ns:
        return
    late_ns = first.at_ns - attempt.due_ns
    if late_ns < -ledger.promises.early_slack_ms * NS_PER_MS:
        _mistimed(findings, Oracle.EARLY, sent, first, f"{-late_ns // NS_PER_MS} ms early")
        return
    bound_ms = ledger.promises.late_ms_max
    if bound_ms is None or sent.committed_ns is None:
        return
    possible_ns = max(attempt.due_ns, sent.committed_ns)
    late_ms = (first.at_ns - possible_ns) // NS_PER_MS
    findings.counts["late_ms_max"] = max(findings.counts["late_ms_max"], late_ms)
    if late_ms > bound_ms and not ledger.faults.is_active(possible_ns, first.at_ns):
        _mistimed(findings, Oracle.LATE, sent, first, f"{late_ms} ms late")


def _mistimed(findings: Findings, oracle: Oracle, sent: Sent, first: Delivered, how: str) -> None:
    message_id = sent.attempt.message_id
    findings.add(
        oracle,
        f"message {message_id} was delivered to {first.consumer} {how}",
        message_ids=(message_id,),
        evidence=(sent.attempt, first),
    )
