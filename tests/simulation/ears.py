"""What is heard in the played world, as a history for the checker of `tests/kit`.

Every event gets a time of its own, in the order in which things happened: there is one thread, so the
order is certain, and so is every accusation that rests on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from qmq_broker.service.delivery.delivery import HandOut
from qmq_client.wire.deliveries import Deliveries
from qmq_client.wire.frame import parse_message_frame
from qmq_client.wire.groups import group_of
from qmq_client.wire.message_id import format_message_id
from qmq_client.wire.record import Record, decode_record
from qmq_client.wire.requests import PullRequest, SendAnswer, Settlement, SettleRequest
from tests.kit.events import (
    SEQUENCE_UNKNOWN,
    Accepted,
    Acked,
    AckUnknown,
    AnyEvent,
    Delivered,
    Fault,
    Nacked,
    Phase,
)
from tests.kit.history import body_hash
from tests.simulation.rows import RowWatch
from tests.simulation.scheduler import Process, Scheduler

_NS_PER_US: Final = 1_000
#: Group, consumer, token and pull sequence: the name of one delivery.
_Name = tuple[str, str, int, int]


@dataclass(slots=True)
class Told:
    """What the broker made of outcomes it was told."""

    #: (token, first, next) of those that it refused; None while, or when, no answer came.
    stale: Sequence[tuple[int, int, int]] | None = None


class Ears:
    """Writes the history; the lines of all processes tell it."""

    def __init__(self, scheduler: Scheduler, rows: RowWatch) -> None:
        self.events: list[AnyEvent] = []
        self.rows = rows
        self._scheduler = scheduler
        self._last_ns = 0
        #: Message id and attempt of each delivery that a consumer saw.
        self._seen: dict[_Name, tuple[str, int]] = {}
        #: When the broker handed each of them out.
        self._given_ns: dict[_Name, int] = {}

    def now_ns(self) -> int:
        """A time later than every other one before."""
        self._last_ns = max(self._last_ns + 1, self._scheduler.now_us * _NS_PER_US)
        return self._last_ns

    def tell(self, event: Any, process: str = "", /, **named: Any) -> None:
        """Write an event of this kind, now."""
        self.events.append(event(at_ns=self.now_ns(), process=process, **named))

    def fault(self, kind: str, target: str, phase: Phase) -> None:
        """A fault begins or ends."""
        self.tell(Fault, kind=kind, target=target, phase=phase)

    def on_accepted(self, process: Process, frame: bytes, answer: SendAnswer) -> None:
        """A sender heard that its messages are durable."""
        parsed = parse_message_frame(frame)
        places = {place.subject: place for place in answer.places}
        for run, first in _runs(parsed):
            place = places.get(run.subject)
            is_placed = not answer.duplicates and place is not None and place.count == run.count
            for index in range(run.count):
                message_id = parsed.message_ids()[first + index]
                self.rows.accepted.add(message_id)
                sequence = SEQUENCE_UNKNOWN
                if is_placed and place is not None:
                    sequence = place.first_sequence + index
                self.tell(
                    Accepted,
                    process.name,
                    message_id=format_message_id(message_id),
                    subject=run.subject,
                    sequence=sequence,
                )

    @contextmanager
    def settling(self, process: Process, request: PullRequest | SettleRequest) -> Iterator[Told]:
        """While a consumer tells outcomes and waits for the answer, which he puts in here."""
        self._tell_given_back(process, request)
        began_ns, told = self.now_ns(), Told()
        try:
            yield told
        finally:
            for settlement in request.settlements:
                kind: type[Acked | AckUnknown] = AckUnknown
                acks = list(settlement.acks)
                if told.stale is not None:
                    kind, acks = Acked, _taken(settlement, told.stale)
                for message_id, attempt in self._named(request, settlement.token, acks):
                    self.tell(
                        kind,
                        process.name,
                        group=group_of(request),
                        consumer=request.consumer,
                        message_id=message_id,
                        attempt=attempt,
                        began_ns=began_ns,
                    )

    def _tell_given_back(self, process: Process, request: PullRequest | SettleRequest) -> None:
        for settlement in request.settlements:
            given_back = [nack.range for nack in settlement.nacks]
            given_back += [reject.range for reject in settlement.rejects]
            for message_id, attempt in self._named(request, settlement.token, given_back):
                self.tell(
                    Nacked,
                    process.name,
                    group=group_of(request),
                    consumer=request.consumer,
                    message_id=message_id,
                    attempt=attempt,
                )

    def on_hand_out(self, request: PullRequest, given: HandOut) -> None:
        """The broker lets a consumer have messages, who may never hear of it."""
        now_ns, head = self.now_ns(), given.head
        for pull_sequence in range(
            head.first_pull_sequence, head.first_pull_sequence + len(given.records)
        ):
            self._given_ns[group_of(request), request.consumer, head.token, pull_sequence] = now_ns

    def on_delivered(self, process: Process, request: PullRequest, deliveries: Deliveries) -> None:
        """A consumer holds messages: since the broker gave them, as leases are counted."""
        for one in deliveries.messages:
            record = decode_record(request.subject, one.record)
            message_id = format_message_id(record.message_id)
            name = (group_of(request), request.consumer, deliveries.head.token, one.pull_sequence)
            self._seen[name] = (message_id, one.attempt)
            event = Delivered(
                at_ns=self._given_ns[name],
                process=process.name,
                group=group_of(request),
                consumer=request.consumer,
                message_id=message_id,
                subject=request.subject,
                attempt=one.attempt,
                body_hash=hash_of(record),
                sequence=one.sequence,
            )
            self.events.append(event)

    def _named(
        self,
        request: PullRequest | SettleRequest,
        token: int,
        ranges: Sequence[tuple[int, int]],
    ) -> list[tuple[str, int]]:
        return [
            self._seen[group_of(request), request.consumer, token, one]
            for first, after in ranges
            for one in range(first, after)
        ]


def _taken(settlement: Settlement, stale: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """The acks of these that the broker did not refuse, one by one."""
    refused = {
        (token, pull_sequence)
        for token, first, after in stale
        for pull_sequence in range(first, after)
    }
    return [
        (one, one + 1)
        for first, after in settlement.acks
        for one in range(first, after)
        if (settlement.token, one) not in refused
    ]


def hash_of(record: Record) -> str:
    """What a handler must see of a record."""
    return body_hash(record.body, dict(record.headers))


def as_lines(events: Sequence[AnyEvent]) -> bytes:
    """The history as JSON lines, with the name of each process."""
    return b"\n".join(
        msgspec.json.encode({"process": event.process, **msgspec.to_builtins(event)})
        for event in events
    )


def _runs(parsed: Any) -> list[tuple[Any, int]]:
    runs, first = [], 0
    for run in parsed.runs:
        runs.append((run, first))
        first += run.count
    return runs
