"""What a store must show after a crash: everything acknowledged, nothing else, and that it goes on."""

from __future__ import annotations

from collections.abc import Sequence

from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.keepers import Keeper
from qmq_broker.storage.keepers import LogOffsets, limited_to
from qmq_broker.storage.logs.frame_seek import LogRange
from qmq_broker.storage.store import Store
from qmq_client.group.actions import Action
from qmq_client.wire.errors import QmqError
from qmq_client.wire.message_id import MessageIds
from tests.crash.recording_disk import Image, PassingDisk
from tests.crash.world import (
    KEEPERS,
    BrokenPromiseError,
    History,
    Sent,
    Told,
    make_frame,
    records_at,
    records_of,
    visible,
)
from tests.kit.clock import FakeClock


def check(image: Image, known: History, *, goes_on: bool = True) -> None:
    """Open a crash state and hold it to every promise; the image is used up.

    With `goes_on` it is also sent new messages and repeats, which costs a third more.
    """
    check_disk(PassingDisk(image), known, goes_on=goes_on)


def check_disk(disk: Disk, known: History, *, goes_on: bool = True) -> None:
    """The same for what is already a disk."""
    try:
        _check_all(disk, known, goes_on=goes_on)
    except QmqError as error:
        raise BrokenPromiseError(f"B3: the store does not open or read: {error!r}") from error


def _check_all(disk: Disk, known: History, *, goes_on: bool) -> None:
    store = Store.open(disk, FakeClock(), known.options)
    _check_epoch(store, known)
    if store.first_offset > max((offset for offset, _ in known.given_up), default=0):
        raise BrokenPromiseError(f"B12: the log begins at {store.first_offset}: {known.given_up}")
    for name in KEEPERS:
        _check_keeper(store, name, known)
    survivors = check_messages(store, known.sent)
    _check_actions(store, known)
    if goes_on:
        _check_goes_on(store, known.sent, survivors)


def _check_epoch(store: Store, known: History) -> None:
    if any(store.epoch <= epoch for epoch, _ in known.epochs):
        raise BrokenPromiseError(f"C3: epoch {store.epoch} was used before: {known.epochs}")


def _check_keeper(store: Store, name: str, known: History) -> None:
    """It is what it was answered last, or told since, as far as the logs go, and nothing went before it
    had it, but by force.
    """
    end = LogOffsets(store.written_offset, store.actions.log.written_offset)
    told = possible_keepers(name, known.told)
    possible = [one and limited_to(end, one) for one in told]
    found = next((one for one in store.keepers.all if one.name == name), None)
    if found not in possible:
        raise BrokenPromiseError(f"B12: the keeper is {found}; it told {possible}")
    if found is None:
        return
    begins = LogOffsets(store.first_offset, store.actions.first_offset)
    kept = (found.kept_offset, found.kept_actions_offset)
    forced = [max((one[log] for one, _ in known.forced), default=0) for log in range(2)]
    if any(first > max(bounds) for first, *bounds in zip(begins, kept, forced, strict=True)):
        raise BrokenPromiseError(f"B12: {begins} are given up, {kept} kept, {forced} by force")


def possible_keepers(name: str, told: Sequence[Told]) -> list[Keeper | None]:
    """What this keeper may be: what was answered last, or what it told since."""
    own = [one for one in told if one.name == name]
    answered = [number for number, one in enumerate(own) if one.acknowledged_at is not None]
    if answered:
        return [one.keeper for one in own[answered[-1] :]]
    return [None, *(one.keeper for one in own)]


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
    snapshot = store.actions.snapshot
    if snapshot is not None and [page.read() for page in snapshot.pages] != [snapshot.groups] * 3:
        raise BrokenPromiseError("B3: a snapshot with other pages")
    return int(snapshot.groups if snapshot else b"0"), list(store.actions.replay())


def _check_actions(store: Store, known: History) -> None:
    noted, rest = replayed(store)
    count = noted + len(rest)
    written = [action for action, _ in known.actions]
    synced = max((n for n, _ in known.synced_actions), default=0)
    if rest != written[noted:count] or count < synced:
        raise BrokenPromiseError(
            f"actions: {noted} noted, {len(rest)} replayed, {synced} synced, {len(written)} written"
        )
    begins, end = store.actions.first_offset, store.actions.log.written_offset
    there = [one for _, some in store.actions.between(LogRange(begins, end)) for one in some]
    if there != written[count - len(there) : count] or len(there) < len(rest):
        raise BrokenPromiseError(
            f"actions: {len(there)} are to be read from {begins} on, and {count} are there"
        )


def _check_goes_on(store: Store, sent: Sequence[Sent], survivors: int) -> None:
    """New messages are taken, what survived is known as stored, what did not is stored once."""
    before = sum(visible(store).values())
    new = make_frame(MessageIds(99), {"orders": 10, "after": 20})
    repeats = list(sent[max(0, survivors - 1) : survivors + 1])
    placed = store.append([new, *(one.frame for one in repeats)])
    store.commit_and_step()
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
