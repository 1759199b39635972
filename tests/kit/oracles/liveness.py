"""Does everything go on: STUCK, BLAME, RECOVERY."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from tests.kit.events import (
    Accepted,
    Attempt,
    Delivered,
    Drained,
    Error,
    Fault,
    Heal,
    Started,
    Stopped,
)
from tests.kit.expectations import NS_PER_MS
from tests.kit.ledger import Ledger
from tests.kit.verdict import Findings, Oracle


def stuck(ledger: Ledger, findings: Findings) -> None:
    """STUCK: everything drains in time, and what stops leaves nothing behind.

    After the last heal or attempt it must drain; after an earlier heal the next fault may prevent it.
    """
    drained = [event.at_ns for event in ledger.of(Drained)]
    begun = [event.at_ns for event in ledger.of(Fault) if event.phase == "begin"]
    for heal in ledger.of(Heal)[:-1]:
        next_fault_ns = _next_after(begun, heal.at_ns)
        drained_ns = _next_after(drained, heal.at_ns)
        if drained_ns is not None and (next_fault_ns is None or drained_ns <= next_fault_ns):
            _judge_drain(ledger, findings, heal.at_ns, drained_ns)
    lasts = [*ledger.of(Heal)[-1:], *ledger.of(Attempt)[-1:]]
    since_ns = max((event.at_ns for event in lasts), default=0)
    _judge_drain(ledger, findings, since_ns, _next_after(drained, since_ns))
    _judge_stops(ledger, findings)


def _judge_drain(ledger: Ledger, findings: Findings, since_ns: int, drained_ns: int | None) -> None:
    bound_ms = ledger.promises.drain_ms_max
    if drained_ns is None:
        findings.add(Oracle.STUCK, "never drained", evidence=tuple(ledger.of(Heal)))
        return
    drain_ms = (drained_ns - since_ns) // NS_PER_MS
    findings.counts["drain_ms_max"] = max(findings.counts["drain_ms_max"], drain_ms)
    if drain_ms > bound_ms:
        findings.add(
            Oracle.STUCK,
            f"drained {drain_ms} ms after the heal or the last attempt; {bound_ms} ms are allowed",
            evidence=tuple(ledger.of(Heal)),
        )


def _judge_stops(ledger: Ledger, findings: Findings) -> None:
    stopped = {event.process: event for event in ledger.of(Stopped)}
    for event in ledger.of(Stopped):
        left = {
            "threads": event.threads,
            "leases": event.leases,
            "connections": event.connections,
            "temporary files": event.temporary_files,
        }
        listed = ", ".join(f"{count} {name}" for name, count in left.items() if count)
        if listed:
            findings.add(
                Oracle.STUCK,
                f"process {event.process} left {listed} behind",
                evidence=(event,),
                promises=("C8",),
            )
    last_start = {event.process: event for event in ledger.of(Started)}
    for name in sorted(ledger.promises.must_stop):
        start, stop = last_start.get(name), stopped.get(name)
        if stop is None or (start is not None and start.at_ns > stop.at_ns):
            findings.add(
                Oracle.STUCK,
                f"process {name} did not stop in order",
                evidence=() if start is None else (start,),
                promises=("C8",),
            )


def blame(ledger: Ledger, findings: Findings) -> None:
    """BLAME: an error answer needs an active fault or an exceeded limit."""
    for event in ledger.of(Error):
        if not ledger.faults.is_active(event.at_ns):
            findings.counts["errors_without_cause"] += 1
            findings.add(
                Oracle.BLAME,
                f"{event.process or 'a client'} got {event.code} from {event.operation} "
                "while no fault was active",
                evidence=(event,),
            )


def recovery(ledger: Ledger, findings: Findings) -> None:
    """RECOVERY: soon after a heal something succeeds again."""
    successes = sorted(
        event.at_ns for kind in (Accepted, Delivered, Drained) for event in ledger.of(kind)
    )
    bound_ms = ledger.promises.recovery_ms_max
    for heal in ledger.of(Heal):
        first_ns = _next_after(successes, heal.at_ns)
        if first_ns is None:
            continue  # never drained either: STUCK
        first_ms = (first_ns - heal.at_ns) // NS_PER_MS
        findings.counts["recovery_ms_max"] = max(findings.counts["recovery_ms_max"], first_ms)
        if first_ms > bound_ms:
            findings.add(
                Oracle.RECOVERY,
                f"the first success came {first_ms} ms after the heal; {bound_ms} ms are allowed",
                evidence=(heal,),
            )


def _next_after(times: Sequence[int], at_ns: int) -> int | None:
    """The first of the sorted times at or after `at_ns`."""
    i = bisect_left(times, at_ns)
    return times[i] if i < len(times) else None
