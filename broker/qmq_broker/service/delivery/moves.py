"""Applying an action to a group: the one door for the journal and for a restart.

This module handles actions that move or change a group as a whole: seek, pause, settings, replayed
dead letters, messages set aside, messages lost by force or gone at a start. `groups.py` handles those on single
messages.

The groups of a restarted broker: a snapshot, then the actions after it.

Anything stamped later than now was written before the clock was set back. Deadlines are moved with
the clock, so that no lease lasts longer than it was given for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from qmq_broker.service.delivery.groups import GroupState
from qmq_broker.service.delivery.holding import move_back
from qmq_broker.service.delivery.redelivery import Redelivery
from qmq_broker.service.delivery.snapshot import decode_all
from qmq_broker.storage.logs.actions import (
    Action,
    BroughtBack,
    Configured,
    Ended,
    GroupDefined,
    MovedBack,
    Owned,
    Paused,
    Purged,
    Replayed,
    SetAside,
    Skipped,
    Sought,
)


def apply_action(state: GroupState, action: Action) -> None:
    """Change the state as this action says. Requires: it is for this subject and group."""
    match action:
        case Skipped():
            _on_skipped(state, action)
        case Configured():
            state.configure(action.settings)
            state.seen_ms = action.at_ms
        case Paused():
            state.is_paused = action.is_paused
        case Sought():
            _on_sought(state, action)
        case Replayed():
            _on_replayed(state, action)
        case Purged():
            _on_purged(state, action)
        case SetAside() | BroughtBack():
            _on_aside(state, action)
        case MovedBack():
            move_back(state, action.next, action.next_copy)
        case Owned():
            state.owner = action.owner
        case _:
            state.apply(action)


def _on_aside(state: GroupState, action: SetAside | BroughtBack) -> None:
    if isinstance(action, SetAside):
        waited = state.redeliveries.take(action.first, action.next)
        state.aside.put(waited, action.ticket)
        return
    back = state.aside.bring_back(action.sequence, action.copy, action.at_ms)
    if back is not None:
        state.redeliveries.add(back)


def _on_sought(state: GroupState, action: Sought) -> None:
    state.give_up_all()
    state.cursor = action.sequence
    state.dead.forget_from(action.sequence)
    copies = state.aside.copies
    for sequence in [one for one in copies if one not in state.dead]:
        del copies[sequence]


def _on_purged(state: GroupState, action: Purged) -> None:
    for sequence in state.dead_between(action.first, action.next):
        del state.dead[sequence]
        state.aside.forget_copies(sequence, sequence + 1)


def _on_skipped(state: GroupState, action: Skipped) -> None:
    waiting = state.redeliveries.take(action.first, action.next)
    for run in waiting:
        state.aside.forget_copies(run.first, run.next)
    held_before = state.held
    if state.lanes is not None:
        in_range = [one for one, _ in state.lanes.sequences() if action.first <= one < action.next]
        given = state.given()  # what somebody is handling holds its key until its outcome
        for sequence in in_range:
            if sequence not in given and not state.aside.holds(sequence):
                state.lanes.done(sequence, sequence + 1)
    state.lost_count += sum(run.next - run.first for run in waiting)
    state.lost_count += held_before - state.held + max(0, action.next - state.cursor)
    state.cursor = max(state.cursor, action.next)


def _on_replayed(state: GroupState, action: Replayed) -> None:
    for index, sequence in enumerate(state.dead_between(action.first, action.next)):
        letter = state.dead.pop(sequence)
        if state.lanes is not None and action.keys:
            state.lanes.add(sequence, action.keys[index])
            continue
        state.redeliveries.add(
            Redelivery(
                first=sequence,
                next=sequence + 1,
                attempts=0,
                retry_at_ms=action.at_ms,
                error=letter.error,
                history=letter.history,
            )
        )


class AtEnd(NamedTuple):
    """What the action log says."""

    groups: list[GroupState]
    #: Subject → name of the token that brought it into being.
    owners: dict[str, str]
    #: How many actions on groups were replayed.
    replayed: int


def groups_at_end(snapshot: bytes, actions: Iterable[Action], now_ms: int) -> AtEnd:
    """The groups after all that; `b""` is no snapshot."""
    states, owners = decode_all(snapshot, now_ms) if snapshot else ([], {})
    groups = {(state.subject, state.group): state for state in states}
    count = 0
    for action in actions:
        key = (action.subject, action.group)
        if not action.group:
            _note_subject(owners, action)
            continue
        state = groups.get(key)
        if state is None:
            if not isinstance(action, GroupDefined):
                continue
            state = groups[key] = new_state(action)
        count += 1
        if isinstance(action, Ended):
            del groups[key]
            continue
        apply_action(state, _not_in_future(action, now_ms))
        if isinstance(action, SetAside) and action.at_ms > now_ms:
            # Their copies stay due when they were: delayed messages follow the clock as it is.
            state.aside.put_off(action.first, action.next, action.at_ms - now_ms)
    return AtEnd(list(groups.values()), owners, count)


def _note_subject(owners: dict[str, str], action: Action) -> None:
    if isinstance(action, Owned):
        owners[action.subject] = action.owner
    elif isinstance(action, Ended):
        owners.pop(action.subject, None)


def new_state(defined: GroupDefined) -> GroupState:
    """A group that was just defined."""
    state = GroupState(
        subject=defined.subject,
        group=defined.group,
        first_sequence=defined.first_sequence,
        max_attempts=defined.max_attempts,
    )
    state.seen_ms = defined.at_ms
    return state


def _not_in_future(action: Action, now_ms: int) -> Action:
    shift_ms = action.at_ms - now_ms
    if shift_ms <= 0:
        return action
    changes: dict[str, int] = {"at_ms": now_ms}
    for name in ("lease_until_ms", "retry_at_ms"):
        value = getattr(action, name, 0)
        if value:
            changes[name] = max(1, value - shift_ms)
    return msgspec.structs.replace(action, **changes)
