"""The scheduler of long retries, which stores their messages as delayed messages, and the clock of deliveries.

A message nacked for months would occupy a place in its group, and its segment of the commit log,
all that time. So a message whose redelivery is due after the horizon is copied. The copy is a
delayed message of the broker's own, with all the guarantees of delayed messages. Begin and end have
two steps each; the first step is decisive:

::

    begin   DELAYED frame with copies, durable   then   SetAside in the action log
    end     RELEASED frame into `COPIES`         then   BroughtBack in the action log, then Passed

A crash in between leaves a copy that no group refers to (the id of a long retry is used once); its
release is ignored. The same happens if the group is moved or removed. So a message is redelivered
once, to its group alone, and only if the group still waits for it.

A copy that can no longer be read is never released. Once all others due by then are released, the
group gets the message from its original place; if retention has deleted that too, the message
counts as lost. Belongs to the loop thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from qmq_broker.errors import BusyError, CorruptionError, NoRoomError, PoisonedError
from qmq_broker.service.delay.delayed import Delayed
from qmq_broker.service.delivery.bodies import group_queue, read_messages
from qmq_broker.service.delivery.delivery import Delivery
from qmq_broker.service.delivery.registry import Group
from qmq_broker.service.delivery.waiting import GroupKey
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.service.writer import CommitWriter
from qmq_broker.storage.logs.copies import Copy, pack_copy, unpack_copy
from qmq_broker.storage.logs.kinds import LOG_LIMITS
from qmq_broker.storage.schedule.cancelled import Cancelled
from qmq_broker.storage.store import Placed, Store
from qmq_client.clock import Clock
from qmq_client.group.actions import Action, BroughtBack, GroupDefined, Passed, SetAside
from qmq_client.group.queue import Entry
from qmq_client.group.redelivery import Redelivery
from qmq_client.wire.frame import FrameKind, build_message_frame, parse_message_frame
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.names import COPIES


class SteadyTime:
    """The time of leases and redeliveries: the wall clock at the start, advanced by the monotonic clock.

    Setting the machine's clock neither ends leases early nor delays redeliveries. Only a restart
    reads the wall clock again.
    """

    __slots__ = ("_clock", "_offset_ms")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset_ms = clock.now_ms() - clock.monotonic_s() * 1000

    def now_ms(self) -> int:
        """Milliseconds since 1970 UTC; never goes back while this process lives."""
        return int(self._offset_ms + self._clock.monotonic_s() * 1000)

    def by_wall(self, at_ms: int) -> int:
        """The wall clock's value at a moment of this time, if it was set back since the start.

        Messages released by the wall clock must be stored with wall clock times, or they would be
        late. If the clock is ahead, the moment does not change: the clock may be wrong and be
        corrected.
        """
        return at_ms + min(0, self._clock.now_ms() - self.now_ms())

    def wall_ms(self) -> int:
        """The wall clock's value."""
        return self._clock.now_ms()

    def latest_ms(self) -> int:
        """This time, or the wall clock's value if that is later.

        Due times come from the wall clocks of clients: if this machine's clock was behind at the
        start and was corrected since, or is wrong now, their valid times must not seem too far
        ahead.
        """
        return max(self.now_ms(), self._clock.now_ms())


_log = logging.getLogger(__name__)
#: The broker's own group; released copies below its cursor were passed to their groups.
BACK_GROUP: Final = "_qmq.back"
#: Messages of one frame of copies; messages and bytes of one pass over released copies.
PASS_MESSAGES: Final = 500
PASS_BYTES: Final = 2 * 1024 * 1024
PASSES_MAX: Final = 4
#: How often groups are searched for long retries, and how long to wait after the broker had no room.
INTERVAL_MS: Final = 1_000
PAUSE_MS: Final = 10_000
#: A copy that was not released this long after its time, with all others released, is lost.
LOST_MS: Final = 60_000
_RETRY_ID_BITS: Final = 32
#: The first ids of the broker's own messages: producers draw theirs from 64 bits.
_OWN_IDS: Final = 0xFFFF_FFFF << 32


@dataclass(slots=True, kw_only=True, eq=False)
class _Pending:
    """Messages of one group whose copies wait for their commit."""

    group: Group
    runs: list[Redelivery]
    retry_id: int


class LongRetryScheduler:
    """Begins and ends the long retries of one broker, in `step`."""

    def __init__(
        self,
        store: Store,
        delivery: Delivery,
        writer: CommitWriter,
        time: SteadyTime,
        limits: ServiceLimits,
        delayed: Delayed,
    ) -> None:
        """`time` is that of the delivery."""
        self._store = store
        self._delivery = delivery
        self._writer = writer
        self._time = time
        self._limits = limits
        self._delayed = delayed
        #: Messages redelivered without their copies since the start.
        self.lost_copies = 0
        self._next_ms = 0
        self._pending: _Pending | None = None
        #: When to try again a group whose copies were refused.
        self._not_before: dict[GroupKey, int] = {}
        #: Ids of this run of the broker: its epoch is never used again.
        self._next_retry_id = store.epoch << _RETRY_ID_BITS
        self._ids = MessageIds(_OWN_IDS | store.epoch)

    def step(self, now_ms: int) -> bool:
        """End and begin a bounded number of long retries; returns whether more are to end now."""
        # Read first: released copies are redelivered before messages are declared lost.
        released_until_ms = self._delayed.releaser.released_until_ms
        try:
            is_unfinished = all(self.redeliver(now_ms) for _ in range(PASSES_MAX))
            if not is_unfinished:
                self._redeliver_originals(released_until_ms - LOST_MS, now_ms)
                self._cancel_damaged(released_until_ms - LOST_MS)
        except (
            CorruptionError,
            NoRoomError,
        ) as error:  # actions that were not written are tried once more
            self._store.refusals.note("messages_that_come_back", error)
            return False
        if now_ms >= self._next_ms and self._pending is None:
            self._next_ms = now_ms + INTERVAL_MS
            self._begin_next(now_ms)
        return is_unfinished

    def redeliver(self, now_ms: int) -> bool:
        """Pass released copies to their groups, up to a limit; returns whether more are left."""
        queue = self._store.queue(COPIES)
        if queue is None:
            return False
        back = self._back_group(now_ms).state
        first = max(back.cursor, queue.first_sequence)
        entries = _bounded(queue.entries(first, PASS_MESSAGES))
        if not entries:
            return False
        for sequence, copy in self._read(first, entries):
            group = self._delivery.registry.find(copy.subject, copy.group)
            if group is None or not group.state.long_retries.is_in(copy.sequence, copy.retry_id):
                continue
            action = BroughtBack(now_ms, copy.subject, copy.group, copy.sequence, sequence)
            self._delivery.journal.write([action], group.state)
            self._delivery.after_change(group, now_ms)
        next_ = first + len(entries)
        self._delivery.journal.write([Passed(now_ms, COPIES, BACK_GROUP, next_)], back)
        return next_ < queue.next_sequence

    def _redeliver_originals(self, due_before_ms: int, now_ms: int) -> None:
        """Redeliver messages whose copies are lost, a bounded number per group."""
        for group in self._delivery.registry:
            state = group.state
            if not state.long_retries.count:  # nearly all groups, on every tick
                continue
            lost = state.long_retries.runs.due(due_before_ms, PASS_MESSAGES)
            actions = [
                BroughtBack(now_ms, state.subject, state.group, sequence, None)
                for run in lost
                for sequence in range(run.first, run.next)
            ]
            if not actions:
                continue
            for action in actions:
                _log.error(
                    "copy of a message is lost, its group gets the original if that still exists: "
                    "subject=%s group=%s sequence=%d",
                    *(state.subject, state.group, action.sequence),
                )
            self._delivery.journal.write(actions, state)
            self.lost_copies += len(actions)
            self._delivery.after_change(group, now_ms)

    def _cancel_damaged(self, due_before_ms: int) -> None:
        """Cancel damaged copies that no group waits for, so that their files can be deleted."""
        releaser = self._delayed.releaser
        damaged, more = releaser.counts.damaged_copies, set(releaser.counts.more_copies)
        gone = [one for one in list(damaged) if one.due_at_ms < due_before_ms]
        for one in gone:
            damaged.remove(one)
        if gone:
            places = [
                Cancelled(one.bucket, one.sequence, one.source, one.subject, one.message_id)
                for one in gone
            ]
            self._delayed.changes.cancel(places, lambda _: releaser.look_again(more))

    def _begin_next(self, now_ms: int) -> None:
        """Begin long retries of the next group that has a redelivery after the horizon."""
        after_ms = now_ms + self._limits.redelivery_horizon_ms
        found = [
            group
            for group in self._delivery.registry
            if group.state.redeliveries.latest_ms > after_ms
            and self._not_before.get(group.key, 0) <= now_ms
        ]
        for group in found:  # the first long retry adds the group of the copies
            heap, long_retries = group.state.redeliveries, group.state.long_retries
            room = min(PASS_MESSAGES, self._limits.long_retries_per_group - long_retries.count)
            runs = heap.far(after_ms, max(0, room))
            if runs and self._begin(group, runs, now_ms):
                return
            if heap.latest_ms > after_ms:  # the message stays in the heap, and is tried again
                self._not_before[group.key] = now_ms + PAUSE_MS

    def _begin(self, group: Group, runs: Sequence[Redelivery], now_ms: int) -> bool:
        """Submit copies of these messages to the writer, as many as fit one frame."""
        pending = _Pending(group=group, runs=[], retry_id=self._next_retry_id)
        self._next_retry_id += 1
        records = self._copies(pending, runs, now_ms)
        if not records:
            return False
        frame = build_message_frame({COPIES: records}, kind=FrameKind.DELAYED, limits=LOG_LIMITS)
        try:
            self._back_group(now_ms)
            self._writer.submit(
                parse_message_frame(frame, LOG_LIMITS, is_verified=True),
                lambda outcome: self._on_done(pending, outcome),
            )
        except (BusyError, NoRoomError, PoisonedError) as error:
            self._store.refusals.note("long_retries", error)
            return False
        self._pending = pending
        return True

    def _copies(self, pending: _Pending, runs: Sequence[Redelivery], now_ms: int) -> list[bytes]:
        state = pending.group.state
        queue = group_queue(self._store, state)
        records: list[bytes] = []
        room_bytes = self._limits.own_frame_bytes
        for run in runs:
            for sequence in range(run.first, run.next):
                try:
                    entries = [] if queue is None else queue.entries(sequence, 1)
                    if not entries or not entries[0].record_bytes:
                        continue  # unreadable: the pull that reads it fails
                    room_bytes -= entries[0].record_bytes
                    if room_bytes < 0 and records:
                        return records
                    (record,) = read_messages(self._store, state, entries)
                except CorruptionError as error:  # the pull that meets it fails
                    _log.error(
                        "message kept in memory, not for a long retry: sequence=%d reason=%s",
                        sequence,
                        error,
                    )
                    continue
                copy = Copy(state.subject, state.group, sequence, pending.retry_id, record)
                records.append(
                    pack_copy(
                        copy,
                        message_id=self._ids.next_id(),
                        made_at_ms=now_ms,
                        due_at_ms=self._time.by_wall(run.retry_at_ms),
                    )
                )
                pending.runs.append(run.cut(sequence, sequence + 1))
        return records

    def _on_done(self, pending: _Pending, outcome: Placed | Exception) -> None:
        """The copies are durable, or they failed: then nothing changes."""
        self._pending = None
        now_ms = self._time.now_ms()
        if isinstance(outcome, Exception):
            self._not_before[pending.group.key] = now_ms + PAUSE_MS
            self._store.refusals.note("long_retries", outcome)
            return
        state = pending.group.state
        if self._delivery.registry.find(state.subject, state.group) is not pending.group:
            return
        actions: list[Action] = []
        for first, next_ in _joined(
            [run for run in pending.runs if state.redeliveries.is_waiting(run)]
        ):
            actions.append(
                SetAside(now_ms, state.subject, state.group, first, next_, pending.retry_id)
            )
        try:
            self._delivery.journal.write(actions, state)
        except (
            NoRoomError
        ) as error:  # no group refers to the copies: they are ignored when they are released
            self._not_before[pending.group.key] = now_ms + PAUSE_MS
            self._store.refusals.note("long_retries", error)
            return
        self._delivery.after_change(pending.group, now_ms)
        self._next_ms = now_ms  # there may be more

    def _back_group(self, now_ms: int) -> Group:
        return self._delivery.registry.own(
            GroupDefined(now_ms, COPIES, BACK_GROUP, first_sequence=0, max_attempts=1)
        )

    def _read(self, first: int, entries: Sequence[Entry]) -> list[tuple[int, Copy]]:
        found = []
        for sequence, entry in enumerate(entries, start=first):
            if not entry.record_bytes:
                continue
            try:
                (record,) = self._store.read_records([entry], subject=COPIES)
                found.append((sequence, unpack_copy(record)))
            except CorruptionError as error:  # one message; the others are redelivered
                _log.error(
                    "message not redelivered after its long retry: copy=%d reason=%s",
                    sequence,
                    error,
                )
        return found


def _bounded(entries: Sequence[Entry]) -> Sequence[Entry]:
    room_bytes = PASS_BYTES
    for index, entry in enumerate(entries):
        room_bytes -= entry.record_bytes
        if room_bytes < 0 and index:
            return entries[:index]
    return entries


def _joined(runs: Sequence[Redelivery]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for run in runs:
        if joined and joined[-1][1] == run.first:
            joined[-1] = (joined[-1][0], run.next)
        else:
            joined.append((run.first, run.next))
    return joined
