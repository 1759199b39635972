"""What became of one message in one group: the answer to "did they get it?"."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from qmq_broker.service.delivery.groups import GroupState
from qmq_broker.service.delivery.history import History


class Fate(StrEnum):
    """The state of a message in a group; exactly one applies."""

    #: The group has not reached it.
    NOT_YET = "not yet"
    #: A consumer has it.
    IN_FLIGHT = "in flight"
    #: It was given back and will be delivered again.
    WAITING = "waiting"
    #: The group reached it, but an earlier message with the same key is not done.
    HELD = "held"
    #: The group does not get it again.
    DEAD = "dead"
    #: Acked, or passed over because the group began after it or was moved.
    PASSED = "passed"


class PastAttempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """See `Attempt`."""

    attempt: int
    consumer: str
    given_at_ms: int
    ended_at_ms: int
    outcome: str
    error: str = ""


class GroupFate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fate of one message in one group, with what else is known."""

    group: str
    state: Fate
    #: Deliveries so far, if known.
    attempts: int = 0
    #: Who has it.
    consumer: str = ""
    #: When the lease ends, when it is delivered again, or when it died.
    at_ms: int = 0
    #: Why it died.
    reason: str = ""
    #: What the last consumer said.
    error: str = ""
    #: The attempts so far, newest last.
    history: tuple[PastAttempt, ...] = ()


def past(history: History) -> tuple[PastAttempt, ...]:
    """A history as it is shown."""
    return tuple(PastAttempt(**msgspec.structs.asdict(attempt)) for attempt in history)


def fate_of(state: GroupState, sequence: int) -> GroupFate:
    """What became of this message in this group. Requires: the thread of the group."""
    if sequence >= state.cursor:
        return GroupFate(group=state.group, state=Fate.NOT_YET)
    dead = state.dead.get(sequence)
    if dead is not None:
        return GroupFate(
            group=state.group,
            state=Fate.DEAD,
            attempts=dead.attempts,
            at_ms=dead.at_ms,
            reason=dead.reason,
            error=dead.error,
            history=past(dead.history),
        )
    for run in (*state.redeliveries.runs(), *state.aside.runs.runs()):
        if run.first <= sequence < run.next:
            return GroupFate(
                group=state.group,
                state=Fate.WAITING,
                attempts=run.attempts,
                at_ms=run.retry_at_ms,
                error=run.error,
                history=past(run.history),
            )
    for consumer, log in state.consumers():
        for lease in log.leases():
            if lease.first_sequence <= sequence < lease.next_sequence:
                return GroupFate(
                    group=state.group,
                    state=Fate.IN_FLIGHT,
                    attempts=lease.attempt,
                    consumer=consumer,
                    at_ms=lease.until_ms,
                    history=past(lease.history),
                )
    if state.lanes is not None and any(sequence == one for one, _ in state.lanes.sequences()):
        return GroupFate(group=state.group, state=Fate.HELD)
    return GroupFate(group=state.group, state=Fate.PASSED)
