"""Delayed messages under attack: lives with copies, releases, cancellations and cleaning, and the check.

A life drives the real releases over a real store on a recording disk and notes beside each operation
what had been answered. `check_delayed` opens a crash state, lets all time pass, and wants every accepted
message once, no cancelled one, and nothing before its time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from qmq_broker.service.delay.query import DelayQuery
from qmq_broker.service.delay.releasing import Releaser
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.service.writer import CommitWriter
from qmq_broker.storage.schedule.cancelled import Cancelled
from qmq_broker.storage.schedule.columns import DelayedMessage
from qmq_broker.storage.schedule.states import DelayedState
from qmq_broker.storage.store import Store
from qmq_client.wire.errors import QmqError
from qmq_client.wire.frame import FrameKind, build_message_frame, parse_message_frame
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import Record, decode_record, encode_record
from tests.crash.image import Image
from tests.crash.recording_disk import PassingDisk, RecordingDisk
from tests.crash.world import RETAINING, BrokenPromiseError, records_of
from tests.kit.clock import FakeClock

MINUTE_MS = 60_000
OPTIONS = replace(RETAINING, bucket_ms=5 * MINUTE_MS, bucket_grace_ms=0)
SUBJECT = "later"
START_MS = FakeClock().wall_ms
#: Everything in these lives is due by then.
END_MS = START_MS + 24 * 60 * MINUTE_MS
LIMITS = ServiceLimits(delayed_loaded=8)


@dataclass(slots=True, kw_only=True)
class Note:
    """One message and what its sender was told, with the operations before that."""

    due_at_ms: int
    submitted_at: int
    accepted_at: int | None = None
    #: New due times that were asked for, and those that were answered.
    moved: list[tuple[int, int]] = field(default_factory=list)
    moving_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    #: Seen in its queue, whose oldest messages may go from then on.
    released_at: int | None = None


class DelayLife:
    """One life of a store with delayed messages, or several one behind the other."""

    def __init__(self, disk: RecordingDisk, *, clock: FakeClock | None = None) -> None:
        self.disk = disk
        self.clock = FakeClock() if clock is None else clock
        self.notes: dict[bytes, Note] = {}
        #: The time up to which anything may have been released, with the operations before.
        self.times: list[tuple[int, int]] = []
        self.ids = MessageIds(7)
        self._number = 0
        self.open()

    @property
    def now(self) -> int:
        return len(self.disk.operations)

    def open(self) -> None:
        """Begin a life."""
        self.store = Store.open(self.disk, self.clock, OPTIONS)
        self.rig = Releases(self.store, self.clock)
        self.times.append((self.clock.wall_ms, self.now))

    def kill(self) -> None:
        """End it with the power on, and begin the next one."""
        self.disk.unlock()
        self.clock.pass_ms(1_000)
        self.open()

    def stop(self) -> None:
        """End it in order, and begin the next one."""
        self.store.close()
        self.open()

    def send(self, *minutes: float, body_bytes: int = 20) -> list[bytes]:
        """Accept messages that are due so many minutes from now."""
        bodies, records = [], []
        submitted_at = self.now
        for after in minutes:
            self._number += 1
            body = f"m{self._number}".encode().ljust(body_bytes, b".")
            due_at_ms = self.clock.wall_ms + round(after * MINUTE_MS)
            record = Record(
                message_id=self.ids.next_id(),
                subject=SUBJECT,
                body=body,
                born_at_ms=1,
                due_at_ms=due_at_ms,
            )
            records.append(encode_record(record))
            bodies.append(body)
            self.notes[body] = Note(due_at_ms=due_at_ms, submitted_at=submitted_at)
        frame = build_message_frame({SUBJECT: records}, kind=FrameKind.DELAYED)
        self.store.append([parse_message_frame(frame)])
        self.store.commit_and_step()
        for body in bodies:
            self.notes[body].accepted_at = self.now
        return bodies

    def pass_minutes(self, minutes: float) -> None:
        """Let time pass, and release what is due."""
        self.clock.pass_ms(round(minutes * MINUTE_MS))
        self.times.append((self.clock.wall_ms, self.now))
        self.rig.release()
        for body in _released(self.store):
            if self.notes[body].released_at is None:
                self.notes[body].released_at = self.now
        self.store.step()

    def cancel(self, body: bytes) -> None:
        """Take a message back."""
        place = self.rig.place_of(body)
        self.notes[body].cancelling_at = self.now
        (state,) = self.store.cancel([place])
        if state is DelayedState.CANCELLED:
            self.notes[body].cancelled_at = self.now

    def move(self, body: bytes, minutes: float) -> None:
        """Put a message off to so many minutes from now."""
        due_at_ms = self.clock.wall_ms + round(minutes * MINUTE_MS)
        self.notes[body].moving_at = self.now
        frame = self.rig.query.rescheduled_frame(self.rig.message(body), due_at_ms)
        self.store.append([frame])
        self.store.commit_and_step()
        self.notes[body].moved.append((due_at_ms, self.now))

    def give_up(self) -> int:
        """Let old segments go."""
        return self.store.give_up_below(self.store.written_offset)


class Releases:
    """The releases of one store, without threads."""

    def __init__(self, store: Store, clock: FakeClock) -> None:
        self._store = store
        self._posted: list[Callable[[], None]] = []
        self._writer = CommitWriter(
            store,
            clock,
            LIMITS,
            post=self._posted.append,
            on_visible=lambda _: None,
            on_poisoned=self._fail,
        )
        self.releaser = Releaser(
            store.schedule,
            self._writer,
            clock,
            LIMITS,
            post=self._posted.append,
            refusals=store.refusals,
        )
        self.query = DelayQuery(store.schedule, self.releaser, clock)
        self.releaser.begin()

    def release(self) -> None:
        """Everything that is due."""
        idle = 0
        while idle < 2:
            before = self.releaser.counts.released, self.releaser.near.loaded
            self.releaser.step()
            self._run()
            self._writer.step()
            self._run()
            is_idle = before == (self.releaser.counts.released, self.releaser.near.loaded)
            idle = idle + 1 if is_idle and not self.releaser.is_busy else 0

    def message(self, body: bytes) -> DelayedMessage:
        """The newest place of a pending message."""
        for row in self.query.listed(None, 0, 2**63, 1_000):
            found = self.query.find(bytes.fromhex(row.message_id))[-1].message
            if decode_record(SUBJECT, self.query.record(found)).body == body:
                return found
        raise BrokenPromiseError(f"D3: {body!r} is not pending")

    def place_of(self, body: bytes) -> Cancelled:
        """The same as a cancellation names it."""
        found = self.message(body)
        return Cancelled(
            found.bucket, found.sequence, found.source, found.subject, found.message_id
        )

    def _run(self) -> None:
        posted, self._posted[:] = list(self._posted), []
        for call in posted:
            call()

    def _fail(self, reason: str) -> None:
        raise BrokenPromiseError(f"D3: the writer is poisoned: {reason}")


def check_delayed(image: Image, life: DelayLife, count: int) -> None:
    """Open a crash state of `count` operations into the life and hold it to D1, D3 and D4."""
    try:
        _check(image, life, count)
    except QmqError as error:
        raise BrokenPromiseError(f"D3: the store does not open or release: {error!r}") from error


def _check(image: Image, life: DelayLife, count: int) -> None:
    disk = PassingDisk(image)
    clock = FakeClock()
    clock.wall_ms = START_MS
    store = Store.open(disk, clock, OPTIONS)
    before = _released(store)
    latest_ms = max([START_MS, *(time_ms for time_ms, at in life.times if at <= count)])
    early = [body for body in before if _earliest_ms(life.notes[body]) > latest_ms]
    if early:
        raise BrokenPromiseError(f"D1: {early} were released before {latest_ms}")
    clock.wall_ms = END_MS
    for attempt in range(2):
        Releases(store, clock).release()
        queue = store.queue(SUBJECT)
        given_up = 0 if queue is None else queue.first_sequence
        _check_all_there(_released(store), given_up, life, count)
        if attempt == 0:
            disk.unlock()
            store = Store.open(disk, clock, OPTIONS)


def _earliest_ms(note: Note) -> int:
    return min([note.due_at_ms, *(due_at_ms for due_at_ms, _ in note.moved)])


def _released(store: Store) -> list[bytes]:
    records = records_of(store, SUBJECT)
    return [decode_record(SUBJECT, record).body for record in records]


def _check_all_there(found: list[bytes], given_up: int, life: DelayLife, count: int) -> None:
    if len(set(found)) != len(found):
        twice = sorted({body for body in found if found.count(body) > 1})
        raise BrokenPromiseError(f"D3: released twice: {twice}")
    for body, note in life.notes.items():
        is_accepted = note.accepted_at is not None and note.accepted_at <= count
        is_cancelled = note.cancelled_at is not None and note.cancelled_at <= count
        may_be_cancelled = note.cancelling_at is not None and note.cancelling_at <= count
        if is_cancelled and body in found:
            raise BrokenPromiseError(f"D4: {body!r} was cancelled and is released")
        if is_accepted and body not in found and not may_be_cancelled:
            if note.released_at is None or note.released_at > count or not given_up:
                raise BrokenPromiseError(f"D3: {body!r} was accepted and is lost")
            given_up -= 1
        if body in found and note.submitted_at > count:
            raise BrokenPromiseError(f"D3: {body!r} was not sent yet")
