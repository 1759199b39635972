"""One scripted life of a broker process over HTTP, and the look at what is left of it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.store import Store
from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.errors import QmqError
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.frame import build_message_frame, parse_message_frame
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import Record, encode_record
from tests.contract.asking import acks, pull, settle
from tests.faults.store_serve import STORE
from tests.kit.broker_process import BrokerProcess

SERVE = ("-m", "tests.faults.store_serve")
SUBJECTS = ("orders", "Invoices")


class StoreProcess(BrokerProcess):
    """The broker of `store_serve.py`, or another one, perhaps under a tracer."""

    def __init__(
        self, data: Path, *more: str, under: Sequence[str] = (), command: Sequence[str] = SERVE
    ) -> None:
        super().__init__(data, *more, command=command, under=under)

    @property
    def pid(self) -> int:
        """Of the broker, also when it runs under another program."""
        found = re.search(r" listening .*\bpid=([0-9]+)", self.log)
        assert found is not None, self.log
        return int(found[1])

    def starts(self) -> bool:
        """Start it; false when it ends instead."""
        try:
            self.start()
        except AssertionError as error:
            if "ended without" not in str(error):
                raise
            return False
        return True

    def clean_up(self) -> None:
        """End what still runs; a tracer that is killed would leave the broker behind."""
        if self._process.poll() is None and " listening " in self.log:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        super().clean_up()

    def stop(self) -> int:
        """SIGTERM, unless it has ended by itself; returns the exit code."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        return self.wait()


@dataclass(slots=True)
class Sent:
    """What producers were told."""

    #: Frames in the order of their sending: subject → records.
    frames: list[dict[str, list[bytes]]] = field(default_factory=list)
    #: How many of them, each, were answered.
    accepted: list[int] = field(default_factory=list)
    errors: list[QmqError] = field(default_factory=list)

    def send(self, transport: HttpTransport, frame: dict[str, list[bytes]]) -> bool:
        """Send once; whether it was accepted."""
        self.frames.append(frame)
        try:
            transport.send(build_message_frame(frame))
        except QmqError as error:
            self.errors.append(error)
            return False
        self.accepted.append(len(self.frames) - 1)
        return True


def frame_of(ids: MessageIds, length: int) -> dict[str, list[bytes]]:
    """One record for each subject."""
    return {
        subject: [
            encode_record(
                Record(
                    message_id=ids.next_id(),
                    subject=subject,
                    body=b"b" * length,
                    born_at_ms=1,
                    key="k",
                )
            )
        ]
        for subject in SUBJECTS
    }


def live(transport: HttpTransport, *, sends: int, ids: MessageIds) -> Sent:
    """Send, pull and acknowledge in turn; ends early when the broker does not answer any more."""
    sent = Sent()
    for number in range(sends):
        sent.send(transport, frame_of(ids, 200 + 97 * (number % 17)))
        try:
            for subject in SUBJECTS:
                given = pull(transport, subject, max_messages=4)
                if given.messages:
                    settle(transport, subject, acks(given))
        except QmqError as error:
            sent.errors.append(error)
        if len(sent.errors) > 5:
            break
    return sent


def check_survivors(data: Path, sent: Sent) -> None:
    """Open what is left: accepted frames whole and in order, others whole or absent, and it goes on."""
    disk = OsDisk(str(data))
    store = Store.open(disk, SYSTEM_CLOCK, STORE)
    try:
        found = {subject: _records(store, subject) for subject in store.subjects()}
        for subject in SUBJECTS:
            _check_subject(subject, found.get(subject, []), sent, store.first_offset)
        if not store.first_offset:
            _check_wholeness(found, sent)
        _check_goes_on(store, frame_of(MessageIds(99), 50))
    finally:
        store.close()
        disk.close()


def _check_subject(subject: str, found: list[bytes], sent: Sent, first_offset: int) -> None:
    known = [record for frame in sent.frames for record in frame[subject]]
    assert set(found) <= set(known), "something was read that nobody sent"
    assert found == [record for record in known if record in set(found)], "not in order, or twice"
    accepted = [record for n in sent.accepted for record in sent.frames[n][subject]]
    missing = [record for record in accepted if record not in set(found)]
    assert missing == accepted[: len(missing)], "accepted and lost"
    assert first_offset or not missing, "accepted and lost"


def _check_wholeness(found: dict[str, list[bytes]], sent: Sent) -> None:
    there = {record for records in found.values() for record in records}
    for frame in sent.frames:
        present = [record in there for records in frame.values() for record in records]
        assert all(present) or not any(present), "half a frame"


def _records(store: Store, subject: str) -> list[bytes]:
    queue = store.queue(subject)
    assert queue is not None
    entries = queue.entries(queue.first_sequence, queue.next_sequence)
    assert len(entries) == queue.next_sequence - queue.first_sequence
    return store.read_records(entries, subject=subject)


def _check_goes_on(store: Store, frame: dict[str, list[bytes]]) -> None:
    store.append([parse_message_frame(build_message_frame(frame))])
    store.commit_and_step()
    for subject, records in frame.items():
        assert _records(store, subject)[-len(records) :] == records
