"""One consumer group of the in-memory broker: the state machine of the broker (`qmq_client.group`).

The broker writes an action to its action log before it applies it; here it is only applied. No
files, no limits, no threads (the caller holds a lock), and time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from qmq_client.errors import BrokerRefusedError
from qmq_client.group.actions import Action, Configured, GroupDefined
from qmq_client.group.apply import apply_action, new_state
from qmq_client.group.picking import Picked, Picker, Room, hand_out
from qmq_client.group.queue import Entry
from qmq_client.group.settings import backoff_kept, backoff_of, conflict_of
from qmq_client.group.settling import Plan, Terms, plan_ended_leases, plan_settlements
from qmq_client.group.state import GroupState
from qmq_client.wire.backoff import ExponentialBackoff
from qmq_client.wire.deliveries import Records
from qmq_client.wire.groups import Instances
from qmq_client.wire.message_id import format_message_id
from qmq_client.wire.record import joined_tags_hash
from qmq_client.wire.record_parts import record_tags
from qmq_client.wire.requests import ErrorAnswer, PullRequest, Settlement

#: No jitter: a test can predict when a message is delivered again.
_BACKOFF: Final = ExponentialBackoff(jitter=0.0)
#: The longest a lease can be extended after the delivery, as at the broker.
_HELD_MS: Final = 24 * 3_600_000
_UNBOUNDED: Final = 2**63


class MemoryQueue:
    """The records of a subject as a group reads them; a record's place is its sequence."""

    def __init__(self, records: Sequence[bytes]) -> None:
        self._records = records
        self.first_sequence = 0
        self.next_sequence = len(records)

    def entries(self, first_sequence: int, count: int) -> list[Entry]:
        """See `GroupQueue.entries`."""
        some = self._records[first_sequence : first_sequence + count]
        return [
            Entry(sequence, len(record), joined_tags_hash(record_tags(record)))
            for sequence, record in enumerate(some, start=first_sequence)
        ]

    places = entries

    def read(self, entries: Sequence[tuple[int, int, int]]) -> Records:
        """See `GroupQueue.read`."""
        return Records.of([self._records[place] for place, _, _ in entries])


class MemoryGroup:
    """One group of a `MemoryBroker`. Not thread safe."""

    def __init__(self, defined: GroupDefined) -> None:
        self.state = new_state(defined)
        #: The processes of a broadcast consumer.
        self.instances = Instances()
        self._picker = Picker(self.state, self._write, unsettled_max=_UNBOUNDED)

    def write(self, actions: Iterable[Action]) -> None:
        """Apply the actions that the broker would write to its log."""
        for action in actions:
            apply_action(self.state, action)

    def _write(self, actions: Iterable[Action], _: GroupState) -> None:
        self.write(actions)

    def agree(self, request: PullRequest, now_ms: int) -> None:
        """Take over the settings that a pull may change; raises `BrokerRefusedError` if it
        contradicts the group's settings.
        """
        state, has = self.state, self.state.settings
        where = (now_ms, state.subject, state.group)
        if conflict := conflict_of(has, request):
            field, limit, value = conflict
            text = f"group {state.group} on {state.subject} has {field} {limit}; asked for: {value}"
            raise refused(409, "group_conflict", text)
        self.write([GroupDefined(*where, state.cursor, request.max_attempts)])
        if backoff := backoff_kept(request.backoff):
            self.write([Configured(*where, msgspec.structs.replace(has, backoff=backoff))])

    def step(self, now_ms: int) -> None:
        """End the leases whose deadline has passed."""
        ended = self.state.deadlines.ended(now_ms, _UNBOUNDED)
        self.write(plan_ended_leases(self.state, ended, self._terms(now_ms)))

    def take(self, request: PullRequest, queue: MemoryQueue, *, token: int, now_ms: int) -> Picked:
        """Deliver due messages."""
        self.step(now_ms)
        room = Room(
            now_ms=now_ms,
            messages=request.max_messages,
            bytes=request.max_bytes,
            new_messages=_UNBOUNDED,
        )
        pull = (queue, request.consumer, request.lease_ms, room)
        while (picked := self._picker.pick(*pull)).is_unfinished:
            pass
        if picked.runs:
            self.write(hand_out(self.state, request, picked, token, now_ms))
        return picked

    def settle(self, consumer: str, settlements: Iterable[Settlement], now_ms: int) -> Plan:
        """Apply outcomes."""
        self.step(now_ms)
        plan = plan_settlements(self.state, consumer, settlements, self._terms(now_ms))
        self.write(plan.actions)
        return plan

    def lag(self, records: Sequence[bytes]) -> int:
        """Messages for the group that are neither acked nor dead letters."""
        state, wanted = self.state, self.state.filter
        to_come = records[state.cursor :]
        new = len(to_come) if wanted is None else sum(map(wanted.matches, to_come))
        return new + state.unsettled

    def next_due_ms(self) -> int | None:
        """When a redelivery or a lease end is next due; None when nothing waits."""
        times = (self.state.redeliveries.next_due_ms(), self.state.deadlines.next_ms())
        return min((one for one in times if one is not None), default=None)

    def _terms(self, now_ms: int) -> Terms:
        backoff = backoff_of(self.state.settings, _BACKOFF)
        return Terms(now_ms=now_ms, backoff=backoff, draw=lambda: 0.0, held_ms=_HELD_MS)


def refused(
    status: int, code: str, message: str, message_id: bytes | None = None
) -> BrokerRefusedError:
    """The error for a refusal, as the broker would answer it."""
    text = "" if message_id is None else format_message_id(message_id)
    return BrokerRefusedError(status, ErrorAnswer(code=code, message=message, message_id=text))
