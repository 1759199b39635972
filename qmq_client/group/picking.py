"""The selection of messages for a pull: redeliveries that are due, then new ones, within its limits.

Only decides, and writes the messages that it skips: reads the state of a group and the queue of its subject.
Redeliveries go first, but one place in four is kept for new messages if there are any, so a backlog
of failing messages slows the others down but never stops them. Suspects are delivered one by one
(`suspects.py`).

Messages are selected by sequence and tag hash, then read: messages whose tags do not match are
skipped; expired ones, and those with no attempts left because the group's limit was lowered, become
dead letters. An ordered group reads messages ahead in order (*feeding*), and each is delivered when
it is the first of its key. All passes are bounded: a pull that found nothing in them must be
repeated at once (`is_unfinished`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import itemgetter
from typing import Final

from qmq_client.group.actions import Acked, Action, Dead, Keyed, Passed, Pulled, Skipped
from qmq_client.group.dead_letters import ATTEMPTS_USED_UP, EXPIRED
from qmq_client.group.key_queues import key_number
from qmq_client.group.queue import Entry, GroupQueue, Place
from qmq_client.group.redelivery import Redelivery
from qmq_client.group.settings import TagFilter
from qmq_client.group.state import GroupState
from qmq_client.group.suspects import Allowed, Suspects
from qmq_client.wire.deliveries import DeliveryRun, Records
from qmq_client.wire.record import EXPIRES_FLAG, FLAGS_POSITION, record_key
from qmq_client.wire.record_parts import record_expires_at_ms
from qmq_client.wire.requests import PullRequest

#: One place of this many is kept for new messages.
NEW_SHARE: Final = 4
#: Entries read in one step: a pull of large messages stops long before its count is reached.
ENTRIES_PER_READ: Final = 512
#: Entries that one scan checks: about a millisecond. A new tag hash counts as `TagFilter.cost`
#: more, so that a filter of many tags takes no longer.
SCANNED_MAX: Final = 4_096
_RECORD_BYTES: Final = itemgetter(1)
#: Most runs of redeliveries, and of new messages, for one pull: each is a separate lease, and all
#: of them take some ten milliseconds. Messages that failed one by one are redelivered as many runs.
RUNS_MAX: Final = 500
#: Passes of one pull before other pulls are served.
PASSES_MAX: Final = 8
#: Messages that one pass checks one by one, and how many of them may become dead letters in one pull.
LOOKED_MAX: Final = 500
DEAD_MAX: Final = 250
#: Messages that an ordered group reaches in one step, and their bytes: whole records are read for
#: their keys, and all steps of a pull may read about as much as a pull may return.
FED_MAX: Final = 256
FED_BYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The messages of a pull: runs and, for each message, the place of its record."""

    runs: tuple[DeliveryRun, ...]
    entries: list[Place]
    #: The next sequences, if they are lost and no message comes before them.
    lost: tuple[int, int] | None = None
    #: The group cursor after this selection; None if it follows the last message in it.
    passed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The limits of one pull."""

    now_ms: int
    messages: int
    bytes: int
    #: Most new messages, given the group's limit on messages in flight or waiting.
    new_messages: int
    #: Whether the pull gets only one suspect.
    is_for_suspect: bool = False


class NewQuota:
    """Remembers, from pull to pull of one group, the places owed to new messages."""

    __slots__ = ("_owed_quarters",)

    def __init__(self) -> None:
        self._owed_quarters = 0

    def new_share(self, messages: int) -> int:
        """Places for new messages among the next `messages`, if there are redeliveries too."""
        share, self._owed_quarters = divmod(messages + self._owed_quarters, NEW_SHARE)
        return share


def select(state: GroupState, quota: NewQuota, queue: GroupQueue, room: Room) -> Selection:
    """The messages for one pull, perhaps none."""
    if room.is_for_suspect:
        suspect = state.redeliveries.suspect(room.now_ms)
        return _fit([] if suspect is None else [_again(suspect)], queue, room.bytes)
    fresh, passed = _fresh(state, queue, room)
    if len(fresh) > RUNS_MAX:
        fresh, passed = fresh[:RUNS_MAX], None
    new_count = sum(run.count for run in fresh)
    found = state.redeliveries.due(room.now_ms, room.messages, runs_max=RUNS_MAX)
    due, messages = [_again(run) for run in found], room.messages
    due_count = sum(run.count for run in due)
    if len(due) == RUNS_MAX:  # more redeliveries may be due: new messages get only their share
        messages = min(messages, due_count * NEW_SHARE // (NEW_SHARE - 1))
    if due and new_count and due_count + new_count > messages:
        share = min(new_count, quota.new_share(messages))
        due = _head(due, messages - share)
        due_count = sum(run.count for run in due)
    fitting = _head(fresh, messages - due_count)
    selection = _fit(join_runs([*due, *fitting]), queue, room.bytes)
    if passed is None or fitting != fresh or len(selection.entries) < due_count + new_count:
        return selection
    return replace(selection, passed=passed)


def _again(run: Redelivery) -> DeliveryRun:
    return DeliveryRun(
        first_sequence=run.first, count=run.next - run.first, attempt=run.attempts + 1
    )


def _fresh(
    state: GroupState, queue: GroupQueue, room: Room
) -> tuple[list[DeliveryRun], int | None]:
    """Messages that were never delivered, and the group cursor after them.

    None if it follows the last of them.
    """
    if state.by_key is not None:
        return _runs_of(state.by_key.ready(min(room.messages, SCANNED_MAX))), None
    new_count = max(0, min(queue.next_sequence - state.cursor, room.new_messages))
    if state.filter is not None:
        return _matching(state.cursor, state.filter, queue, min(new_count, room.messages))
    if not new_count:
        return [], None
    return [DeliveryRun(first_sequence=state.cursor, count=new_count, attempt=1)], None


def _matching(
    first: int, wanted: TagFilter, queue: GroupQueue, messages_max: int
) -> tuple[list[DeliveryRun], int | None]:
    """The next messages whose tag hash matches, and the sequence that the scan reached."""
    found: list[int] = []
    known: dict[int, bool] = {}
    sequence, left = first, SCANNED_MAX
    while left > 0 and sequence < queue.next_sequence and len(found) < messages_max:
        count = min(ENTRIES_PER_READ, left // wanted.cost + 1, queue.next_sequence - sequence)
        step = queue.places(sequence, count)
        if not step:
            break
        for number, (_, record_bytes, hash_) in enumerate(step, start=sequence):
            fits = known.get(hash_)
            if fits is None:
                fits = known[hash_] = wanted.may_match(hash_)
                left -= wanted.cost
            # A lost message may have matched the group's filter, so it is counted as lost here.
            if fits or not record_bytes:
                found.append(number)
        left -= len(step)
        sequence += len(step)
    if len(found) > messages_max:
        return _runs_of(found[:messages_max]), None
    return _runs_of(found), sequence if sequence > first else None


def _runs_of(sequences: Sequence[int]) -> list[DeliveryRun]:
    return join_runs([DeliveryRun(first_sequence=one, count=1, attempt=1) for one in sequences])


def _head(runs: Sequence[DeliveryRun], messages: int) -> list[DeliveryRun]:
    head: list[DeliveryRun] = []
    for run in runs:
        count = min(run.count, messages)
        if count <= 0:
            break
        head.append(_first_of(run, count))
        messages -= count
    return head


def join_runs(runs: Sequence[DeliveryRun]) -> list[DeliveryRun]:
    """The same runs, with neighbours of the same attempt joined."""
    joined: list[DeliveryRun] = []
    for run in runs:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.attempt == run.attempt
            and last.first_sequence + last.count == run.first_sequence
        ):
            joined[-1] = _first_of(last, last.count + run.count)
        else:
            joined.append(run)
    return joined


def _fit(runs: Sequence[DeliveryRun], queue: GroupQueue, bytes_max: int) -> Selection:
    """Cut to `bytes_max` of records, but give at least one message."""
    fitting: list[DeliveryRun] = []
    entries: list[Place] = []
    room_bytes = bytes_max
    for run in runs:
        fits, room_bytes = _fitting(run, queue, room_bytes, is_first=not entries)
        if fits:
            fitting.append(_first_of(run, len(fits)))
        entries += fits
        if len(fits) < run.count:
            if not entries:
                lost = _lost(queue, run.first_sequence, run.first_sequence + run.count)
                return Selection(runs=(), entries=[], lost=lost)
            break
    return Selection(runs=tuple(fitting), entries=entries)


def _fitting(
    run: DeliveryRun, queue: GroupQueue, room_bytes: int, *, is_first: bool
) -> tuple[list[Place], int]:
    """The first entries of `run` that fit, and the bytes left if the whole run fits."""
    fits: list[Place] = []
    sequence, next_sequence = run.first_sequence, run.first_sequence + run.count
    while sequence < next_sequence:
        step = queue.places(sequence, min(ENTRIES_PER_READ, next_sequence - sequence))
        lengths = list(map(_RECORD_BYTES, step))
        count = _fitting_count(lengths, room_bytes, is_first=is_first)
        fits += step[:count]
        if not step or count < len(step):
            break
        is_first = False
        room_bytes -= sum(lengths)
        sequence += count
    return fits, room_bytes


def _fitting_count(lengths: list[int], room_bytes: int, *, is_first: bool) -> int:
    """How many of these records fit: none after a lost one; with `is_first`, at least one."""
    if 0 in lengths:
        lengths = lengths[: lengths.index(0)]
    if sum(lengths) <= room_bytes:
        return len(lengths)
    fitting = bisect_right(list(accumulate(lengths)), room_bytes)
    return max(fitting, 1) if is_first else fitting


def _lost(queue: GroupQueue, first: int, next_sequence: int) -> tuple[int, int] | None:
    """The lost sequences that begin at `first`, within one read of entries."""
    after = first
    for entry in queue.entries(first, min(ENTRIES_PER_READ, next_sequence - first)):
        if entry.record_bytes:
            break
        after += 1
    return (first, after) if after > first else None


def first_of(selection: Selection, messages: int) -> Selection:
    """The first messages of a selection."""
    runs = tuple(_head(selection.runs, messages))
    return Selection(runs=runs, entries=selection.entries[:messages])


def _first_of(run: DeliveryRun, count: int) -> DeliveryRun:
    if count == run.count:
        return run
    return DeliveryRun(first_sequence=run.first_sequence, count=count, attempt=run.attempt)


@dataclass(slots=True, kw_only=True)
class Picked:
    """The result for one pull; not delivered yet."""

    runs: tuple[DeliveryRun, ...] = ()
    records: Records = field(default_factory=lambda: Records.of([]))
    #: Actions to write before the delivery: skipped messages, with the reason.
    actions: list[Action] = field(default_factory=list)
    #: Actions to write after it, if the cursor moves beyond the last delivered message.
    passed: Passed | None = None
    #: Whether nothing was found yet and there are more entries to search.
    is_unfinished: bool = False
    #: Whether this consumer may get no message now, although others may.
    is_held_back: bool = False


class Picker:
    """Selects the messages for the pulls of one group; owned by its thread."""

    __slots__ = ("_quota", "_unsettled_max", "_write", "state", "suspects")

    def __init__(
        self,
        state: GroupState,
        write: Callable[[Sequence[Action], GroupState], None],
        *,
        unsettled_max: int,
    ) -> None:
        """`write` applies actions to the state, and first makes them durable where that is promised."""
        self.state = state
        self.suspects = Suspects(state)
        self._quota = NewQuota()
        self._write = write
        self._unsettled_max = unsettled_max

    def pick(self, queue: GroupQueue | None, consumer: str, lease_ms: int, room: Room) -> Picked:
        """Select the messages of this pull: one suspect, or others.

        Messages skipped on the way are written as actions.
        """
        suspects = self.suspects
        suspects.look(room.now_ms)
        allowed = suspects.allowed(consumer, lease_ms, room.now_ms)
        if allowed is Allowed.NOTHING:
            return Picked(is_held_back=True)
        if allowed is Allowed.OTHERS or allowed is Allowed.OTHERS_FIRST:
            picked = self._pick(queue, room)
            suspects.note_others(consumer)
            if picked.runs or allowed is Allowed.OTHERS:
                return picked
        picked = self._pick(queue, replace(room, is_for_suspect=True))
        if not picked.runs:  # it expired, or no longer exists
            return self._pick(queue, room)
        suspects.note_given(
            consumer,
            pull_sequence=self.state.next_pull_sequence(consumer),
            until_ms=room.now_ms + lease_ms,
        )
        return picked

    def _pick(self, queue: GroupQueue | None, room: Room) -> Picked:
        state = self.state
        if queue is None or state.is_paused:
            return Picked()
        for _ in range(PASSES_MAX):
            self.skip_what_is_gone(queue.first_sequence, room.now_ms)
            if state.by_key is not None and not room.is_for_suspect:
                self._feed(queue, room)
            selection = select(state, self._quota, queue, room)
            if selection.lost is not None:
                self._skip(*selection.lost, room.now_ms)
                continue
            if not selection.entries and selection.passed is None:
                is_fed = not room.is_for_suspect and self._may_be_fed(queue, room)
                return Picked(is_unfinished=is_fed)
            picked = self._look(queue, selection, room.now_ms)
            if picked.runs:
                return picked
            passed = [picked.passed] if picked.passed is not None else []
            self._write([*picked.actions, *passed], state)
            if len(picked.actions) >= state.dead.changed_at_once(DEAD_MAX):
                break
        return Picked(is_unfinished=True)

    def _look(self, queue: GroupQueue, selection: Selection, now_ms: int) -> Picked:
        """Read the records, and remove those that do not match or have expired."""
        state = self.state
        records = queue.read(selection.entries)
        wanted = state.filter if state.by_key is None else None
        is_checked = wanted is not None or any(
            run.attempt > state.max_attempts for run in selection.runs
        )
        may_expire = not selection.runs or max(records.column(FLAGS_POSITION)) >= EXPIRES_FLAG
        if not (is_checked or may_expire):
            return Picked(runs=selection.runs, records=records)
        if len(selection.entries) > LOOKED_MAX:
            # Each may become a dead letter: the rest is checked in another pass.
            selection = first_of(selection, LOOKED_MAX)
            records = queue.read(selection.entries)
        picked = Picked()
        kept: list[DeliveryRun] = []
        kept_records: list[bytes] = []
        come_to = given_to = state.cursor
        numbered = (
            (run, run.first_sequence + index)
            for run in selection.runs
            for index in range(run.count)
        )
        dead_max = state.dead.changed_at_once(DEAD_MAX)
        for (run, sequence), record in zip(numbered, records, strict=True):
            if len(picked.actions) >= dead_max:  # the rest is checked in another pass
                selection = replace(selection, passed=None)
                break
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

    def _feed(self, queue: GroupQueue, room: Room) -> None:
        """Read messages ahead for an ordered group until enough are ready; bounded."""
        state = self.state
        assert state.by_key is not None
        for _ in range(PASSES_MAX):
            count = min(FED_MAX, self._unsettled_max - state.unsettled)
            if state.by_key.ready_count >= room.messages or min(count, room.new_messages) <= 0:
                return
            entries = queue.entries(state.cursor, count)
            if not entries:
                return
            whole = _whole(entries)
            if whole:
                self._come_to(queue, _read_at_once(whole), room.now_ms)
            else:
                after = next((i for i, one in enumerate(entries) if one.record_bytes), len(entries))
                self._skip(state.cursor, state.cursor + after, room.now_ms)

    def _come_to(self, queue: GroupQueue, entries: Sequence[Entry], now_ms: int) -> None:
        state = self.state
        wanted = state.filter
        numbered = [
            (sequence, entry)
            for sequence, entry in enumerate(entries, start=state.cursor)
            if wanted is None or wanted.may_match(entry.tag_hash)
        ]
        records = queue.read([one for _, one in numbered])
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
        self._write([keyed], state)

    def _may_be_fed(self, queue: GroupQueue, room: Room) -> bool:
        state = self.state
        has_room = state.unsettled < self._unsettled_max and room.new_messages > 0
        return state.by_key is not None and has_room and state.cursor < queue.next_sequence

    def skip_what_is_gone(self, first_sequence: int, now_ms: int) -> None:
        """Skip messages that were deleted by force before this group got them, and count them as lost.

        `first_sequence` is the first sequence of the group's queue.
        """
        state = self.state
        waiting = next(state.redeliveries.runs(), None)
        first = state.cursor if waiting is None else min(state.cursor, waiting.first)
        if state.by_key is not None and state.by_key.ready_count:
            first = min(first, state.by_key.ready(1)[0])
        if first >= first_sequence:
            return
        if state.long_retries.copies:
            first = _first_original(state)
        for gone in state.long_retries.without_copies(first, first_sequence):
            self._skip(*gone, now_ms)

    def _skip(self, first: int, next_sequence: int, now_ms: int) -> None:
        state = self.state
        skipped = Skipped(now_ms, state.subject, state.group, first, next_sequence)
        self._write([skipped], state)


def _first_original(state: GroupState) -> int:
    """The lowest sequence that would next be read from the subject's own queue."""
    long_retries = state.long_retries
    needed = [state.cursor]
    for run in state.redeliveries.runs():
        first = next(long_retries.without_copies(run.first, run.next), None)
        if first is not None:
            needed.append(first[0])
            break
    if state.by_key is not None:
        ready = state.by_key.ready(len(long_retries.copies) + 1)
        needed += [one for one in ready if one not in long_retries.copies]
    return min(needed)


def _whole(entries: Sequence[Entry]) -> Sequence[Entry]:
    """The entries before the first lost one."""
    for index, entry in enumerate(entries):
        if not entry.record_bytes:
            return entries[:index]
    return entries


def _read_at_once(entries: Sequence[Entry]) -> Sequence[Entry]:
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


def hand_out(
    state: GroupState, request: PullRequest, picked: Picked, token: int, now_ms: int
) -> list[Action]:
    """The actions of an answer to a pull; they are written before the answer is sent."""
    first = state.next_pull_sequence(request.consumer)
    pulled = Pulled(
        at_ms=now_ms,
        subject=state.subject,
        group=state.group,
        consumer=request.consumer,
        token=token,
        first_pull_sequence=first,
        runs=picked.runs,
        lease_until_ms=now_ms + request.lease_ms,
    )
    actions: list[Action] = [*picked.actions, pulled]
    if request.at_most_once is True:
        acked = Acked(
            at_ms=now_ms,
            subject=state.subject,
            group=state.group,
            consumer=request.consumer,
            first=first,
            next=first + len(picked.records),
        )
        actions.append(acked)
    if picked.passed is not None:
        actions.append(picked.passed)
    return actions
