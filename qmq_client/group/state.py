"""The state of one consumer group on one subject, changed only by actions.

::

                 Pulled            Acked
    new ─────────────▶ in flight ─────────▶ done ◀── Purged
     │ Keyed            ▲    │ Nacked, Expired             │
     ▼           Pulled │    ▼                 Dead        │
    held ──────────────▶│  waiting  (or, when it will not be tried again) ─▶ dead letter
                             ▲────────────────────────────── Replayed ─────────┘

The broker first decides (`settling.py` and `picking.py` only read), then writes the actions to
the action log, then applies them here. A start replays the log through the same `apply`, so a
restarted broker has exactly the state at the log's end. A log that lost its tail gives an earlier
state of the same group: messages are delivered again, never lost.

Nacked and Expired carry `retry_at_ms`; 0 means that there is no next delivery, and that a Dead
action precedes it for each of the messages. A Dead action for a message without a lease (an expired
message) removes it from the waiting ones. An ordered group holds messages back until they are the
first of their key (`key_queues.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from qmq_client.group.actions import (
    Acked,
    Action,
    Dead,
    Expired,
    Extended,
    GroupDefined,
    GroupSettings,
    Keyed,
    Nacked,
    Passed,
    Pulled,
)
from qmq_client.group.dead_letters import EXPIRED, REJECTED, DeadLetter, DeadLetters, Pool
from qmq_client.group.history import (
    LEASE_ENDED,
    NACKED,
    Attempt,
    History,
    extended,
    kept_of_each,
)
from qmq_client.group.key_queues import KeyQueues
from qmq_client.group.leases import DEADLINE_BYTES, Deadlines, Lease, PullLog
from qmq_client.group.long_retries import LongRetries
from qmq_client.group.redelivery import Redelivery, RedeliveryHeap
from qmq_client.group.settings import TagFilter, filter_of

#: `retry_at_ms` of messages that are not delivered again.
NO_RETRY: Final = 0
#: Memory of a group before its first pull.
_GROUP_BYTES: Final = 6_144
#: Memory of one tag of its filter, besides its text.
_TAG_BYTES: Final = 384


class GroupState:
    """Cursor, leases, waiting redeliveries and dead letters of one (subject, group).

    Invariant: a sequence below the cursor is in exactly one of: held, in flight, waiting, dead,
    done. Belongs to the loop thread.
    """

    def __init__(
        self,
        *,
        subject: str,
        group: str,
        first_sequence: int,
        max_attempts: int,
        pool: Pool | None = None,
    ) -> None:
        """Dead letters that `pool` pages out are read again on demand."""
        self.subject = subject
        self.group = group
        #: The next sequence that was never delivered to this group.
        self.cursor = first_sequence
        self.max_attempts = max_attempts
        self.settings = GroupSettings()
        #: The filter by tags; None if the group gets every message.
        self.filter: TagFilter | None = None
        self.is_paused = False
        #: The token whose share of the broker's memory it uses; empty for none.
        self.owner = ""
        #: When a consumer last pulled, according to the action log.
        self.seen_ms = 0
        #: In an ordered group: unsettled messages that it has read, by key.
        self.by_key: KeyQueues | None = None
        self.redeliveries: RedeliveryHeap[Redelivery] = RedeliveryHeap()
        #: Redeliveries beyond the horizon of `redeliveries`.
        self.long_retries = LongRetries()
        self.dead = DeadLetters(pool)
        self.acked_count = 0
        #: Messages that were deleted by force before this group settled them.
        self.lost_count = 0
        #: Messages that expired before they were delivered.
        self.expired_count = 0
        self._consumers: dict[str, PullLog] = {}
        self.deadlines = Deadlines(self._consumers)
        #: Lower bound for the pull sequences of new consumers; forgotten consumers used lower ones.
        self.next_pull_floor = 0
        self._in_flight = 0
        #: The memory of all pull logs, as last counted.
        self._logs_bytes = 0

    @property
    def memory_bytes(self) -> int:
        """The memory of this group, roughly, including what messages in flight may add."""
        by_key_bytes = 0 if self.by_key is None else self.by_key.memory_bytes
        tags = (*self.settings.any_tags, *self.settings.all_tags)
        own_bytes = _GROUP_BYTES + len(self.subject) + len(self.group)
        own_bytes += sum(_TAG_BYTES + len(tag) for tag in tags)
        own_bytes += self._logs_bytes + DEADLINE_BYTES * len(self.deadlines)
        return (
            own_bytes
            + self.redeliveries.memory_bytes
            + self.long_retries.memory_bytes
            + self.dead.memory_bytes
            + by_key_bytes
        )

    def count_all(self) -> None:
        """Count the memory of all pull logs again, after several were changed."""
        for log in self._consumers.values():
            self._count(log)

    def _count(self, log: PullLog) -> None:
        now_bytes = log.memory_bytes
        self._logs_bytes += now_bytes - log.counted_bytes
        log.counted_bytes = now_bytes

    @property
    def in_flight(self) -> int:
        """Messages delivered to consumers and not settled."""
        return self._in_flight

    @property
    def waiting(self) -> int:
        """Messages that wait for their next delivery."""
        return self.redeliveries.count + self.long_retries.count

    @property
    def held(self) -> int:
        """Messages that an ordered group has read but not delivered yet."""
        return 0 if self.by_key is None else self.by_key.undelivered_count

    @property
    def unsettled(self) -> int:
        """Messages that the group has read and not settled."""
        return self._in_flight + self.redeliveries.count + self.held

    @property
    def consumer_count(self) -> int:
        """Consumers that hold messages or were seen recently."""
        return len(self._consumers)

    def consumers(self) -> Iterator[tuple[str, PullLog]]:
        """Name and pull log of each consumer."""
        return iter(self._consumers.items())

    def consumer(self, name: str) -> PullLog | None:
        """The pull log of this consumer; None if it never got a message."""
        return self._consumers.get(name)

    def given(self) -> set[int]:
        """The sequences that are in flight or wait."""
        runs = [(run.first, run.next) for run in self.redeliveries.runs()]
        runs += [(run.first, run.next) for run in self.long_retries.runs.runs()]
        for log in self._consumers.values():
            runs += [(lease.first_sequence, lease.next_sequence) for lease in log.leases()]
        return {sequence for run in runs for sequence in range(*run)}

    def next_pull_sequence(self, consumer: str) -> int:
        """The pull sequence of the next message for this consumer."""
        log = self._consumers.get(consumer)
        return self.next_pull_floor if log is None else log.next_pull_sequence

    def restore_consumer(
        self,
        name: str,
        *,
        next_pull_sequence: int,
        last_seen_ms: int,
        leases: Sequence[Lease],
        acked: Mapping[int, Sequence[tuple[int, int]]],
    ) -> None:
        """Restore a consumer from a snapshot. Requires: it does not exist yet."""
        log = self._log(name)
        log.restore(leases, acked, next_pull_sequence=next_pull_sequence)
        log.last_seen_ms = last_seen_ms
        self._in_flight += log.in_flight
        for lease in leases:
            self.deadlines.watch(name, lease)

    def restore_key_queues(self, keyed: Iterable[tuple[int, int]]) -> None:
        """Restore the queues of keys from a snapshot. Requires: leases and redeliveries are restored."""
        given = self.given()
        assert self.by_key is not None
        for sequence, key in keyed:
            self.by_key.add(sequence, key, is_given=sequence in given)

    def apply(self, action: Action) -> None:
        """Apply an action on single messages; called only by `apply_action`."""
        self._apply(action)
        log = self._consumers.get(getattr(action, "consumer", ""))
        if log is not None:
            self._count(log)

    def _apply(self, action: Action) -> None:
        match action:
            case Pulled():
                self._on_pulled(action)
            case Acked():
                ended = self._log(action.consumer).ack(action.first, action.next)
                for lease in ended:
                    self.long_retries.forget_copies(lease.first_sequence, lease.next_sequence)
                self.acked_count += self._after_end(action, ended, is_done=True)
            case Nacked():
                self._on_nacked(action)
            case Expired():
                self._on_returned(action, LEASE_ENDED, LEASE_ENDED)
            case Extended():
                self._on_extended(action)
            case Dead():
                self._on_dead(action)
            case GroupDefined():
                self.max_attempts = action.max_attempts
            case Passed() | Keyed():
                self._on_passed(action)

    def configure(self, settings: GroupSettings) -> None:
        """Set these settings. Requires: whether the group is ordered never changes."""
        self.settings = settings
        self.filter = filter_of(settings)
        if settings.is_ordered and self.by_key is None:
            self.by_key = KeyQueues()

    def give_up_all(self) -> None:
        """Drop all leases, redeliveries and queues of keys, as if no message had ever been delivered."""
        self.redeliveries.take(0, 2**63)
        self.long_retries.runs.take(0, 2**63)
        for log in self._consumers.values():
            log.drop_all()
        self.count_all()
        self._in_flight = 0
        if self.by_key is not None:
            self.by_key.drop_all()

    def dead_between(self, first: int, next_: int, count_max: int | None = None) -> list[int]:
        """Sequences of the dead letters in this range, lowest first."""
        return self.dead.between(first, next_, count_max)

    def drop_leases_beyond(self, next_sequence: int) -> None:
        """Drop leases from this sequence on."""
        for log in self._consumers.values():
            for lease in list(log.leases()):
                if lease.next_sequence > next_sequence:
                    kept = max(0, next_sequence - lease.first_sequence)
                    ended = log.end(lease.first + kept, lease.next)
                    self._in_flight -= sum(piece.next - piece.first for piece in ended)
        self.count_all()

    def forget_idle_consumers(self, seen_before_ms: int) -> int:
        """Forget consumers that hold no messages and were not seen since; returns how many.

        Their pull sequences are never used again, so that a delivery stays unique.
        """
        idle = [
            name
            for name, log in self._consumers.items()
            if not log.in_flight and log.last_seen_ms < seen_before_ms
        ]
        for name in idle:
            log = self._consumers.pop(name)
            self._logs_bytes -= log.counted_bytes
            self.next_pull_floor = max(self.next_pull_floor, log.next_pull_sequence)
        return len(idle)

    def _log(self, consumer: str) -> PullLog:
        log = self._consumers.get(consumer)
        if log is None:
            log = self._consumers[consumer] = PullLog()
        return log

    def _on_pulled(self, action: Pulled) -> None:
        log = self._log(action.consumer)
        log.last_seen_ms = action.at_ms
        first = action.first_pull_sequence
        for run in action.runs:
            next_sequence = run.first_sequence + run.count
            again = self.redeliveries.take(run.first_sequence, next_sequence)
            for first_sequence, next_, waited in _pieces(run.first_sequence, next_sequence, again):
                lease = Lease(
                    first=first,
                    next=first + next_ - first_sequence,
                    first_sequence=first_sequence,
                    attempt=run.attempt,
                    token=action.token,
                    until_ms=action.lease_until_ms,
                    given_at_ms=action.at_ms,
                    history=() if waited is None else waited.history,
                    error="" if waited is None else waited.error,
                    untried=0 if waited is None else waited.untried,
                )
                first = lease.next
                log.hand_out(lease)
                self.deadlines.watch(action.consumer, lease)
            if run.attempt == 1:
                self.cursor = max(self.cursor, next_sequence)
            if self.by_key is not None:
                self.by_key.give(run.first_sequence, next_sequence)
        self._in_flight += first - action.first_pull_sequence

    def _on_nacked(self, action: Nacked) -> None:
        if action.was_tried:
            self._on_returned(action, NACKED, action.error)
        else:
            self._on_returned_untried(action)

    def _on_returned(self, action: Nacked | Expired, outcome: str, error: str) -> None:
        ended = self._log(action.consumer).end(action.first, action.next)
        is_done = action.retry_at_ms == NO_RETRY
        self._after_end(action, ended, is_done=is_done)
        kept_max = kept_of_each(self._in_flight + self.waiting + len(self.dead))
        for lease in ended:
            letter = self.dead.get(lease.first_sequence) if is_done else None
            is_rejected = letter is not None and letter.reason == REJECTED
            attempt = Attempt(
                attempt=lease.attempt,
                consumer=action.consumer,
                given_at_ms=lease.given_at_ms,
                ended_at_ms=action.at_ms,
                outcome=REJECTED if is_rejected else outcome,
                error=error,
            )
            history = extended(lease.history, attempt, kept_max)
            if is_done:
                self._set_history(lease, history)
                continue
            self.redeliveries.take(lease.first_sequence, lease.next_sequence)
            self.redeliveries.add(
                Redelivery(
                    first=lease.first_sequence,
                    next=lease.next_sequence,
                    attempts=lease.attempt,
                    retry_at_ms=action.retry_at_ms,
                    error=error,
                    history=history,
                )
            )

    def _on_returned_untried(self, action: Nacked) -> None:
        """Let the messages wait as before this delivery."""
        ended = self._log(action.consumer).end(action.first, action.next)
        self._after_end(action, ended, is_done=False)
        for lease in ended:
            self.redeliveries.take(lease.first_sequence, lease.next_sequence)
            self.redeliveries.add(
                Redelivery(
                    first=lease.first_sequence,
                    next=lease.next_sequence,
                    attempts=lease.attempt - 1,
                    retry_at_ms=action.retry_at_ms,
                    error=lease.error,
                    history=lease.history,
                    untried=lease.untried + 1,
                )
            )

    def _set_history(self, lease: Lease, history: History) -> None:
        """Give the dead letters of an ended lease their history."""
        for sequence in range(lease.first_sequence, lease.next_sequence):
            letter = self.dead.get(sequence)
            if letter is not None:
                self.dead[sequence] = msgspec.structs.replace(letter, history=history)

    def _on_dead(self, action: Dead) -> None:
        sequence = action.sequence
        waited = self.redeliveries.take(sequence, sequence + 1)
        if action.reason == EXPIRED:
            self.expired_count += sequence not in self.dead
        if self.by_key is not None and (waited or action.reason == EXPIRED):
            self.by_key.done(sequence, sequence + 1)
        self.dead[sequence] = DeadLetter(
            sequence=sequence,
            attempts=action.attempts,
            reason=action.reason,
            error=action.error,
            at_ms=action.at_ms,
            history=waited[0].history if waited else (),
        )

    def _on_passed(self, action: Passed | Keyed) -> None:
        self.cursor = max(self.cursor, action.next)
        if isinstance(action, Keyed):
            assert self.by_key is not None
            for sequence, key in zip(action.sequences, action.keys, strict=True):
                self.by_key.add(sequence, key)

    def _on_extended(self, action: Extended) -> None:
        log = self._log(action.consumer)
        for lease in log.extend(action.first, action.next, action.lease_until_ms):
            self.deadlines.watch(action.consumer, lease)
        self._watch_rest(action)

    def _after_end(
        self, action: Acked | Nacked | Expired, ended: list[Lease], *, is_done: bool
    ) -> int:
        count = sum(lease.next - lease.first for lease in ended)
        self._in_flight -= count
        if is_done and self.by_key is not None:
            for lease in ended:
                self.by_key.done(lease.first_sequence, lease.next_sequence)
        self._watch_rest(action)
        return count

    def _watch_rest(self, action: Acked | Nacked | Expired | Extended) -> None:
        """Add the deadline of the rest of a cut lease after the range, under its new first number."""
        rest = self._log(action.consumer).at(action.next)
        if rest is not None and rest.first == action.next:
            self.deadlines.watch(action.consumer, rest)


def _pieces(
    first: int, next_: int, again: Sequence[Redelivery]
) -> Iterator[tuple[int, int, Redelivery | None]]:
    """Split a run of messages into parts that waited together; most did not wait."""
    for run in again:
        if first < run.first:
            yield first, run.first, None
        yield run.first, run.next, run
        first = run.next
    if first < next_:
        yield first, next_, None
