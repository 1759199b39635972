"""A broker's store under attack: what was promised, and the check that a crash kept it.

`World` drives one store on a recording disk and writes down, beside each operation of the disk, what
had been submitted and what had been acknowledged by then. `check` opens a crash state and compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from qmq_broker.options import StoreOptions
from qmq_broker.storage.actions import Acked, Action
from qmq_broker.storage.store import Placed, Store
from qmq_client.wire.errors import QmqError
from qmq_client.wire.frame import MessageFrame, build_message_frame, parse_message_frame
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import Record, encode_record
from qmq_client.wire.requests import SubjectPlace
from tests.crash.recording_disk import Image, PassingDisk, RecordingDisk

#: Small, so that a handful of messages rolls segments, fills queue files and writes checkpoints.
OPTIONS = StoreOptions(
    segment_bytes=2048,
    action_segment_bytes=1024,
    growth_bytes=512,
    queue_entries_per_file=4,
    reserve_bytes=0,
    checkpoint_ms=1_000,
    queue_flush_bytes=1_500,
)


#: The same for lives that give up old segments: few ids are remembered, so that they may go.
RETAINING = replace(OPTIONS, dedupe_ids=6)


class FakeClock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.wall_ms = 1_700_000_000_000
        self.steady_s = 1_000.0

    def now_ms(self) -> int:
        return self.wall_ms

    def monotonic_s(self) -> float:
        return self.steady_s

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing in the storage waits")

    def pass_ms(self, ms: int) -> None:
        """Let time pass on both clocks."""
        self.wall_ms += ms
        self.steady_s += ms / 1000


class BrokenPromiseError(AssertionError):
    """A promise was broken."""


@dataclass(slots=True, kw_only=True)
class Sent:
    """One frame that was appended and stored something."""

    frame: MessageFrame
    #: Operations before its append began, and before its acknowledgement.
    submitted_at: int
    placed: Placed
    acknowledged_at: int | None = None

    def is_acknowledged(self, count: int) -> bool:
        """Whether its sender had been answered after `count` operations."""
        return self.acknowledged_at is not None and self.acknowledged_at <= count


@dataclass(slots=True, kw_only=True)
class History:
    """What happened in the lives before a crash."""

    options: StoreOptions = OPTIONS
    sent: list[Sent] = field(default_factory=list)
    #: Each action with the operations before it was written, and before it was synced.
    actions: list[tuple[Action, int]] = field(default_factory=list)
    #: Number of actions that were synced, with the operations before that.
    synced_actions: list[tuple[int, int]] = field(default_factory=list)
    #: Epochs that callers saw, with the operations before that.
    epochs: list[tuple[int, int]] = field(default_factory=list)
    #: Below which offset segments were given up at most, with the operations before that.
    given_up: list[tuple[int, int]] = field(default_factory=list)

    def mark(self) -> tuple[int, ...]:
        """Equal for equal knowledge of one life."""
        return (
            len(self.sent),
            sum(one.acknowledged_at is not None for one in self.sent),
            len(self.actions),
            max((count for count, _ in self.synced_actions), default=0),
            len(self.epochs),
            len(self.given_up),
        )

    def up_to(self, count: int) -> History:
        """What was known after `count` operations, at most; times become 0."""
        return History(
            options=self.options,
            given_up=[(offset, 0) for offset, at in self.given_up if at <= count],
            sent=[
                Sent(
                    frame=one.frame,
                    submitted_at=0,
                    placed=one.placed,
                    acknowledged_at=0 if one.is_acknowledged(count) else None,
                )
                for one in self.sent
                if one.submitted_at <= count
            ],
            actions=[(action, 0) for action, written_at in self.actions if written_at <= count],
            synced_actions=[(n, 0) for n, at in self.synced_actions if at <= count],
            epochs=[(epoch, 0) for epoch, at in self.epochs if at <= count],
        )


class World:
    """One life of a store."""

    def __init__(
        self,
        disk: RecordingDisk,
        *,
        history: History | None = None,
        ids: MessageIds | None = None,
        options: StoreOptions = OPTIONS,
        clock: FakeClock | None = None,
    ) -> None:
        self.disk = disk
        self.history = History(options=options) if history is None else history
        self.options = self.history.options
        self.ids = MessageIds(7) if ids is None else ids
        self.clock = FakeClock() if clock is None else clock
        self.store = Store.open(disk, self.clock, self.history.options)
        self.history.epochs.append((self.store.epoch, self._now))

    @property
    def _now(self) -> int:
        return len(self.disk.operations)

    def frame(self, **bodies: int | Sequence[int]) -> MessageFrame:
        """A frame of new messages: subject → lengths of bodies."""
        return make_frame(self.ids, bodies)

    def append(self, *frames: MessageFrame) -> list[Placed]:
        """Hand frames over; nothing is acknowledged."""
        submitted_at = self._now
        visible = self.visible()
        placed = self.store.append(frames)
        if self.visible() != visible:
            raise BrokenPromiseError("B2: appended messages are visible before their sync")
        for frame, place in zip(frames, placed, strict=True):
            if place.conflict is None and place.duplicates < frame.header.record_count:
                self.history.sent.append(Sent(frame=frame, submitted_at=submitted_at, placed=place))
        return placed

    def sync(self) -> None:
        """Make it durable, then acknowledge."""
        self.store.sync()
        self.acknowledge()

    def acknowledge(self) -> None:
        """Answer everything that waits."""
        for one in self.history.sent:
            if one.acknowledged_at is None:
                one.acknowledged_at = self._now

    def send(self, *frames: MessageFrame) -> list[Placed]:
        """One group commit."""
        placed = self.append(*frames)
        self.sync()
        return placed

    def give_up(self) -> int:
        """Let go of everything old; returns how many bytes that was."""
        offset = self.store.written_offset
        self.history.given_up.append((offset, self._now))
        return self.store.give_up_below(offset)

    def act(self, count: int = 1) -> None:
        """Write actions."""
        first = len(self.history.actions)
        actions = [
            Acked(1, "orders", "billing", "one", n, n + 1) for n in range(first, first + count)
        ]
        written_at = self._now
        self.store.actions.append(actions)
        self.history.actions += [(action, written_at) for action in actions]

    def sync_actions(self) -> None:
        """Make the actions durable."""
        self.store.actions.sync()
        self.history.synced_actions.append((len(self.history.actions), self._now))

    def note_groups(self) -> None:
        """Write a snapshot; here the groups are simply the number of actions."""
        offset = self.store.actions.log.written_offset
        count = len(self.history.actions)
        self.store.actions.write_snapshot(offset, str(count).encode())
        self.history.synced_actions.append((count, self._now))

    def visible(self) -> dict[str, int]:
        """Visible messages of each subject."""
        return visible(self.store)


def make_frame(ids: MessageIds, bodies: dict[str, int | Sequence[int]]) -> MessageFrame:
    """A frame of new messages: subject → lengths of bodies."""
    records = {
        subject: [
            encode_record(
                Record(message_id=ids.next_id(), subject=subject, body=b"b" * n, born_at_ms=1)
            )
            for n in ([lengths] if isinstance(lengths, int) else lengths)
        ]
        for subject, lengths in bodies.items()
    }
    return parse_message_frame(build_message_frame(records))


def visible(store: Store) -> dict[str, int]:
    """Visible messages of each subject."""
    counts = {}
    for subject in store.subjects():
        queue = store.queue(subject)
        counts[subject] = queue.next_sequence if queue is not None else 0
    return counts


def check(image: Image, known: History, *, goes_on: bool = True) -> None:
    """Open a crash state and hold it to every promise; the image is used up.

    With `goes_on` it is also sent new messages and repeats, which costs a third more.
    """
    try:
        _check_all(PassingDisk(image), known, goes_on=goes_on)
    except QmqError as error:
        raise BrokenPromiseError(f"B3: the store does not open or read: {error!r}") from error


def _check_all(disk: RecordingDisk, known: History, *, goes_on: bool) -> None:
    store = Store.open(disk, FakeClock(), known.options)
    _check_epoch(store, known)
    if store.first_offset > max((offset for offset, _ in known.given_up), default=0):
        raise BrokenPromiseError(f"B12: the log begins at {store.first_offset}: {known.given_up}")
    survivors = check_messages(store, known.sent)
    _check_actions(store, known)
    if goes_on:
        _check_goes_on(store, known.sent, survivors)


def _check_epoch(store: Store, known: History) -> None:
    if any(store.epoch <= epoch for epoch, _ in known.epochs):
        raise BrokenPromiseError(f"C3: epoch {store.epoch} was used before: {known.epochs}")


def check_messages(store: Store, sent: Sequence[Sent]) -> int:
    """Returns how many of the frames survived: the first ones, each whole.

    Those that were given up count as survivors: their sequences are used for good.
    """
    acknowledged = sum(one.acknowledged_at is not None for one in sent)
    found = {subject: records_of(store, subject) for subject in store.subjects()}
    survivors, firsts = _given_up(store, sent)
    for subject in store.subjects():
        queue = store.queue(subject)
        if queue is None or queue.first_sequence != firsts.get(subject, 0):
            raise BrokenPromiseError(f"B8: {subject} does not begin at {firsts.get(subject, 0)}")
    given_up = survivors
    expected: dict[str, list[bytes]] = {subject: [] for subject in firsts}
    while True:
        if found == expected and survivors >= acknowledged:
            break
        if survivors == len(sent):
            raise BrokenPromiseError(_difference(found, expected, acknowledged, len(sent)))
        for subject, record in sent[survivors].frame.records():
            expected.setdefault(subject, []).append(record)
        survivors += 1
    for one in sent[given_up:survivors]:
        _check_places(store, one)
    return survivors


def _given_up(store: Store, sent: Sequence[Sent]) -> tuple[int, dict[str, int]]:
    """How many frames stand below the log's beginning, and how many records of each subject."""
    firsts: dict[str, int] = {}
    count = 0
    for one in sent:
        if one.placed.physical_offset >= store.first_offset:
            break
        for run in one.frame.runs:
            firsts[run.subject] = firsts.get(run.subject, 0) + run.count
        count += 1
    return count, firsts


def _check_places(store: Store, one: Sent) -> None:
    offsets = [one.placed.physical_offset + position for position in one.frame.positions]
    found = []
    for place in one.placed.places:
        queue = store.queue(place.subject)
        if queue is None:
            raise BrokenPromiseError(f"B8: queue of {place.subject} is gone")
        entries = queue.entries(place.first_sequence, place.count)
        found += [entry.physical_offset for entry in entries]
    if found != offsets:
        raise BrokenPromiseError(f"B8: places moved from {offsets} to {found}")


def replayed(store: Store) -> tuple[int, list[Action]]:
    """How many actions the snapshot holds, and those that follow it."""
    return int(store.actions.snapshot or b"0"), list(store.actions.replay())


def _check_actions(store: Store, known: History) -> None:
    noted, rest = replayed(store)
    count = noted + len(rest)
    written = [action for action, _ in known.actions]
    synced = max((n for n, _ in known.synced_actions), default=0)
    if rest != written[noted:count] or count < synced:
        raise BrokenPromiseError(
            f"actions: {noted} noted, {len(rest)} replayed, {synced} synced, {len(written)} written"
        )


def _check_goes_on(store: Store, sent: Sequence[Sent], survivors: int) -> None:
    """New messages are taken, what survived is known as stored, what did not is stored once."""
    before = sum(visible(store).values())
    new = make_frame(MessageIds(99), {"orders": 10, "after": 20})
    repeats = list(sent[max(0, survivors - 1) : survivors + 1])
    placed = store.append([new, *(one.frame for one in repeats)])
    store.sync()
    expected = before + 2
    for one, place in zip(repeats, placed[1:], strict=True):
        records = one.frame.header.record_count
        has_survived = one in sent[:survivors]
        if place.duplicates != (records if has_survived else 0):
            raise BrokenPromiseError(f"B7: {place.duplicates} of {records} repeats were known")
        if has_survived and place.places != one.placed.places:
            raise BrokenPromiseError(f"B7: a repeat is answered with {place.places}")
        expected += 0 if has_survived else records
    if sum(visible(store).values()) != expected:
        raise BrokenPromiseError(f"B3: {expected} messages expected, {visible(store)}")
    for frame, place in zip([new, *(one.frame for one in repeats)], placed, strict=True):
        found = [record for part in place.places for record in records_at(store, part)]
        if found != [record for _, record in frame.records()]:
            raise BrokenPromiseError("B3: what was sent after the crash is not read back")


def records_of(store: Store, subject: str) -> list[bytes]:
    """All visible records of a subject, read back and verified."""
    queue = store.queue(subject)
    if queue is None:
        return []
    entries = queue.entries(0, queue.next_sequence)
    if len(entries) != queue.next_sequence - queue.first_sequence:
        raise BrokenPromiseError(
            f"B8: {len(entries)} entries of {queue.next_sequence} in {subject}"
        )
    return store.read_records(entries, subject=subject)


def records_at(store: Store, place: SubjectPlace) -> list[bytes]:
    """The records of one place."""
    queue = store.queue(place.subject)
    entries = [] if queue is None else queue.entries(place.first_sequence, place.count)
    return store.read_records(entries, subject=place.subject)


def _difference(
    found: dict[str, list[bytes]], expected: dict[str, list[bytes]], acknowledged: int, sent: int
) -> str:
    counts = {
        subject: (len(found.get(subject, [])), len(expected.get(subject, [])))
        for subject in found.keys() | expected.keys()
    }
    return (
        f"B3: what is there is no run of the first frames with all {acknowledged} acknowledged ones "
        f"of {sent}; found and sent by subject: {counts}"
    )
