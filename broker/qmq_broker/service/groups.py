"""The state of one consumer group on one subject, changed by actions and by nothing else.

::

                 Pulled            Acked
    new ─────────────▶ in flight ─────────▶ done
                        ▲    │ Nacked, Expired
                 Pulled │    ▼                 Dead
                       waiting  (or, when it will not be tried again) ─▶ dead letter

The broker first decides (`settling.py`, `handing_out.py`: they only read), then writes the actions
to the action log, then applies them here. A start replays the log through the same `apply`, so a
restarted broker stands exactly where the log ends; a log that lost its tail gives an earlier state
of the same group: messages are delivered again, never lost.

Nacked and Expired carry `retry_at_ms`; 0 says that there is no next delivery, and that a Dead
action for each of the messages stands before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final

from qmq_broker.service.leases import Lease, PullLog
from qmq_broker.service.redelivery import Redelivery, RedeliveryHeap
from qmq_broker.storage.actions import (
    Acked,
    Action,
    Dead,
    Expired,
    Extended,
    GroupDefined,
    Nacked,
    Pulled,
    Skipped,
)

#: `retry_at_ms` of messages that are not delivered again.
NO_RETRY: Final = 0
LEASE_ENDED: Final = "lease ended"
#: Entries of the deadline heap above which it is rid of those of settled leases.
_DEADLINES_MIN: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A message that this group does not get again."""

    sequence: int
    attempts: int
    reason: str
    #: What the last consumer said.
    error: str
    at_ms: int


class GroupState:
    """Cursor, leases, waiting redeliveries and dead letters of one (subject, group).

    Invariant: a sequence below the cursor is in exactly one of: in flight, waiting, dead, done.
    Belongs to the loop thread.
    """

    def __init__(self, *, subject: str, group: str, first_sequence: int, max_attempts: int) -> None:
        self.subject = subject
        self.group = group
        #: Next sequence that was never given to this group.
        self.cursor = first_sequence
        self.max_attempts = max_attempts
        self.redeliveries = RedeliveryHeap()
        self.dead: dict[int, DeadLetter] = {}
        self.acked_count = 0
        #: Messages that were given up by force before this group was done with them.
        self.lost_count = 0
        self._consumers: dict[str, PullLog] = {}
        #: (until, consumer, first pull sequence); entries of ended or extended leases are skipped.
        self._deadlines: list[tuple[int, str, int]] = []
        self._deadlines_max = _DEADLINES_MIN
        #: Where the pull log of a consumer that was forgotten would go on.
        self.next_pull_floor = 0
        self._in_flight = 0

    @property
    def in_flight(self) -> int:
        """Messages given to consumers and not settled."""
        return self._in_flight

    @property
    def waiting(self) -> int:
        """Messages that wait for their next delivery."""
        return self.redeliveries.count

    @property
    def consumer_count(self) -> int:
        """Consumers that hold something or were seen lately."""
        return len(self._consumers)

    def consumers(self) -> Iterator[tuple[str, PullLog]]:
        """Name and pull log of each consumer."""
        return iter(self._consumers.items())

    def consumer(self, name: str) -> PullLog | None:
        """The pull log of this consumer, or None when it was never given anything."""
        return self._consumers.get(name)

    def next_pull_sequence(self, consumer: str) -> int:
        """Under which pull sequence this consumer gets its next message."""
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
        """Put a consumer back as a snapshot has it. Requires: it is not there yet."""
        log = self._log(name)
        log.restore(leases, acked, next_pull_sequence=next_pull_sequence)
        log.last_seen_ms = last_seen_ms
        self._in_flight += log.in_flight
        for lease in leases:
            self._watch(name, lease)

    def first_needed(self, dead_since_ms: int) -> int:
        """The lowest sequence that this group may still be given.

        Dead letters count when they died at or after `dead_since_ms`: they can be replayed.
        """
        needed = [self.cursor]
        needed += [run.first for run in self.redeliveries.runs()]
        needed += [
            lease.first_sequence for log in self._consumers.values() for lease in log.leases()
        ]
        needed += [one.sequence for one in self.dead.values() if one.at_ms >= dead_since_ms]
        return min(needed)

    def apply(self, action: Action) -> None:
        """Change the state as this action says. Requires: it is of this subject and group."""
        match action:
            case Pulled():
                self._on_pulled(action)
            case Acked():
                ended = self._log(action.consumer).ack(action.first, action.next)
                self.acked_count += self._after_end(action, ended)
            case Nacked(error=error):
                self._on_given_back(action, error)
            case Expired():
                self._on_given_back(action, LEASE_ENDED)
            case Extended():
                self._on_extended(action)
            case Dead():
                self.dead[action.sequence] = DeadLetter(
                    sequence=action.sequence,
                    attempts=action.attempts,
                    reason=action.reason,
                    error=action.error,
                    at_ms=action.at_ms,
                )
            case Skipped():
                waiting = self.redeliveries.take(action.first, action.next)
                self.lost_count += sum(run.next - run.first for run in waiting)
                self.lost_count += max(0, action.next - self.cursor)
                self.cursor = max(self.cursor, action.next)
            case GroupDefined():
                self.max_attempts = action.max_attempts

    def ended_leases(self, now_ms: int, leases_max: int) -> list[tuple[str, Lease]]:
        """Leases past their deadline, with their consumers, at most `leases_max`; they stay."""
        ended: dict[tuple[int, str, int], Lease] = {}
        while len(ended) < leases_max:
            deadline_ms = self.next_deadline_ms()
            if deadline_ms is None or deadline_ms > now_ms:
                break
            entry = heappop(self._deadlines)
            lease = self._consumers[entry[1]].at(entry[2])
            assert lease is not None
            ended[entry] = lease
        for entry in ended:
            heappush(self._deadlines, entry)
        return [(consumer, lease) for (_, consumer, _), lease in ended.items()]

    def next_deadline_ms(self) -> int | None:
        """When the next lease ends, or None when there is none."""
        deadlines = self._deadlines
        while deadlines:
            until_ms, consumer, first = deadlines[0]
            log = self._consumers.get(consumer)
            lease = None if log is None else log.at(first)
            if lease is not None and lease.first == first and lease.until_ms == until_ms:
                return until_ms
            heappop(deadlines)
        return None

    def clamp(self, next_sequence: int) -> int:
        """Forget what lies beyond the subject's durable end; returns how many messages that was.

        Called once after replay: messages that a power cut took away cannot be settled any more.
        """
        forgotten = max(0, self.cursor - next_sequence)
        self.cursor = min(self.cursor, next_sequence)
        beyond = 2**63
        self.redeliveries.take(next_sequence, beyond)
        for log in self._consumers.values():
            for lease in list(log.leases()):
                if lease.next_sequence > next_sequence:
                    kept = max(0, next_sequence - lease.first_sequence)
                    ended = log.end(lease.first + kept, lease.next)
                    self._in_flight -= sum(piece.next - piece.first for piece in ended)
        for sequence in [sequence for sequence in self.dead if sequence >= next_sequence]:
            del self.dead[sequence]
        return forgotten

    def forget_idle_consumers(self, seen_before_ms: int) -> int:
        """Forget consumers that hold nothing and were not seen since; returns how many.

        Their pull sequences are never used again: a name for a hand-out stays unique.
        """
        idle = [
            name
            for name, log in self._consumers.items()
            if not log.in_flight and log.last_seen_ms < seen_before_ms
        ]
        for name in idle:
            log = self._consumers.pop(name)
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
        leases = log.hand_out(
            action.first_pull_sequence,
            action.runs,
            token=action.token,
            until_ms=action.lease_until_ms,
        )
        for lease in leases:
            self.redeliveries.take(lease.first_sequence, lease.next_sequence)
            if lease.attempt == 1:
                self.cursor = max(self.cursor, lease.next_sequence)
            self._in_flight += lease.next - lease.first
            self._watch(action.consumer, lease)

    def _on_given_back(self, action: Nacked | Expired, error: str) -> None:
        ended = self._log(action.consumer).end(action.first, action.next)
        self._after_end(action, ended)
        for lease in ended if action.retry_at_ms != NO_RETRY else ():
            self.redeliveries.take(lease.first_sequence, lease.next_sequence)
            self.redeliveries.add(
                Redelivery(
                    first=lease.first_sequence,
                    next=lease.next_sequence,
                    attempts=lease.attempt,
                    retry_at_ms=action.retry_at_ms,
                    error=error,
                )
            )

    def _on_extended(self, action: Extended) -> None:
        log = self._log(action.consumer)
        for lease in log.extend(action.first, action.next, action.lease_until_ms):
            self._watch(action.consumer, lease)
        self._watch_rest(action)

    def _after_end(self, action: Acked | Nacked | Expired, ended: list[Lease]) -> int:
        count = sum(lease.next - lease.first for lease in ended)
        self._in_flight -= count
        self._watch_rest(action)
        return count

    def _watch_rest(self, action: Acked | Nacked | Expired | Extended) -> None:
        """Note the deadline of what a cut left behind the range: it has a new first number."""
        rest = self._log(action.consumer).at(action.next)
        if rest is not None and rest.first == action.next:
            self._watch(action.consumer, rest)

    def _watch(self, consumer: str, lease: Lease) -> None:
        heappush(self._deadlines, (lease.until_ms, consumer, lease.first))
        if len(self._deadlines) > self._deadlines_max:
            self._deadlines = [
                (lease.until_ms, name, lease.first)
                for name, log in self._consumers.items()
                for lease in log.leases()
            ]
            heapify(self._deadlines)
            self._deadlines_max = _DEADLINES_MIN + 2 * len(self._deadlines)
