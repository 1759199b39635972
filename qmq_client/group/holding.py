"""A group and the logs: what it still needs of them, and what it must forget."""

from __future__ import annotations

from itertools import islice

from qmq_client.group.state import GroupState

_BEYOND = 2**63


def first_needed(state: GroupState, dead_since_ms: int, first_sequence: int = 0) -> int:
    """The lowest sequence of its subject that this group may still be given.

    Dead letters count if they died at or after `dead_since_ms`, because they can be replayed.
    Messages that are away, or came back as copies, do not count, nor do those below
    `first_sequence`: they were given up by force.
    """
    copies = state.aside.copies
    waiting = (run for run in state.redeliveries.runs() if run.next > first_sequence)
    ranges = [(run.first, run.next) for run in (waiting if copies else islice(waiting, 1))]
    ranges += [
        (lease.first_sequence, lease.next_sequence)
        for _, log in state.consumers()
        for lease in log.leases()
    ]
    left = [
        (max(first, first_sequence), next_) for first, next_ in ranges if next_ > first_sequence
    ]
    needed = [max(state.cursor, first_sequence)]
    if copies:
        needed += [one for run in left for one, _ in state.aside.without_copies(*run)]
    else:
        needed += [first for first, _ in left]
    if state.lanes is not None:
        keyed = (one for one, _ in state.lanes.sequences() if one >= first_sequence)
        needed += [one for one in keyed if not state.aside.holds(one)]
    dead = state.dead.first_since(dead_since_ms, without=copies, first_sequence=first_sequence)
    if dead is not None:
        needed.append(dead)
    return min(needed)


def first_original(state: GroupState) -> int:
    """The lowest sequence that would next be read from the subject's own queue."""
    aside = state.aside
    needed = [state.cursor]
    for run in state.redeliveries.runs():
        first = next(aside.without_copies(run.first, run.next), None)
        if first is not None:
            needed.append(first[0])
            break
    if state.lanes is not None:
        ready = state.lanes.ready(len(aside.copies) + 1)
        needed += [one for one in ready if one not in aside.copies]
    return min(needed)


def first_copy(state: GroupState, dead_since_ms: int, first_sequence: int = 0) -> int | None:
    """The lowest sequence in the queue of copies that this group may still be given.

    Copies below `first_sequence` were given up by force.
    """
    dead, copies = state.dead, state.aside.copies
    if not copies:
        return None
    needed = [
        copy
        for sequence, copy in copies.items()
        if copy >= first_sequence
        and (sequence not in dead or dead[sequence].at_ms >= dead_since_ms)
    ]
    return min(needed, default=None)


def must_move_back(state: GroupState, next_sequence: int, next_copy: int) -> bool:
    """Whether `move_back` would change anything."""
    known = [state.cursor, max(state.dead, default=-1) + 1]
    known += [run.next for run in state.redeliveries.runs()]
    known += [run.next for run in state.aside.runs.runs()]
    known += [lease.next_sequence for _, log in state.consumers() for lease in log.leases()]
    if state.lanes is not None:
        known += [sequence + 1 for sequence, _ in state.lanes.sequences()]
    if max(known) > next_sequence or max(state.aside.copies.values(), default=-1) >= next_copy:
        return True
    return bool(state.dead) and not state.given().isdisjoint(state.dead)


def move_back(state: GroupState, next_sequence: int, next_copy: int) -> None:
    """Forget what lies beyond the end of the subject, and copies beyond the end of their subject.

    Messages that a power cut or a damage took can no longer be settled, and others get their
    sequences. Copies that are gone are replaced by the originals.
    """
    state.cursor = min(state.cursor, next_sequence)
    state.redeliveries.take(next_sequence, _BEYOND)
    state.aside.forget(next_sequence, _BEYOND)
    for sequence in [one for one, copy in state.aside.copies.items() if copy >= next_copy]:
        del state.aside.copies[sequence]
    state.drop_leases_beyond(next_sequence)
    for sequence in [sequence for sequence in state.dead if sequence >= next_sequence]:
        del state.dead[sequence]
    if state.lanes is not None:
        for sequence, _ in list(state.lanes.sequences()):
            if sequence >= next_sequence:
                state.lanes.done(sequence, sequence + 1)
    if (
        state.dead
    ):  # the log broke off between a death and the end of its lease: delivered once more
        for sequence in state.given() & state.dead.keys():
            del state.dead[sequence]
