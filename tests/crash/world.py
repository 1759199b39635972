"""A broker's store under attack, and what was promised meanwhile.

`World` drives one store on a recording disk and writes down, beside each operation of the disk, what
had been submitted and what had been acknowledged by then. `promises.py` opens a crash state and
compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from qmq_broker.errors import NoRoomError
from qmq_broker.options import StoreOptions
from qmq_broker.storage.files.keepers import Keeper
from qmq_broker.storage.files.snapshots import GroupsContent
from qmq_broker.storage.keepers import LogOffsets
from qmq_broker.storage.store import Placed, Store
from qmq_client.group.actions import Acked, Action
from qmq_client.wire.frame import MessageFrame, build_message_frame, parse_message_frame
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import Record, encode_record
from qmq_client.wire.requests import SubjectPlace
from tests.crash.recording_disk import RecordingDisk
from tests.kit.clock import FakeClock
from tests.kit.raw_page import RawPage

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


#: Those whom retention waits for in these lives.
KEEPERS = ("archive", "mirror")
#: A snapshot of these lives is shorter: with less room than this above the reserve, actions may go.
SNAPSHOT_BYTES_MAX = 512


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
    #: By the clock, when it was appended.
    stored_at_ms: int = 0

    def is_acknowledged(self, count: int) -> bool:
        """Whether its sender had been answered after `count` operations."""
        return self.acknowledged_at is not None and self.acknowledged_at <= count


@dataclass(slots=True, kw_only=True)
class Told:
    """What a keeper is once it is answered, by its own account; None when it is no more."""

    name: str
    keeper: Keeper | None
    submitted_at: int
    acknowledged_at: int | None = None

    def is_answered(self, count: int) -> bool:
        """Whether the keeper had been answered after `count` operations."""
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
    #: What keepers told, in order.
    told: list[Told] = field(default_factory=list)
    #: How far each log was given up at most without asking keepers, with the operations before that.
    forced: list[tuple[LogOffsets, int]] = field(default_factory=list)
    #: Where the newest snapshot of the groups ends.
    snapshot_offset: int = 0

    def mark(self) -> tuple[int, ...]:
        """Equal for equal knowledge of one life."""
        return (
            len(self.sent),
            sum(one.acknowledged_at is not None for one in self.sent),
            len(self.actions),
            max((count for count, _ in self.synced_actions), default=0),
            len(self.epochs),
            len(self.given_up),
            len(self.told),
            sum(one.acknowledged_at is not None for one in self.told),
            len(self.forced),
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
            told=[
                replace(one, submitted_at=0, acknowledged_at=0 if one.is_answered(count) else None)
                for one in self.told
                if one.submitted_at <= count
            ],
            forced=[(offsets, 0) for offsets, at in self.forced if at <= count],
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
        is_forced: bool = False,
    ) -> None:
        """Begin the life; a forced one asks no keeper what may go, from its opening on."""
        self.disk = disk
        self.history = History(options=options) if history is None else history
        self.options = replace(self.history.options, force_retention=is_forced)
        self.ids = MessageIds(7) if ids is None else ids
        self.clock = FakeClock() if clock is None else clock
        if is_forced:
            self._note_forced(actions=self.history.snapshot_offset)
        self.store = Store.open(disk, self.clock, self.options)
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
                self.history.sent.append(
                    Sent(
                        frame=frame,
                        submitted_at=submitted_at,
                        placed=place,
                        stored_at_ms=self.clock.now_ms(),
                    )
                )
        return placed

    def sync(self) -> None:
        """Make it durable, then acknowledge."""
        self.store.commit_and_step()
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
        if self.options.force_retention:
            self._note_forced(commit=offset)
        return self.store.give_up_below(offset)

    def keeper(self, name: str) -> Keeper | None:
        """What this keeper is, by its own account."""
        return next((one.keeper for one in reversed(self.history.told) if one.name == name), None)

    def keep(self, commit: int, actions: int = 0, *, name: str = KEEPERS[0]) -> None:
        """A keeper has everything below, but for what it did not find any more; at 0 it has nothing yet."""
        begins = LogOffsets(self.store.retention.coming_offset, self.store.actions.first_offset)
        at_ms, known = self.clock.now_ms(), self.keeper(name)
        if known is None:
            kept = LogOffsets(max(commit, begins.commit), max(actions, begins.actions))
            keeper = Keeper(name, *kept, at_ms, 0, 0, *begins)
        else:
            firsts = LogOffsets(known.first_offset, known.first_actions_offset)
            kept = LogOffsets(max(commit, firsts.commit), max(actions, firsts.actions))
            lost = known.lost_bytes + _skipped(known.kept_offset, kept.commit, begins.commit)
            lost_actions = known.lost_actions_bytes
            lost_actions += _skipped(known.kept_actions_offset, kept.actions, begins.actions)
            keeper = Keeper(name, *kept, at_ms, lost, lost_actions, *firsts)
        told = Told(name=name, keeper=keeper, submitted_at=self._now)
        self.history.told.append(told)
        try:
            answer = self.store.keep(name, LogOffsets(commit, actions), at_ms)
        except NoRoomError:
            self.history.told.remove(told)
            raise
        if answer != keeper:
            raise BrokenPromiseError(f"B12: {answer} was answered; it is {keeper}")
        told.acknowledged_at = self._now

    def end_keeper(self, name: str = KEEPERS[0]) -> None:
        """This one is not waited for any more."""
        told = Told(name=name, keeper=None, submitted_at=self._now)
        self.history.told.append(told)
        try:
            self.store.end_keeper(name)
        except NoRoomError:
            self.history.told.remove(told)
            raise
        told.acknowledged_at = self._now

    def _note_forced(self, *, commit: int = 0, actions: int = 0) -> None:
        self.history.forced.append((LogOffsets(commit, actions), self._now))

    def expire(self) -> None:
        """Let go of what is older than the options say; a younger message may not go."""
        young_ms = self.clock.now_ms() - self.options.retain_ms
        young = [
            one.placed.physical_offset for one in self.history.sent if one.stored_at_ms > young_ms
        ]
        self.history.given_up.append((min(young, default=self.store.written_offset), self._now))
        self.store.give_up_below(self.store.expired_offset(self.clock.now_ms()))

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
        has_room = self.disk.free_bytes() - SNAPSHOT_BYTES_MAX >= self.options.reserve_bytes
        if self.options.force_retention or not has_room:
            self._note_forced(actions=offset)
        self.history.snapshot_offset = offset
        noted = str(count).encode()
        self.store.actions.write_snapshot(offset, GroupsContent(noted, [RawPage(noted)] * 3))
        self.history.synced_actions.append((count, self._now))

    def visible(self) -> dict[str, int]:
        """Visible messages of each subject."""
        return visible(self.store)


def _skipped(kept: int, told: int, begins: int) -> int:
    """What a keeper did not find any more, once it is past where the log begins."""
    return max(0, begins - kept) if told >= begins else 0


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
