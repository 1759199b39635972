"""Actions that move or change a group as a whole: seek, pause, settings, dead letters taken up again,
messages lost by force. What happens to messages one by one is in `groups.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qmq_broker.service.delivery.redelivery import Redelivery
from qmq_broker.storage.logs.actions import (
    Action,
    Configured,
    Paused,
    Purged,
    Replayed,
    Skipped,
    Sought,
)

if TYPE_CHECKING:
    from qmq_broker.service.delivery.groups import GroupState


def apply_move(state: GroupState, action: Action) -> None:
    """Change the state as this action says; others change nothing."""
    match action:
        case Skipped():
            _on_skipped(state, action)
        case Configured():
            state.configure(action.settings)
        case Paused():
            state.is_paused = action.is_paused
        case Sought():
            state.give_up_all()
            state.cursor = action.sequence
            for sequence in state.dead_between(action.sequence, 2**63):
                del state.dead[sequence]
        case Replayed():
            _on_replayed(state, action)
        case Purged():
            for sequence in state.dead_between(action.first, action.next):
                del state.dead[sequence]


def _on_skipped(state: GroupState, action: Skipped) -> None:
    waiting = state.redeliveries.take(action.first, action.next)
    held_before = state.held
    if state.lanes is not None:
        in_range = [one for one, _ in state.lanes.sequences() if action.first <= one < action.next]
        for sequence in in_range:
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
