"""Producers and a consumer at work on one broker that may go and come back, and what they saw."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections import deque
from typing import Final

from qmq_client.errors import QmqError
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.deliveries import Deliveries
from qmq_client.wire.frame import build_message_frame
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import Record, decode_record, encode_record, record_message_id
from tests.contract.asking import acks, pull, settle
from tests.kit.events import Accepted, Acked, AckUnknown, AnyEvent, Attempt, Delivered, Error
from tests.kit.history import body_hash
from tests.kit.waiting import wait_for

GROUP: Final = "billing"
CONSUMER: Final = "one"
#: What was handed out and never settled comes again after this long.
LEASE_MS: Final = 1_500
#: Between two tries while the broker is away.
PAUSE_S: Final = 0.02
RECORDS_PER_FRAME: Final = 3
DEADLINE_S: Final = 60.0


class Load:
    """One producer thread for each subject, one consumer thread for all; events from all of them."""

    def __init__(self, url: str, subjects: tuple[str, ...]) -> None:
        self._url = url
        self._subjects = subjects
        #: Appended by any thread; a deque takes that.
        self.events: deque[AnyEvent] = deque()
        self.accepted: set[bytes] = set()
        self._progress = threading.Condition()
        self._sending_ends = threading.Event()
        self._all_ends = threading.Event()
        self._producers = [
            threading.Thread(target=self._produce, args=(subject, number))
            for number, subject in enumerate(subjects, start=1)
        ]
        self._consumer = threading.Thread(target=self._consume)

    def start(self) -> None:
        for thread in (*self._producers, self._consumer):
            thread.start()

    def wait_for_accepted(self, more: int) -> None:
        """Until so many more messages were accepted."""
        wanted = len(self.accepted) + more
        with self._progress:
            assert self._progress.wait_for(lambda: len(self.accepted) >= wanted, DEADLINE_S)

    def finish(self) -> None:
        """No more messages; until the broker says that its groups have settled everything.

        What a consumer saw is not enough: the answer to its last acknowledgement may have been lost.
        """
        self._sending_ends.set()
        for thread in self._producers:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        wait_for(self._is_settled, "something is never settled", within_s=DEADLINE_S)
        self.stop()

    def _is_settled(self) -> bool:
        with urllib.request.urlopen(f"{self._url}/v1/groups", timeout=DEADLINE_S) as answer:
            groups = json.load(answer)["groups"]
        left = ("lag", "in_flight", "redelivery")
        return bool(groups) and not any(group[name] for group in groups for name in left)

    def stop(self) -> None:
        """End all threads."""
        self._sending_ends.set()
        self._all_ends.set()
        for thread in (*self._producers, self._consumer):
            thread.join(DEADLINE_S)

    def _produce(self, subject: str, number: int) -> None:
        transport = HttpTransport(self._url)
        ids = MessageIds(number)
        count = 0
        while not self._sending_ends.is_set():
            count += 1
            bodies = [f"{subject} {count}.{n}".encode() * 9 for n in range(RECORDS_PER_FRAME)]
            records = {ids.next_id(): body for body in bodies}
            self.events.extend(
                Attempt(message_id=one.hex(), subject=subject, body_hash=body_hash(body))
                for one, body in records.items()
            )
            self._send(transport, subject, records)
        transport.close()

    def _send(self, transport: HttpTransport, subject: str, records: dict[bytes, bytes]) -> None:
        """Until it is accepted, however often the broker goes meanwhile."""
        frame = build_message_frame(
            {
                subject: [
                    encode_record(Record(message_id=one, subject=subject, body=body, born_at_ms=1))
                    for one, body in records.items()
                ]
            }
        )
        while not self._all_ends.is_set():
            try:
                answer = transport.send(frame)
            except QmqError as error:
                self._note_error("send", error)
                continue
            sequence = answer.places[0].first_sequence
            self.events.extend(
                Accepted(message_id=one.hex(), subject=subject, sequence=sequence + n)
                for n, one in enumerate(records)
            )
            with self._progress:
                self.accepted.update(records)
                self._progress.notify_all()
            return

    def _consume(self) -> None:
        transport = HttpTransport(self._url)
        while not self._all_ends.is_set():
            for subject in self._subjects:
                try:
                    given = pull(
                        transport,
                        subject,
                        group=GROUP,
                        consumer=CONSUMER,
                        wait_ms=20,
                        lease_ms=LEASE_MS,
                    )
                except QmqError as error:
                    self._note_error("pull", error)
                    continue
                if given.messages:
                    self._handle(transport, subject, given)
        transport.close()

    def _handle(self, transport: HttpTransport, subject: str, given: Deliveries) -> None:
        ids = [record_message_id(one.record) for one in given.messages]
        self.events.extend(
            Delivered(
                message_id=message_id.hex(),
                subject=subject,
                attempt=one.attempt,
                sequence=one.sequence,
                body_hash=body_hash(decode_record(subject, one.record).body),
                group=GROUP,
                consumer=CONSUMER,
            )
            for message_id, one in zip(ids, given.messages, strict=True)
        )
        began_ns = time.monotonic_ns()
        try:
            answer = settle(transport, subject, acks(given), group=GROUP, consumer=CONSUMER)
        except QmqError as error:
            self._note_error("settle", error)
            kind: type[Acked | AckUnknown] = AckUnknown
        else:
            if answer.stale:
                return
            kind = Acked
        self.events.extend(
            kind(
                group=GROUP,
                consumer=CONSUMER,
                message_id=message_id.hex(),
                attempt=one.attempt,
                began_ns=began_ns,
            )
            for message_id, one in zip(ids, given.messages, strict=True)
        )

    def _note_error(self, operation: str, error: QmqError) -> None:
        self.events.append(Error(operation=operation, code=type(error).__name__, text=str(error)))
        self._all_ends.wait(PAUSE_S)
