"""What a run was promised: its groups and the bounds a history is judged by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One consumer group, each of which is owed every committed message of its subjects."""

    #: Subjects it reads; a delivery of another one is ALIEN.
    subjects: frozenset[str]
    #: It writes a business row per message in its inbox transaction, so effects are counted.
    has_effects: bool = True
    #: It asked for ordered delivery by key, so its subjects are stored in commit order too.
    is_ordered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Promises:
    """Bounds of a run. A test tightens or widens what it is about and leaves the rest."""

    #: Names of broker processes among the targets of faults.
    brokers: frozenset[str] = frozenset({"broker"})
    #: Subjects stored in commit order per key though no group reads them in order.
    ordered_subjects: frozenset[str] = frozenset()
    #: Records after which the broker may store a known id again; None: never.
    dedupe_window_messages: int | None = None
    #: Requests that the network sent twice: each may store its messages again beyond that.
    doubled_requests: int = 0
    #: A broker crash excuses redelivery of a message acked at most this long before. The action
    #: log is synced every 100 ms; the rest is the scheduler of a busy machine.
    ack_durable_ms: int = 1_000
    #: With a fixed lease, silence this long excuses a redelivery without a `lease_expired` event;
    #: None: the event is needed.
    lease_ms: int | None = None
    #: A lease is stamped by its holder, whose clock starts when the answer arrives.
    lease_slack_ms: int = 250
    #: Errors may still arrive this long after a fault or an exceeded limit ended.
    error_grace_ms: int = 10_000
    #: A broker's wall clock and this machine's monotonic clock may differ by this much.
    early_slack_ms: int = 5
    #: A due message is delivered at most this much later while no fault is active; None: unbounded.
    late_ms_max: int | None = None
    #: From heal to the first accepted or delivered message.
    recovery_ms_max: int = 30_000
    #: From heal (without one: from the last attempt) to drained.
    drain_ms_max: int = 120_000
    #: Processes that must report an orderly stop at the end.
    must_stop: frozenset[str] = frozenset()
