"""A broker's service on a real store, with a clock that the test moves and no threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet

from qmq_broker.options import StoreOptions
from qmq_broker.service.broker import Broker, BrokerSettings
from qmq_broker.service.delivery.delivery import HandOut
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.files.os_file import OsFile
from qmq_broker.storage.store import Placed, Store
from qmq_client.wire.frame import build_message_frame
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import Record, decode_record, encode_record
from qmq_client.wire.requests import (
    Extend,
    Nack,
    PullRequest,
    Reject,
    SettleAnswer,
    Settlement,
    SettleRequest,
)
from tests.kit.clock import FakeClock

SUBJECT = "orders"
GROUP = "billing"
STORE = StoreOptions(segment_bytes=16 * 1024 * 1024, reserve_bytes=0)


def make_frame(
    bodies: list[bytes],
    *,
    subject: str = SUBJECT,
    ids: Iterator[bytes] | None = None,
    **fields: Any,
) -> bytes:
    """A message frame of one subject; `fields` are those of every record."""
    ids = new_ids() if ids is None else ids
    given = {"subject": subject, "born_at_ms": 1, **fields}
    records = [encode_record(Record(message_id=next(ids), body=body, **given)) for body in bodies]
    return build_message_frame({subject: records})


def new_ids(instance: int | None = None) -> Iterator[bytes]:
    """Endless message ids of a producer of its own."""
    source = MessageIds(next(_INSTANCES) if instance is None else instance)
    while True:
        yield source.next_id()


#: Far from the small numbers that tests name.
_INSTANCES = itertools.count(1_000_000)


class Rig:
    """One broker that can be stopped, killed and started again on its directory."""

    def __init__(
        self,
        directory: Path,
        *,
        limits: ServiceLimits | None = None,
        store_options: StoreOptions = STORE,
        draw: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.directory = directory
        self.clock = FakeClock()
        self.posted: list[Callable[[], None]] = []
        self._limits = limits or ServiceLimits()
        self._store_options = store_options
        self._draw = draw
        self.store: Store
        self.broker: Broker
        self.start()

    def start(self) -> None:
        """Open the store and rebuild the groups; no thread is started."""
        self._disk = _Files(str(self.directory))
        self.store = Store.open(self._disk, self.clock, self._store_options)
        self.broker = Broker(
            self.store,
            self.clock,
            BrokerSettings(limits=self._limits, store=self._store_options),
            post=self.posted.append,
            draw=self._draw,
        )
        self.broker.delivery.start(self.now_ms)

    def restart(self) -> None:
        """Stop in order and start again."""
        self.close()
        self.start()

    def close(self) -> None:
        """Stop in order."""
        self.store.close()
        self._disk.close()

    def kill(self) -> None:
        """End as a killed process does: nothing is done any more, and the directory is free."""
        self.store._lock.release()
        self._disk.end()

    @property
    def now_ms(self) -> int:
        """The time by which the broker delivers."""
        return self.broker.time.now_ms()

    def pass_ms(self, ms: int) -> None:
        """Let time pass, and do what the broker does by time."""
        self.clock.pass_ms(ms)
        while self.broker.delivery.step(self.now_ms).is_unfinished:
            pass

    def run_posted(self) -> None:
        """Run what was handed to the loop."""
        posted, self.posted[:] = list(self.posted), []
        for call in posted:
            call()

    def submit(self, frame: bytes) -> list[Placed | Exception]:
        """Hand in one request; the list gets its outcome when it is committed."""
        outcomes: list[Placed | Exception] = []
        self.broker.send(frame, outcomes.append)
        return outcomes

    def send(self, *bodies: bytes, subject: str = SUBJECT, **fields: Any) -> Placed:
        """Send messages and wait until they are durable; `fields` are those of each record."""
        outcomes = self.submit(make_frame(list(bodies), subject=subject, **fields))
        self.broker.writer.step()
        self.run_posted()
        (outcome,) = outcomes
        assert isinstance(outcome, Placed), outcome
        return outcome

    def pull(self, consumer: str = "one", **changes: Any) -> Given:
        """Pull once without waiting."""
        given: dict[str, Any] = {
            "subject": SUBJECT,
            "group": GROUP,
            "consumer": consumer,
            **changes,
        }
        request = PullRequest(**given)
        delivery = self.broker.delivery
        stale = delivery.begin_pull(request, self.now_ms)
        answer = delivery.pull(request, self.now_ms, stale)
        return Given(delivery.nothing(request, stale) if answer is None else answer)

    def settle(self, settlement: Settlement, consumer: str = "one", **changes: Any) -> SettleAnswer:
        """Report outcomes."""
        given: dict[str, Any] = {
            "subject": SUBJECT,
            "group": GROUP,
            "consumer": consumer,
            **changes,
        }
        request = SettleRequest(settlements=(settlement,), **given)
        return self.broker.delivery.settle(request, self.now_ms)


class _Files(OsDisk):
    """Knows its open files, which the system closes when it ends a process."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self._files: WeakSet[OsFile] = WeakSet()

    def open(self, path: str, *, is_new: bool = False) -> OsFile:
        file = super().open(path, is_new=is_new)
        self._files.add(file)
        return file

    def end(self) -> None:
        for file in list(self._files):
            file.close()
        self.close()


class Given:
    """What a pull gave, with shorthands for settlements of all of it or a part."""

    def __init__(self, answer: HandOut) -> None:
        self.head = answer.head
        self.records = answer.records
        self.token = answer.head.token
        self.first = answer.head.first_pull_sequence
        self.next = self.first + len(answer.records)

    @property
    def bodies(self) -> list[bytes]:
        """Bodies in order; each record's checksum is verified."""
        return [decode_record(self.head.subject, record).body for record in self.records]

    @property
    def attempts(self) -> list[int]:
        """For each message, which delivery this is."""
        return [run.attempt for run in self.head.runs for _ in range(run.count)]

    @property
    def sequences(self) -> list[int]:
        """For each message, its sequence."""
        return [run.first_sequence + index for run in self.head.runs for index in range(run.count)]

    def part(self, index: int, count: int = 1) -> tuple[int, int]:
        """The range of pull sequences of some of the messages."""
        return self.first + index, self.first + index + count

    def ack(self, *parts: tuple[int, int]) -> Settlement:
        return Settlement(token=self.token, acks=parts or ((self.first, self.next),))

    def nack(self, delay_ms: int | None = None, error: str = "") -> Settlement:
        nack = Nack(range=(self.first, self.next), delay_ms=delay_ms, error=error)
        return Settlement(token=self.token, nacks=(nack,))

    def nack_untried(self, delay_ms: int | None = 0, error: str = "stopped") -> Settlement:
        span = (self.first, self.next)
        nack = Nack(range=span, delay_ms=delay_ms, error=error, was_begun=False)
        return Settlement(token=self.token, nacks=(nack,))

    def reject(self, reason: str = "") -> Settlement:
        reject = Reject(range=(self.first, self.next), reason=reason)
        return Settlement(token=self.token, rejects=(reject,))

    def extend(self, lease_ms: int) -> Settlement:
        extend = Extend(range=(self.first, self.next), lease_ms=lease_ms)
        return Settlement(token=self.token, extends=(extend,))
