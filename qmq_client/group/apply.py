"""Applies actions to a group. Every change of a group uses this module, also the replay at a start.

This module handles actions that move or change a group as a whole: seek, pause, settings, replayed
and purged dead letters, long retries, lost messages, and messages that are gone at a start.
`state.py` handles actions on single messages.
"""

from __future__ import annotations

from typing import Final

from qmq_client.group.actions import (
    Action,
    BroughtBack,
    Configured,
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
from qmq_client.group.dead_letters import Pool
from qmq_client.group.redelivery import Redelivery
from qmq_client.group.state import GroupState

#: Higher than every sequence.
_BEYOND: Final = 2**63


def apply_action(state: GroupState, action: Action) -> None:
    """Apply an action to the state. Requires: the action belongs to this subject and group."""
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
            _on_long_retry(state, action)
        case MovedBack():
            move_back(state, action.next, action.next_copy)
        case Owned():
            state.owner = action.owner
        case _:
            state.apply(action)


def _on_long_retry(state: GroupState, action: SetAside | BroughtBack) -> None:
    if isinstance(action, SetAside):
        waited = state.redeliveries.take(action.first, action.next)
        state.long_retries.begin(waited, action.retry_id)
        return
    waiting = state.long_retries.end(action.sequence, action.copy, action.at_ms)
    if waiting is not None:
        state.redeliveries.add(waiting)


def _on_sought(state: GroupState, action: Sought) -> None:
    state.give_up_all()
    state.cursor = action.sequence
    state.dead.forget(action.sequence)
    copies = state.long_retries.copies
    for sequence in [one for one in copies if one not in state.dead]:
        del copies[sequence]


def _on_purged(state: GroupState, action: Purged) -> None:
    copies = state.long_retries.copies
    for sequence in [
        one for one in copies if action.first <= one < action.next and one in state.dead
    ]:
        del copies[sequence]
    state.dead.forget(action.first, action.next)


def _on_skipped(state: GroupState, action: Skipped) -> None:
    waiting = state.redeliveries.take(action.first, action.next)
    for run in waiting:
        state.long_retries.forget_copies(run.first, run.next)
    held_before = state.held
    if state.by_key is not None:
        in_range = [one for one, _ in state.by_key.sequences() if action.first <= one < action.next]
        given = state.given()  # a message in flight holds its key until its outcome
        for sequence in in_range:
            if sequence not in given and not state.long_retries.holds(sequence):
                state.by_key.done(sequence, sequence + 1)
    state.lost_count += sum(run.next - run.first for run in waiting)
    state.lost_count += held_before - state.held + max(0, action.next - state.cursor)
    state.cursor = max(state.cursor, action.next)


def _on_replayed(state: GroupState, action: Replayed) -> None:
    for index, sequence in enumerate(state.dead_between(action.first, action.next)):
        letter = state.dead.pop(sequence)
        if state.by_key is not None and action.keys:
            state.by_key.add(sequence, action.keys[index])
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


def new_state(defined: GroupDefined, pool: Pool | None = None) -> GroupState:
    """The state of a group that was just defined; `pool` pages out its dead letters."""
    state = GroupState(
        subject=defined.subject,
        group=defined.group,
        first_sequence=defined.first_sequence,
        max_attempts=defined.max_attempts,
        pool=pool,
    )
    state.seen_ms = defined.at_ms
    return state


def must_move_back(state: GroupState, next_sequence: int, next_copy: int) -> bool:
    """Whether `move_back` would change anything."""
    known = [state.cursor, state.dead.next_sequence]
    known += [run.next for run in state.redeliveries.runs()]
    known += [run.next for run in state.long_retries.runs.runs()]
    known += [lease.next_sequence for _, log in state.consumers() for lease in log.leases()]
    if state.by_key is not None:
        known += [sequence + 1 for sequence, _ in state.by_key.sequences()]
    if (
        max(known) > next_sequence
        or max(state.long_retries.copies.values(), default=-1) >= next_copy
    ):
        return True
    return bool(state.dead) and any(one in state.dead for one in state.given())


def move_back(state: GroupState, next_sequence: int, next_copy: int) -> None:
    """Forget messages from `next_sequence` on, and copies from `next_copy` on.

    They were lost by a power cut or damage: they can no longer be settled, and new messages get
    their sequences. If a copy is lost, the group gets the original.
    """
    state.cursor = min(state.cursor, next_sequence)
    state.redeliveries.take(next_sequence, _BEYOND)
    state.long_retries.forget(next_sequence, _BEYOND)
    for sequence in [one for one, copy in state.long_retries.copies.items() if copy >= next_copy]:
        del state.long_retries.copies[sequence]
    state.drop_leases_beyond(next_sequence)
    state.dead.forget(next_sequence)
    if state.by_key is not None:
        for sequence, _ in list(state.by_key.sequences()):
            if sequence >= next_sequence:
                state.by_key.done(sequence, sequence + 1)
    # If the log ended between a dead letter and the end of its lease, the message is delivered again.
    if state.dead:
        for sequence in state.given():
            state.dead.pop(sequence, None)
