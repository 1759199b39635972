"""The groups of a restarted broker: a snapshot, then the actions after it.

Anything stamped later than now was written before the clock was set back. Deadlines are moved with
the clock, so that no lease lasts longer than it was given for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from qmq_broker.service.delivery.groups import GroupState
from qmq_broker.service.delivery.moves import apply_action
from qmq_broker.service.delivery.snapshot import decode_all
from qmq_broker.storage.logs.actions import Action, Ended, GroupDefined, Owned, SetAside


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
