"""What one pull is given: selected, read, and checked before anybody gets it.

`handing_out.py` selects by sequence and tag hash. Here the records are read: those whose tags do
not match after all are passed over; expired ones, and those whose attempts are used up because the
group's number of them was lowered meanwhile, become dead letters. An ordered group is fed:
it reaches messages in order, and each is delivered when it is the first of its key. All passes are
bounded: a pull that found nothing in them must be repeated at once (`is_unfinished`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from qmq_broker.service.delivery.bodies import GroupQueue, group_queue, read_messages
from qmq_broker.service.delivery.dead_letters import ATTEMPTS_USED_UP, EXPIRED
from qmq_broker.service.delivery.groups import GroupState
from qmq_broker.service.delivery.handing_out import Room, Selection, join_runs, select
from qmq_broker.service.delivery.holding import first_original
from qmq_broker.service.delivery.journal import Journal
from qmq_broker.service.delivery.lanes import key_number
from qmq_broker.service.delivery.registry import Group
from qmq_broker.storage.logs.actions import Action, Dead, Keyed, Passed, Skipped
from qmq_broker.storage.queues.consume_queue import Entry
from qmq_broker.storage.reading import Records
from qmq_broker.storage.store import Store
from qmq_client.wire.deliveries import DeliveryRun
from qmq_client.wire.record import EXPIRES_FLAG, FLAGS_POSITION, record_key
from qmq_client.wire.record_parts import record_expires_at_ms

#: Passes of one pull before others get their turn.
PASSES_MAX: Final = 8
#: Messages that an ordered group reaches in one step, and their bytes: whole records are read for their
#: keys, and all steps of a pull may read about as much as a pull may bring.
FED_MAX: Final = 256
FED_BYTES: Final = 1024 * 1024


@dataclass(slots=True, kw_only=True)
class Picked:
    """What one pull will be given; not delivered yet."""

    runs: tuple[DeliveryRun, ...] = ()
    records: Records = field(default_factory=lambda: Records.of([]))
    #: To be written before the hand-out: what is not delivered, and why.
    actions: list[Action] = field(default_factory=list)
    #: To be written after it, if the group has come further than the last message given.
    passed: Passed | None = None
    #: Whether nothing was found yet and there is more to look through.
    is_unfinished: bool = False


class Picker:
    """Picks for pulls; belongs to the loop thread."""

    def __init__(self, store: Store, journal: Journal, *, unsettled_max: int) -> None:
        self._store = store
        self._journal = journal
        self._unsettled_max = unsettled_max

    def pick(self, group: Group, room: Room) -> Picked:
        """What this pull is given. What is passed over on the way is written to the log."""
        state = group.state
        queue = group_queue(self._store, state)
        if queue is None or state.is_paused:
            return Picked()
        for _ in range(PASSES_MAX):
            self.skip_what_is_gone(state, queue.first_sequence, room.now_ms)
            if state.lanes is not None and not room.is_for_suspect:
                self._feed(state, queue, room)
            selection = select(state, group.turns, queue, room)
            if selection.lost is not None:
                self._skip(state, *selection.lost, room.now_ms)
                continue
            if not selection.entries and selection.passed is None:
                is_fed = not room.is_for_suspect and self._may_be_fed(state, queue)
                return Picked(is_unfinished=is_fed)
            picked = self._look(state, selection, room.now_ms)
            if picked.runs:
                return picked
            passed = [picked.passed] if picked.passed is not None else []
            self._journal.write([*picked.actions, *passed], state)
        return Picked(is_unfinished=True)

    def _look(self, state: GroupState, selection: Selection, now_ms: int) -> Picked:
        """Read the records, and remove those that do not match or have expired."""
        records = read_messages(self._store, state, selection.entries)
        wanted = state.filter if state.lanes is None else None
        is_checked = wanted is not None or any(
            run.attempt > state.max_attempts for run in selection.runs
        )
        may_expire = not selection.runs or max(records.column(FLAGS_POSITION)) >= EXPIRES_FLAG
        if not (is_checked or may_expire):
            return Picked(runs=selection.runs, records=records)
        picked = Picked()
        kept: list[DeliveryRun] = []
        kept_records: list[bytes] = []
        come_to = given_to = state.cursor
        numbered = (
            (run, run.first_sequence + index)
            for run in selection.runs
            for index in range(run.count)
        )
        for (run, sequence), record in zip(numbered, records, strict=True):
            if sequence >= state.cursor:
                come_to = sequence + 1
                if wanted is not None and not wanted.matches(record):
                    continue
            expires_at_ms = record_expires_at_ms(record)
            if expires_at_ms is not None and expires_at_ms <= now_ms:
                picked.actions.append(_dead(state, run, sequence, EXPIRED, now_ms))
                continue
            if run.attempt > state.max_attempts:
                picked.actions.append(_dead(state, run, sequence, ATTEMPTS_USED_UP, now_ms))
                continue
            given_to = max(given_to, come_to) if sequence >= state.cursor else given_to
            kept.append(DeliveryRun(first_sequence=sequence, count=1, attempt=run.attempt))
            kept_records.append(record)
        picked.runs, picked.records = tuple(join_runs(kept)), Records.of(kept_records)
        come_to = max(come_to, selection.passed or 0)
        if come_to > given_to:
            picked.passed = Passed(now_ms, state.subject, state.group, come_to)
        return picked

    def _feed(self, state: GroupState, queue: GroupQueue, room: Room) -> None:
        """Let an ordered group reach messages until enough are ready, a bounded number."""
        assert state.lanes is not None
        for _ in range(PASSES_MAX):
            count = min(FED_MAX, self._unsettled_max - state.unsettled)
            if state.lanes.ready_count >= room.messages or count <= 0:
                return
            entries = queue.entries(state.cursor, count)
            if not entries:
                return
            whole = _whole(entries)
            if whole:
                self._come_to(state, _fitting(whole), room.now_ms)
            else:
                after = next((i for i, one in enumerate(entries) if one.record_bytes), len(entries))
                self._skip(state, state.cursor, state.cursor + after, room.now_ms)

    def _come_to(self, state: GroupState, entries: Sequence[Entry], now_ms: int) -> None:
        wanted = state.filter
        numbered = [
            (sequence, entry)
            for sequence, entry in enumerate(entries, start=state.cursor)
            if wanted is None or wanted.may_match(entry.tag_hash)
        ]
        records = self._store.read_records([one for _, one in numbered], subject=state.subject)
        fitting = [
            (sequence, key_number(record_key(record)))
            for (sequence, _), record in zip(numbered, records, strict=True)
            if wanted is None or wanted.matches(record)
        ]
        keyed = Keyed(
            at_ms=now_ms,
            subject=state.subject,
            group=state.group,
            next=state.cursor + len(entries),
            sequences=tuple(sequence for sequence, _ in fitting),
            keys=tuple(key for _, key in fitting),
        )
        self._journal.write([keyed], state)

    def _may_be_fed(self, state: GroupState, queue: GroupQueue) -> bool:
        has_room = state.unsettled < self._unsettled_max
        return state.lanes is not None and has_room and state.cursor < queue.next_sequence

    def skip_what_is_gone(self, state: GroupState, first_sequence: int, now_ms: int) -> None:
        """Skip what was given up by force before this group got it, and count it as lost.

        `first_sequence` is where the group's queue begins.
        """
        waiting = next(state.redeliveries.runs(), None)
        first = state.cursor if waiting is None else min(state.cursor, waiting.first)
        if state.lanes is not None and state.lanes.ready_count:
            first = min(first, state.lanes.ready(1)[0])
        if first >= first_sequence:
            return
        if state.aside.copies:
            first = first_original(state)
        for gone in state.aside.without_copies(first, first_sequence):
            self._skip(state, *gone, now_ms)

    def _skip(self, state: GroupState, first: int, next_sequence: int, now_ms: int) -> None:
        skipped = Skipped(now_ms, state.subject, state.group, first, next_sequence)
        self._journal.write([skipped], state)


def _whole(entries: Sequence[Entry]) -> Sequence[Entry]:
    """The entries before the first lost one."""
    for index, entry in enumerate(entries):
        if not entry.record_bytes:
            return entries[:index]
    return entries


def _fitting(entries: Sequence[Entry]) -> Sequence[Entry]:
    """The first entries whose records are read in one step, at least one."""
    ends = accumulate(entry.record_bytes for entry in entries)
    return entries[: max(1, sum(end <= FED_BYTES for end in ends))]


def _dead(state: GroupState, run: DeliveryRun, sequence: int, reason: str, now_ms: int) -> Dead:
    waited = state.redeliveries.at(sequence)
    return Dead(
        at_ms=now_ms,
        subject=state.subject,
        group=state.group,
        sequence=sequence,
        attempts=run.attempt - 1,
        reason=reason,
        error=waited.error if waited is not None and reason == ATTEMPTS_USED_UP else "",
    )
