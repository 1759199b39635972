"""The state of one message in one group, and the reason if the group did not get it."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from qmq_broker.service.delivery.registry import Group
from qmq_client.group.history import History
from qmq_client.group.state import GroupState


class MessageState(StrEnum):
    """The state of a message in a group; exactly one applies."""

    #: The group's cursor has not reached it.
    NOT_YET = "not yet"
    #: A consumer holds it.
    IN_FLIGHT = "in flight"
    #: It was returned and will be delivered again.
    WAITING = "waiting"
    #: The group's cursor reached it, but an earlier message with the same key is not settled.
    HELD = "held"
    #: A dead letter of the group.
    DEAD = "dead"
    #: Acked, or skipped because the group began after it or was moved.
    PASSED = "passed"


class Why(StrEnum):
    """The reason why a group does not get a message now, or did not; empty if no reason is known."""

    NOTHING = ""
    PAUSED = "the group is paused"
    BEFORE = "messages before it come first"
    TAGS = "its tags do not fit the group's"
    LONG_RETRY = "a long retry"
    RETRY = "a retry, not due yet"
    KEY = "an earlier message of its key is not done"


class PastAttempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """See `Attempt`."""

    attempt: int
    consumer: str
    given_at_ms: int
    ended_at_ms: int
    outcome: str
    error: str = ""


class MessageInGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message in one group, with further known facts."""

    group: str
    state: MessageState
    #: Deliveries so far, if known.
    attempts: int = 0
    #: The consumer that holds it.
    consumer: str = ""
    #: When the lease ends, when it is delivered again, or when it died.
    at_ms: int = 0
    #: The reason of the dead letter.
    reason: str = ""
    #: The error of the last consumer.
    error: str = ""
    #: The attempts so far, newest last.
    history: tuple[PastAttempt, ...] = ()
    #: The reason for the wait, if the group did not get it or waits for its next delivery.
    why: Why = Why.NOTHING
    #: Messages that come first.
    before: int = 0
    #: When a consumer last asked for messages of the group; 0 for not since the broker started.
    asked_at_ms: int = 0


def past(history: History) -> tuple[PastAttempt, ...]:
    """The history in the form of an answer."""
    return tuple(PastAttempt(**msgspec.structs.asdict(attempt)) for attempt in history)


def in_group(group: Group, sequence: int, record: bytes, now_ms: int) -> MessageInGroup:
    """The state of this message in this group, and why. Requires: the thread of the group."""
    state = group.state
    found = _found_in(state, sequence)
    if found.state in {MessageState.DEAD, MessageState.IN_FLIGHT}:
        return found
    why = _why(state, found, sequence, record, now_ms)
    if found.state is MessageState.PASSED:
        return msgspec.structs.replace(found, why=why)
    before = max(0, sequence - state.cursor)
    return msgspec.structs.replace(found, why=why, before=before, asked_at_ms=group.asked_at_ms)


def _why(
    state: GroupState, found: MessageInGroup, sequence: int, record: bytes, now_ms: int
) -> Why:
    is_wanted = state.filter is None or state.filter.matches(record)
    if found.state in {MessageState.NOT_YET, MessageState.PASSED} and not is_wanted:
        return Why.TAGS
    if found.state is MessageState.PASSED:
        return Why.NOTHING
    if state.is_paused:
        return Why.PAUSED
    if found.state is MessageState.HELD:
        return Why.KEY
    if found.state is MessageState.NOT_YET:
        return Why.BEFORE if sequence > state.cursor else Why.NOTHING
    if state.long_retries.runs.at(sequence) is not None:
        return Why.LONG_RETRY
    return Why.RETRY if found.at_ms > now_ms else Why.NOTHING


def _found_in(state: GroupState, sequence: int) -> MessageInGroup:
    if sequence >= state.cursor:
        return MessageInGroup(group=state.group, state=MessageState.NOT_YET)
    dead = state.dead.get(sequence)
    if dead is not None:
        return MessageInGroup(
            group=state.group,
            state=MessageState.DEAD,
            attempts=dead.attempts,
            at_ms=dead.at_ms,
            reason=dead.reason,
            error=dead.error,
            history=past(dead.history),
        )
    for run in (*state.redeliveries.runs(), *state.long_retries.runs.runs()):
        if run.first <= sequence < run.next:
            return MessageInGroup(
                group=state.group,
                state=MessageState.WAITING,
                attempts=run.attempts,
                at_ms=run.retry_at_ms,
                error=run.error,
                history=past(run.history),
            )
    for consumer, log in state.consumers():
        for lease in log.leases():
            if lease.first_sequence <= sequence < lease.next_sequence:
                return MessageInGroup(
                    group=state.group,
                    state=MessageState.IN_FLIGHT,
                    attempts=lease.attempt,
                    consumer=consumer,
                    at_ms=lease.until_ms,
                    history=past(lease.history),
                )
    if state.by_key is not None and any(sequence == one for one, _ in state.by_key.sequences()):
        return MessageInGroup(group=state.group, state=MessageState.HELD)
    return MessageInGroup(group=state.group, state=MessageState.PASSED)
