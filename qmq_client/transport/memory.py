"""A broker in memory, for tests of applications and of this client.

It keeps all promises of the bundled broker except durability. Groups are those of the broker
(`memory_group.py`). Messages are lists of records, without limits; delayed ones wait in a heap, and repeated sends are
recognized by a table of ids. Time comes from the given clock. `MemoryBroker.faults` injects faults.
It passes the same contract suite as `HttpTransport`, so a test with it is also valid for the real broker.
"""

from __future__ import annotations

import heapq
import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import msgspec
from msgspec import UNSET

from qmq_client.clock import SYSTEM_CLOCK, Clock
from qmq_client.errors import (
    BrokerAnswerError,
    BrokerBusyError,
    BrokerUnreachableError,
    InvalidMessageError,
    InvalidNameError,
    ProtocolError,
)
from qmq_client.group.actions import (
    Action,
    Configured,
    GroupDefined,
    Paused,
    Replayed,
    Sought,
)
from qmq_client.group.dead_letters import DeadLetter
from qmq_client.group.key_queues import key_number
from qmq_client.group.settings import settings_of
from qmq_client.ids import MESSAGE_IDS
from qmq_client.message import Message, decode_message, message_to_record
from qmq_client.transport.memory_group import MemoryGroup, MemoryQueue, refused
from qmq_client.wire.delayed import Cancellation, record_due_at_ms
from qmq_client.wire.deliveries import Delivered, Deliveries, DeliveriesHead
from qmq_client.wire.frame import FrameKind, MessageFrame, build_message_frame, parse_message_frame
from qmq_client.wire.groups import group_of, replaced_text
from qmq_client.wire.limits import DEFAULT_LIMITS, Limits
from qmq_client.wire.message_id import format_message_id, parse_message_id
from qmq_client.wire.names import check_name
from qmq_client.wire.record import (
    encode_record,
    record_crc,
    record_key,
    record_message_id,
    verify_record,
)
from qmq_client.wire.requests import (
    PullRequest,
    SendAnswer,
    SettleAnswer,
    SettleRequest,
    SubjectPlace,
)
from qmq_client.wire.start import StartKind, parse_start

#: A waiting pull checks again this often, because an injected clock cannot wake it.
_LOOK_S: Final = 0.02


@dataclass(slots=True, kw_only=True)
class MemoryFaults:
    """Faults to inject; counts decrease with each affected call."""

    #: All calls fail with `BrokerUnreachableError`.
    is_unreachable: bool = False
    #: Every call is refused as busy, for this many seconds.
    busy_retry_after_s: float | None = None
    #: The next calls are carried out, but their answers are lost.
    lost_answers: int = 0
    #: The next calls are carried out, but their answers are invalid.
    garbage_answers: int = 0
    #: A send with one of these message ids is refused, and the error names it.
    refused_ids: set[str] = field(default_factory=set)
    #: Records with these message ids are delivered with an altered byte.
    altered_ids: set[str] = field(default_factory=set)


class MemoryBroker:
    """The state of a broker, in memory. Any number of threads and transports may share it."""

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK, limits: Limits = DEFAULT_LIMITS) -> None:
        self.faults = MemoryFaults()
        self.epoch = 1
        self._clock = clock
        self._limits = limits
        self._changed = threading.Condition()
        self._records: dict[str, list[bytes]] = {}
        self._stored_at_ms: dict[str, list[int]] = {}
        self._crc_by_id: dict[tuple[str, bytes], int] = {}
        self._withdrawn: set[tuple[str, bytes]] = set()
        self._delayed = MemoryDelayed()
        self._groups: dict[tuple[str, str], MemoryGroup] = {}

    def put(self, *messages: Message) -> list[str]:
        """Store messages like a producer; returns their ids."""
        ids: list[str] = []
        for message in messages:
            record = message_to_record(
                message, new_id=MESSAGE_IDS.next_id(), now_ms=self._clock.now_ms()
            )
            encoded = encode_record(record, self._limits)
            kind = FrameKind.MESSAGES if record.due_at_ms is None else FrameKind.DELAYED
            frame = build_message_frame(
                {message.subject: [encoded]}, kind=kind, limits=self._limits
            )
            self.send(frame)
            ids.append(format_message_id(record.message_id))
        return ids

    def messages(self, subject: str) -> list[Message]:
        """All messages ever stored under this subject, in order."""
        with self._changed:
            self._release()
            records = list(self._records.get(subject, ()))
        return [decode_message(subject, record) for record in records]

    def dead_letters(self, subject: str, group: str) -> list[DeadLetter]:
        """The dead letters of this group, in order."""
        with self._changed:
            return list(self._group(subject, group).state.dead.values())

    def lag(self, subject: str, group: str) -> int:
        """Number of messages that this group has neither acked nor given up."""
        with self._changed:
            self._release()
            return self._group(subject, group).lag(self._records.get(subject, ()))

    def in_flight(self, subject: str, group: str) -> int:
        """Messages delivered to this group under a running lease."""
        with self._changed:
            found = self._group(subject, group)
            found.step(self._clock.now_ms())
            return found.state.in_flight

    def next_due_ms(self, subject: str, group: str) -> int | None:
        """When the next redelivery or lease end of this group is due."""
        with self._changed:
            return self._group(subject, group).next_due_ms()

    def seek(self, subject: str, group: str, to: str) -> None:
        """Move the group to this position, like `qmq groups seek`."""
        with self._changed:
            sequence = self._position(subject, to)
            self._change(Sought(self._clock.now_ms(), subject, group, sequence))

    def pause(self, subject: str, group: str, *, is_paused: bool = True) -> None:
        """Stop delivering messages to the group, or start again."""
        with self._changed:
            self._change(Paused(self._clock.now_ms(), subject, group, is_paused))

    def replay_dead_letters(self, subject: str, group: str) -> int:
        """Deliver the group's dead letters again; returns how many."""
        with self._changed:
            dead = sorted(self._group(subject, group).state.dead)
            records = self._records.get(subject, ())
            keys = tuple(key_number(record_key(records[sequence])) for sequence in dead)
            if dead:
                where = (self._clock.now_ms(), subject, group)
                self._change(Replayed(*where, dead[0], dead[-1] + 1, keys))
            return len(dead)

    def _change(self, action: Action) -> None:
        self._group(action.subject, action.group).write([action])
        self._changed.notify_all()

    def restart(self) -> None:
        """Begin a new epoch, like a restarted broker; no state is lost."""
        with self._changed:
            self.epoch += 1

    def send(self, frame: bytes) -> SendAnswer:
        """Store the messages of a frame, wholly or not at all."""
        parsed = self._parse(frame)
        with self._changed:
            records = self._check_ids(parsed)
            places: list[SubjectPlace] = []
            if parsed.header.kind is FrameKind.DELAYED:
                self._delayed.add(records)
            else:
                places = self._store(records)
            fresh = [(subject, record) for subject, new in records.items() for record in new]
            self._crc_by_id.update(
                ((subject, record_message_id(r)), record_crc(r)) for subject, r in fresh
            )
            self._changed.notify_all()
        count = parsed.header.record_count
        return SendAnswer(
            frame_crc=parsed.header.body_crc,
            count=count,
            duplicates=count - len(fresh),
            physical_offset=0,
            stored_at_ms=self._clock.now_ms(),
            durability="memory",
            places=tuple(places),
        )

    def cancel(
        self, message_ids: tuple[str, ...], *, withdrawn_from: str | None = None
    ) -> tuple[Cancellation, ...]:
        """Cancel messages that wait for their time; see `Cancelling.cancel`."""
        with self._changed:
            self._release()
            ids = [parse_message_id(one) for one in message_ids]
            if withdrawn_from is not None:
                self._withdrawn.update((withdrawn_from, one) for one in ids)
            return self._delayed.cancel(ids, self._crc_by_id, withdrawn_from)

    def _release(self) -> None:
        """Store due delayed messages."""
        self._store(self._delayed.due(self._clock.now_ms()))

    def _store(self, records: Mapping[str, Sequence[bytes]]) -> list[SubjectPlace]:
        places: list[SubjectPlace] = []
        for subject, new in records.items():
            stored = self._records.setdefault(subject, [])
            if new:
                first = len(stored)
                places.append(SubjectPlace(subject=subject, first_sequence=first, count=len(new)))
            stored += new
            times = self._stored_at_ms.setdefault(subject, [])
            times += [self._clock.now_ms()] * len(new)
        return places

    def pull(self, request: PullRequest) -> Deliveries:
        """Deliver messages; waits up to `wait_ms` if there are none."""
        check_request(request)
        with self._changed:
            group = self._group_for(request)
            plan = group.settle(request.consumer, request.settlements, self._clock.now_ms())
            deliveries = self._take(group, request)
            ends = [(c, c.monotonic_s() + request.wait_ms / 1000) for c in self._clocks()]
            while not deliveries.messages and all(c.monotonic_s() < end for c, end in ends):
                self._changed.wait(_LOOK_S)
                deliveries = self._take(group, request)
        head = msgspec.structs.replace(deliveries.head, stale=tuple(plan.stale))
        return Deliveries(head=head, messages=deliveries.messages)

    def settle(self, request: SettleRequest) -> SettleAnswer:
        """Apply outcomes."""
        check_request(request)
        with self._changed:
            group, now_ms = self._group(request.subject, group_of(request)), self._clock.now_ms()
            group.instances.seen(now_ms)
            plan = group.settle(request.consumer, request.settlements, now_ms)
            self._changed.notify_all()
        return SettleAnswer(settled=plan.settled, stale=tuple(plan.stale))

    def _group_for(self, request: PullRequest) -> MemoryGroup:
        key, now_ms = (request.subject, group_of(request)), self._clock.now_ms()
        group = self._groups.get(key)
        if group is None:
            first = self._position(request.subject, request.start)
            group = MemoryGroup(GroupDefined(now_ms, *key, first, request.max_attempts))
            group.write([Configured(now_ms, *key, settings_of(request))])
            self._groups[key] = group
        group.agree(request, now_ms)
        if not group.instances.admits(request, now_ms):
            raise refused(409, "consumer_replaced", replaced_text(request))
        return group

    def _position(self, subject: str, text: str) -> int:
        """The sequence of a start."""
        start, stored = parse_start(text), self._stored_at_ms.get(subject, [])
        if start.kind is StartKind.EARLIEST:
            return 0
        if start.kind is StartKind.TIME:
            return bisect_left(stored, start.number)
        return min(start.number, len(stored)) if start.kind is StartKind.SEQUENCE else len(stored)

    def _clocks(self) -> tuple[Clock, ...]:
        # An injected clock may stand still, so a pull also ends by real time.
        return (self._clock, SYSTEM_CLOCK)

    def _group(self, subject: str, group: str) -> MemoryGroup:
        found = self._groups.get((subject, group))
        return MemoryGroup(GroupDefined(0, subject, group, 0, 1)) if found is None else found

    def _parse(self, frame: bytes) -> MessageFrame:
        try:
            parsed = parse_message_frame(frame, self._limits)
            for subject, record in parsed.records():
                verify_record(subject, record)
        except ProtocolError as error:
            raise refused(400, error.code, str(error)) from error
        if parsed.header.kind not in (FrameKind.MESSAGES, FrameKind.DELAYED):
            text = f"frame kind: {parsed.header.kind.name}; allowed: DELAYED or MESSAGES"
            raise refused(422, "invalid", text)
        for message_id in parsed.message_ids():
            if format_message_id(message_id) in self.faults.refused_ids:
                raise refused(422, "refused", "refused by a fault", message_id)
        return parsed

    def _check_ids(self, frame: MessageFrame) -> dict[str, list[bytes]]:
        """The records to store, by subject; raises if an id was stored before with other bytes."""
        new: dict[str, list[bytes]] = {}
        seen: dict[tuple[str, bytes], int] = {}
        for subject, record in frame.records():
            message, crc = (subject, record_message_id(record)), record_crc(record)
            known = self._crc_by_id.get(message, seen.get(message))
            if known is not None and known != crc:
                text = f"message id {format_message_id(message[1])} was stored before with other content"
                raise refused(409, "id_conflict", text, message[1])
            new.setdefault(subject, [])
            if known is None and message not in self._withdrawn:
                seen[message] = crc
                new[subject].append(record)
        return new

    def _take(self, group: MemoryGroup, request: PullRequest) -> Deliveries:
        self._release()
        queue = MemoryQueue(self._records.get(request.subject, ()))
        first = group.state.next_pull_sequence(request.consumer)
        picked = group.take(request, queue, token=self.epoch, now_ms=self._clock.now_ms())
        head = DeliveriesHead(
            subject=request.subject,
            token=self.epoch,
            lease_ms=request.lease_ms,
            first_pull_sequence=first,
            runs=picked.runs,
        )
        numbered = [
            (run.first_sequence + index, run.attempt)
            for run in picked.runs
            for index in range(run.count)
        ]
        messages = tuple(
            Delivered(sequence, first + index, attempt, self._handed_out(record))
            for index, ((sequence, attempt), record) in enumerate(
                zip(numbered, picked.records, strict=True)
            )
        )
        return Deliveries(head=head, messages=messages)

    def _handed_out(self, record: bytes) -> bytes:
        if format_message_id(record_message_id(record)) not in self.faults.altered_ids:
            return record
        return record[:-1] + bytes([record[-1] ^ 1])


class MemoryTransport:
    """`Transport` to a `MemoryBroker`, subject to the broker's faults."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.broker = broker
        #: Calls made, by name, including refused ones.
        self.calls: dict[str, int] = {"send": 0, "pull": 0, "settle": 0}
        self._is_closed = False

    def send(self, frame: bytes) -> SendAnswer:
        """See `Transport.send`."""
        self._before("send")
        answer = self.broker.send(frame)
        self._after()
        return answer

    def pull(self, request: PullRequest) -> Deliveries:
        """See `Transport.pull`."""
        self._before("pull")
        answer = self.broker.pull(request)
        self._after()
        return answer

    def settle(self, request: SettleRequest) -> SettleAnswer:
        """See `Transport.settle`."""
        self._before("settle")
        answer = self.broker.settle(request)
        self._after()
        return answer

    def cancel(
        self, message_ids: tuple[str, ...], *, withdrawn_from: str | None = None
    ) -> tuple[Cancellation, ...]:
        """See `Cancelling`."""
        self._before("cancel")
        answer = self.broker.cancel(message_ids, withdrawn_from=withdrawn_from)
        self._after()
        return answer

    def close(self) -> None:
        """Refuse further calls."""
        self._is_closed = True

    def _before(self, call: str) -> None:
        faults = self.broker.faults
        self.calls[call] = self.calls.get(call, 0) + 1
        if self._is_closed or faults.is_unreachable:
            raise BrokerUnreachableError("memory broker: no connection")
        if faults.busy_retry_after_s is not None:
            raise BrokerBusyError("memory broker: busy", retry_after_s=faults.busy_retry_after_s)

    def _after(self) -> None:
        faults = self.broker.faults
        if faults.lost_answers:
            faults.lost_answers -= 1
            raise BrokerUnreachableError("memory broker: the answer was lost")
        if faults.garbage_answers:
            faults.garbage_answers -= 1
            raise BrokerAnswerError("memory broker: the answer is invalid")


def check_request(request: PullRequest | SettleRequest) -> None:
    """Refuse invalid names and limits."""
    try:
        check_name(request.subject, field="subject")
        check_name(request.group, field="group")
        check_name(request.consumer, field="consumer")
    except InvalidNameError as error:
        raise refused(422, error.code, str(error)) from error
    if isinstance(request, PullRequest):
        _check_said(request)
        if not (request.max_messages and request.max_attempts and request.lease_ms):
            raise refused(
                422, "invalid", "max_messages, max_attempts, lease_ms: 0; allowed: 1 or more"
            )


def _check_said(request: PullRequest) -> None:
    try:
        parse_start(request.start)
        for tag in () if request.tags is UNSET else (*request.tags.any, *request.tags.all):
            check_name(tag, field="tags")
    except InvalidMessageError as error:
        raise refused(422, error.code, str(error)) from error


class MemoryDelayed:
    """Delayed messages. The caller holds a lock."""

    def __init__(self) -> None:
        #: Due time, order of arrival, subject, record.
        self._waiting: list[tuple[int, int, str, bytes]] = []
        self._numbers = count()
        #: Subject and id of each waiting message.
        self._cancelled: set[tuple[str, bytes]] = set()

    def add(self, records: Mapping[str, Sequence[bytes]]) -> None:
        """Keep these messages until they are due."""
        for subject, some in records.items():
            for record in some:
                due_at_ms = record_due_at_ms(record) or 0
                heapq.heappush(self._waiting, (due_at_ms, next(self._numbers), subject, record))

    def due(self, now_ms: int) -> dict[str, list[bytes]]:
        """Remove and return due messages, by subject and in order."""
        found: dict[str, list[bytes]] = {}
        while self._waiting and self._waiting[0][0] <= now_ms:
            _, _, subject, record = heapq.heappop(self._waiting)
            found.setdefault(subject, []).append(record)
        return found

    def cancel(
        self,
        message_ids: Sequence[bytes],
        known: Iterable[tuple[str, bytes]],
        subject: str | None,
    ) -> tuple[Cancellation, ...]:
        """Cancel messages, of one subject or of any; `known` are all that were ever stored."""
        return tuple(self._cancel(one, known, subject) for one in message_ids)

    def _cancel(
        self, message_id: bytes, known: Iterable[tuple[str, bytes]], subject: str | None
    ) -> Cancellation:
        def is_it(name: str, other: bytes) -> bool:
            return other == message_id and subject in (None, name)

        left = []
        for one in self._waiting:
            if is_it(one[2], record_message_id(one[3])):
                self._cancelled.add((one[2], message_id))
            else:
                left.append(one)
        heapq.heapify(left)
        self._waiting = left
        stored = {one for one in known if is_it(*one)}
        if not stored:
            return Cancellation.UNKNOWN
        is_cancelled = stored <= self._cancelled
        return Cancellation.CANCELLED if is_cancelled else Cancellation.TOO_LATE
