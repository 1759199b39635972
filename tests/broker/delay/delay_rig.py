"""A broker that releases delayed messages, with a clock that the test moves and no threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self

from qmq_broker.options import StoreOptions
from qmq_broker.service.delay.rows import Pending, Rows
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.storage.schedule.cancelled import Cancelled
from qmq_broker.storage.schedule.columns import DelayedMessage
from qmq_broker.storage.schedule.states import DelayedState
from qmq_broker.storage.store import Placed
from qmq_client.wire.frame import FrameKind, build_message_frame
from qmq_client.wire.record import Record, decode_record, encode_record
from tests.broker.service.rig import STORE, SUBJECT, Rig, new_ids
from tests.kit.clock import FakeClock

__all__ = ["HOUR_MS", "DelayRig", "FakeClock", "delayed_frame", "pending_of"]

HOUR_MS = 3_600_000
MANY = 10_000
#: A segment of `FORGETFUL` holds some few of these.
LARGE = b"x" * 1_000
#: Segments go soon after the hour that they are kept, and what waits is copied before.
FORGETFUL: Final[dict[str, Any]] = {
    "segment_bytes": 4096,
    "growth_bytes": 1024,
    "retain_ms": HOUR_MS,
    "dedupe_ids": 1,
    "checkpoint_ms": 1,
    "queue_flush_bytes": 1,
}
#: Steps without anything done after which nothing more is to come.
IDLE_STEPS = 2


def delayed_frame(
    due: dict[bytes, int], *, subject: str = SUBJECT, ids: Iterator[bytes] | None = None
) -> bytes:
    """A frame of delayed messages: body → due time."""
    ids = new_ids() if ids is None else ids
    records = [
        encode_record(
            Record(
                message_id=next(ids),
                subject=subject,
                body=body,
                born_at_ms=1,
                due_at_ms=due_at_ms,
            )
        )
        for body, due_at_ms in due.items()
    ]
    return build_message_frame({subject: records}, kind=FrameKind.DELAYED)


class DelayRig(Rig):
    """One broker whose delayed messages are released when the test lets time pass."""

    def __init__(
        self, directory: Path, *, limits: ServiceLimits | None = None, **changes: object
    ) -> None:
        super().__init__(directory, limits=limits, store_options=self.options_of(changes))

    @staticmethod
    def options_of(changes: dict[str, Any]) -> StoreOptions:
        """The options of such a store, with these changes."""
        options = {name: getattr(STORE, name) for name in STORE.__slots__} | changes
        return StoreOptions(**options)

    @classmethod
    def forgetful(cls, directory: Path) -> Self:
        """One that keeps what it must and little more."""
        return cls(directory, **FORGETFUL)

    def start(self) -> None:
        """Open the store; what is overdue is looked at."""
        super().start()
        self.broker.delayed.releaser.begin()

    def send_delayed(self, due: dict[bytes, int], *, subject: str = SUBJECT) -> Placed:
        """Send messages that are due at these times, and wait until they are durable."""
        outcomes = self.submit(delayed_frame(due, subject=subject))
        self.commit()
        (outcome,) = outcomes
        assert isinstance(outcome, Placed), outcome
        return outcome

    def commit(self) -> None:
        """Let the writer commit what waits, and tell everybody."""
        self.run_posted()
        self.broker.writer.step()
        self.run_posted()

    def release(self) -> int:
        """Release everything that is due; how many messages that were."""
        releaser = self.broker.delayed.releaser
        before, idle = releaser.counts.released, 0
        while idle < IDLE_STEPS:
            progress = releaser.counts.released, releaser.near.loaded
            releaser.step()
            self.commit()
            is_idle = (
                progress == (releaser.counts.released, releaser.near.loaded)
                and not releaser.is_busy
            )
            idle = idle + 1 if is_idle else 0
        return releaser.counts.released - before

    def pass_and_release(self, ms: int) -> int:
        """Let time pass, and release what is due then."""
        self.clock.pass_ms(ms)
        return self.release()

    def let_segments_go(self, *, is_ordered: bool = False) -> None:
        """Let the retention take what nobody needs."""
        for _ in range(9):
            self.send(LARGE, key="other" if is_ordered else None)
            self.settle(self.pull(ordered=is_ordered).ack())
            self.pass_and_release(2 * HOUR_MS)
            self.broker.step()
            self.commit()
            self.commit()
        queue = self.store.queue(SUBJECT)
        assert queue is not None
        assert queue.first_sequence > 0

    def kill(self) -> None:
        """End without a clean stop and start again."""
        self.store._lock.release()
        self._disk.close()
        self.start()

    def find_all(self) -> list[DelayedMessage]:
        """Every pending message."""
        rows = self.broker.delayed.query.listed(None, 0, 2**63, MANY)
        found = [self.broker.delayed.query.find(bytes.fromhex(row.message_id))[-1] for row in rows]
        return [one.message for one in found if one.state is DelayedState.PENDING]

    def body(self, message: DelayedMessage) -> bytes:
        """Its body."""
        record = self.broker.delayed.query.record(message)
        return decode_record(message.subject, record).body

    def cancel(self, message: DelayedMessage) -> list[DelayedState | None]:
        """Cancel it, and wait for the answer."""
        outcomes: list[list[DelayedState | None] | Exception] = []
        place = Cancelled(
            message.bucket, message.sequence, message.source, message.subject, message.message_id
        )
        self.broker.delayed.changes.cancel([place], outcomes.append)
        self.commit()
        (outcome,) = outcomes
        assert isinstance(outcome, list), outcome
        return outcome

    def reschedule(self, message: DelayedMessage, due_at_ms: int) -> bool:
        """Put it off; whether it was still pending."""
        outcomes: list[Placed | Exception] = []
        frame = self.broker.delayed.query.rescheduled_frame(message, due_at_ms)
        self.broker.writer.submit(frame, outcomes.append)
        self.commit()
        (outcome,) = outcomes
        assert isinstance(outcome, Placed), outcome
        return outcome.physical_offset > 0

    def bodies(self, subject: str = SUBJECT) -> list[bytes]:
        """What is in the consume queue, in order."""
        queue = self.store.queue(subject)
        if queue is None:
            return []
        entries = queue.entries(0, queue.next_sequence)
        records = self.store.read_records(entries, subject=subject)
        return [decode_record(subject, record).body for record in records]


def pending_of(rows: Rows) -> list[Pending]:
    """Rows of the wheel as values."""
    return [Pending(*values) for values in zip(*rows.columns, strict=True)]
