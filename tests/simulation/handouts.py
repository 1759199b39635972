"""What the broker gave to whom, seen at the broker: promises that only its own clock and word can judge.

Nothing before its time (D1) or after its end, nothing to a paused group, no attempt beyond the group's
last, what may have ended its consumers alone (C4), no attempt for what came back untried (C4), and at
most once means that no consumer ever sees a message twice.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from qmq_broker.service.delivery.delivery import HandOut
from qmq_client.group.history import LEASE_ENDED
from qmq_client.group.redelivery import SUSPECT_AFTER
from qmq_client.group.settling import Stale
from qmq_client.wire.groups import group_of
from qmq_client.wire.message_id import format_message_id
from qmq_client.wire.record import decode_record
from qmq_client.wire.requests import PullRequest, SettleRequest
from tests.simulation.broker import BrokerHost, BrokerLife
from tests.simulation.plan import GroupPlan


class HandOuts:
    """Judges each hand-out when it is made, and pauses over the lives of the broker."""

    def __init__(self, host: BrokerHost, groups: Sequence[GroupPlan]) -> None:
        #: What was found wrong, in sentences.
        self.faults: list[str] = []
        #: How often each message was handed out to each group.
        self.counts: Counter[tuple[str, str]] = Counter()
        #: When each message was handed out in the last attempt of its group, for the first time.
        self.last_given_ns: dict[tuple[str, str], int] = {}
        self._host = host
        #: Message of each hand-out, by group, consumer, token and pull sequence.
        self._given: dict[tuple[str, str, int, int], str] = {}
        #: For each group and message: the offsets of the action log behind which it is known that
        #: it came back untried.
        self._untried: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        self._groups = {group.name: group for group in groups}
        #: Paused groups, with the offset of the action log behind which that is known.
        self._paused: dict[str, int] = {}
        self._highest_ms = 0
        #: Called once, with the next hand-out.
        self.on_next: Callable[[], object] = _nothing

    def note_time(self) -> None:
        """Look at the broker's clock; to be called before it is set back."""
        self._highest_ms = max(self._highest_ms, self._host.clock.now_ms())

    def on_hand_out(self, request: PullRequest, given: HandOut, now_ms: int, at_ns: int) -> None:
        """The broker gives messages away; `at_ns` is by the clock of the history."""
        self.note_time()
        on_next, self.on_next = self.on_next, _nothing
        on_next()
        self._judge_durable(request, given)
        self._judge_alone(request, given)
        group = self._groups[group_of(request)]
        attempts = [run.attempt for run in given.head.runs for _ in range(run.count)]
        for index, (attempt, data) in enumerate(zip(attempts, given.records, strict=True)):
            record = decode_record(request.subject, data)
            message_id = format_message_id(record.message_id)
            pull_sequence = given.head.first_pull_sequence + index
            name = (group.name, request.consumer, given.head.token, pull_sequence)
            self._given[name] = message_id
            self.counts[group.name, message_id] += 1
            if attempt == group.max_attempts:
                self.last_given_ns.setdefault((group.name, message_id), at_ns)
            where = f"message {message_id} to group {group.name}"
            if record.due_at_ms is not None and record.due_at_ms > self._highest_ms:
                early_ms = record.due_at_ms - self._highest_ms
                self.faults.append(f"D1: {where} {early_ms} ms before its time")
            if record.expires_at_ms is not None and record.expires_at_ms <= now_ms:
                self.faults.append(f"TTL: {where} after it had expired")
            tried_max = self.counts[group.name, message_id] - len(
                self._untried[group.name, message_id]
            )
            attempts_max = min(group.max_attempts, tried_max)
            if attempt > attempts_max:
                self.faults.append(f"C4: {where} in attempt {attempt} of {attempts_max}")
            if group.name in self._paused:
                self.faults.append(f"pause: {where}, which is paused")

    def on_settled(self, request: PullRequest | SettleRequest, stale: Sequence[Stale]) -> None:
        """The broker has taken outcomes, but those; what came back untried was no attempt."""
        life = self._host.life
        assert life is not None
        offset = life.store.actions.log.written_offset
        group = group_of(request)
        for settlement in request.settlements:
            token = settlement.token
            refused = {(of, one) for of, *part in stale for one in range(*part)}
            for nack in settlement.nacks:
                for one in range(*nack.range) if nack.was_begun is False else ():
                    if (token, one) not in refused:
                        message_id = self._given[group, request.consumer, token, one]
                        self._untried[group, message_id].append(offset)

    def _judge_durable(self, request: PullRequest, given: HandOut) -> None:
        life = self._host.life
        queue = None if life is None else life.store.queue(request.subject)
        if life is None or queue is None:
            return
        last = max(run.first_sequence + run.count for run in given.head.runs) - 1
        for entry in queue.entries(last, 1):
            if entry.physical_offset >= life.store.durable_offset:
                name = f"{request.subject} {last}"
                self.faults.append(f"B2: {name} was given before it was durable")

    def _judge_alone(self, request: PullRequest, given: HandOut) -> None:
        """Whoever has a suspect in hand and has said nothing of it gets nothing else."""
        life = self._host.life
        state = None
        if life is not None:
            state = life.broker.delivery.group(request.subject, group_of(request))
        log = None if state is None else state.consumer(request.consumer)
        for lease in () if log is None else log.leases():
            is_suspect = (
                lease.attempt > SUSPECT_AFTER
                and lease.token == given.head.token
                and lease.until_ms == lease.given_at_ms + request.lease_ms
                and lease.history[-1].outcome == LEASE_ENDED
            )
            is_alone = lease.first == given.head.first_pull_sequence and len(given.records) == 1
            if is_suspect and not is_alone:
                name = f"{request.subject} {lease.first_sequence}"
                self.faults.append(f"C4: {name} is suspect, and not given alone")

    def pause(self, life: BrokerLife, group: GroupPlan, *, is_paused: bool) -> None:
        """An operator pauses a group or lets it go on; in the broker's loop."""
        broker = life.broker
        if broker.delivery.group(group.subject, group.name) is None:
            return
        now_ms = broker.time.now_ms()
        broker.changes.pause(group.subject, group.name, now_ms, is_paused=is_paused)
        if is_paused:
            self._paused[group.name] = life.store.actions.log.written_offset
        else:
            self._paused.pop(group.name, None)

    def on_death(self, life: BrokerLife, *, is_power_cut: bool) -> None:
        """Forget what the broker had no time to make durable."""
        durable_offset = life.broker.durable_offsets[1]
        if is_power_cut:
            unsure = [name for name, at in self._paused.items() if at > durable_offset]
            for name in unsure:
                del self._paused[name]
            for offsets in self._untried.values():
                offsets[:] = [one for one in offsets if one <= durable_offset]

    def on_begin(self, life: BrokerLife) -> None:
        """A durable pause must be there again."""
        for name in self._paused:
            group = self._groups[name]
            state = life.broker.delivery.group(group.subject, name)
            if state is None or not state.is_paused:
                self.faults.append(f"pause: group {name} goes on after a restart")


def _nothing() -> None:
    """Nobody waits for a hand-out."""
