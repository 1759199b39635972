"""Which events excuse an extra delivery, and which faults were active when.

A delivery of a message that its group had before needs one excuse of its own, lying between the
previous delivery and the extra one. After a confirmed acknowledgement only one thing excuses: a
broker that lost what it had not yet made durable.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tests.kit.events import (
    Acked,
    AckUnknown,
    AnyEvent,
    Delivered,
    Fault,
    Heal,
    LeaseExpired,
    Limit,
    Nacked,
)
from tests.kit.expectations import NS_PER_MS, Promises

#: Kinds of fault after which a process has forgotten what it had not written.
CRASHES: Final = frozenset({"crash", "power_cut"})
#: Kinds of fault that keep a consumer or its answers away, so that leases end or answers come late.
SILENCES: Final = frozenset({"pause", "partition", "slow"})

NEVER_NS: Final = 1 << 62
#: The excuse of a delivery that was no extra one: its consumer was silent and saw it too late.
SEEN_LATE: Final = "handed out before, seen late"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One fault or exceeded limit from its beginning to its end."""

    #: Kind of fault; of a limit, its name.
    kind: str
    #: Process or consumer; of a limit, empty.
    target: str
    #: Before it was injected.
    begin_ns: int
    #: After it was removed, for a crash after the process ran again; the heal when nobody said.
    end_ns: int

    def meets(self, first_ns: int, next_ns: int) -> bool:
        """Whether any part of it lies between the two times."""
        return self.begin_ns <= next_ns and self.end_ns >= first_ns


@dataclass(frozen=True, slots=True)
class FaultTimeline:
    """All spans of a run, by target and merged."""

    spans: tuple[Span, ...]
    by_target: dict[str, list[Span]]
    #: Disjoint active times, faults and limits together, each lengthened by the grace.
    active: list[tuple[int, int]]

    @classmethod
    def of(cls, events: Sequence[AnyEvent], *, grace_ms: int) -> FaultTimeline:
        """Pair the begins and ends. Requires: `events` in order of time."""
        heals = [event.at_ns for event in events if isinstance(event, Heal)]
        faults = (event for event in events if isinstance(event, Fault))
        limits = (event for event in events if isinstance(event, Limit))
        spans = [
            *_spans(((event, event.kind, event.target) for event in faults), heals),
            *_spans(((event, event.name, "") for event in limits), heals),
        ]
        by_target: dict[str, list[Span]] = defaultdict(list)
        for span in spans:
            by_target[span.target].append(span)
        active = _merged((span.begin_ns, span.end_ns + grace_ms * NS_PER_MS) for span in spans)
        return cls(tuple(spans), dict(by_target), active)

    def is_active(self, first_ns: int, next_ns: int | None = None) -> bool:
        """Whether anything, or its grace, was active at that moment or in that time."""
        end_ns = first_ns if next_ns is None else next_ns
        i = bisect_right(self.active, (end_ns, NEVER_NS * 2)) - 1
        return i >= 0 and self.active[i][1] >= first_ns

    def against(self, targets: Iterable[str], kinds: frozenset[str]) -> list[Span]:
        """The spans of these kinds against any of these targets."""
        return [
            span
            for target in targets
            for span in self.by_target.get(target, ())
            if span.kind in kinds
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlements:
    """What is known of one message in one group beside its deliveries, in order of time."""

    acked: Sequence[Acked] = ()
    unknown: Sequence[AckUnknown] = ()
    nacked: Sequence[Nacked] = ()
    expired: Sequence[LeaseExpired] = ()


def excuse_of(
    previous: Delivered,
    extra: Delivered,
    settlements: Settlements,
    faults: FaultTimeline,
    promises: Promises,
) -> str | None:
    """Name what excuses delivering `extra` although its group had `previous`, or None."""
    if extra.attempt < previous.attempt and _was_silent(extra, previous, faults):
        return SEEN_LATE
    confirmed = [a for a in settlements.acked if previous.at_ns < a.at_ns <= extra.at_ns]
    if confirmed:
        return _excuse_after_ack(confirmed[-1], extra, faults, promises)
    return _excuse_by_holder(previous, extra, settlements, promises) or _excuse_by_fault(
        previous, extra, faults, promises
    )


def _was_silent(extra: Delivered, previous: Delivered, faults: FaultTimeline) -> bool:
    spans = faults.against({extra.consumer, extra.process}, SILENCES)
    return any(span.meets(previous.at_ns, extra.at_ns) for span in spans)


def _excuse_after_ack(
    ack: Acked, extra: Delivered, faults: FaultTimeline, promises: Promises
) -> str | None:
    durable_ns = ack.at_ns + promises.ack_durable_ms * NS_PER_MS
    for span in faults.against(promises.brokers, CRASHES):
        if span.meets(ack.began_ns, durable_ns) and span.begin_ns <= extra.at_ns:
            return "broker crash before the ack was durable"
    return None


def _excuse_by_holder(
    previous: Delivered, extra: Delivered, settlements: Settlements, promises: Promises
) -> str | None:
    first_ns, next_ns = previous.at_ns, extra.at_ns
    slack_ns = promises.lease_slack_ms * NS_PER_MS
    holder = (previous.consumer, previous.attempt)
    for nack in settlements.nacked:
        if (nack.consumer, nack.attempt) == holder and first_ns <= nack.at_ns <= next_ns:
            return "nack"
    for end in settlements.expired:
        if (end.consumer, end.attempt) == holder and first_ns <= end.at_ns <= next_ns + slack_ns:
            return "lease end"
    for unknown in settlements.unknown:
        if (unknown.consumer, unknown.attempt) == holder and unknown.began_ns <= next_ns:
            return "unknown ack"
    lease_ms = promises.lease_ms
    if lease_ms is not None and next_ns - first_ns + slack_ns >= lease_ms * NS_PER_MS:
        return "lease end"
    return None


def _excuse_by_fault(
    previous: Delivered, extra: Delivered, faults: FaultTimeline, promises: Promises
) -> str | None:
    holder = {previous.consumer, previous.process}
    causes = [(holder, CRASHES, "consumer crash"), (set(promises.brokers), CRASHES, "broker crash")]
    if promises.lease_ms is None:  # else silence excuses by its length, see `_excuse_by_holder`
        causes.append((holder, SILENCES, "consumer silent"))
        causes.append((set(promises.brokers), SILENCES, "broker silent"))
    for targets, kinds, name in causes:
        for span in faults.against(targets, kinds):
            if span.meets(previous.at_ns, extra.at_ns):
                return name
    return None


def _spans(named: Iterable[tuple[Fault | Limit, str, str]], heals: Sequence[int]) -> Iterable[Span]:
    begun: dict[tuple[str, str], int] = {}
    for event, kind, target in named:
        if event.phase == "begin":
            begun.setdefault((kind, target), event.at_ns)
        elif (kind, target) in begun:
            begin_ns = begun.pop((kind, target))
            yield Span(kind=kind, target=target, begin_ns=begin_ns, end_ns=event.at_ns)
    for (kind, target), begin_ns in begun.items():
        i = bisect_right(heals, begin_ns)
        end_ns = heals[i] if i < len(heals) else NEVER_NS
        yield Span(kind=kind, target=target, begin_ns=begin_ns, end_ns=end_ns)


def _merged(times: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin_ns, end_ns in sorted(times):
        if merged and begin_ns <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_ns))
        else:
            merged.append((begin_ns, end_ns))
    return merged
