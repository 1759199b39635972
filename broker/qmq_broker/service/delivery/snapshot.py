"""Encodes all groups as a snapshot of the action log, and decodes them.

MessagePack arrays with a version in front. New fields go to the end and have a default. Dead letters, of
which there may be very many, follow in separate pages: they are never all in memory. A start that
loads a snapshot and replays the actions after it ends with the same state as a replay of all
actions.

Actions stamped later than now were written before the clock was set back. Deadlines are moved with
the clock, so that no lease lasts longer than its length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any, Final, NamedTuple

import msgspec

from qmq_broker.storage.files import layout
from qmq_broker.storage.files.small_file import decode_whole, unknown_content
from qmq_broker.storage.files.snapshots import GroupsContent
from qmq_client.group.actions import Action, Ended, GroupDefined, GroupSettings, Owned, SetAside
from qmq_client.group.apply import apply_action, new_state
from qmq_client.group.dead_letters import (
    DeadLetter,
    DeadLetters,
    MemoryPage,
    Page,
    Pool,
    letters_of,
)
from qmq_client.group.history import Attempt
from qmq_client.group.leases import Lease
from qmq_client.group.long_retries import LongRetryRun
from qmq_client.group.redelivery import Redelivery
from qmq_client.group.state import GroupState

SNAPSHOT_VERSION: Final = 1
_FILES: Final = " or ".join(layout.SNAPSHOTS)


class LeaseImage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """See `Lease`."""

    first: int
    next: int
    first_sequence: int
    attempt: int
    token: int
    until_ms: int
    given_at_ms: int = 0
    history: tuple[Attempt, ...] = ()
    error: str = ""
    untried: int = 0


class ConsumerImage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """See `PullLog`."""

    name: str
    next_pull_sequence: int
    last_seen_ms: int
    leases: tuple[LeaseImage, ...]
    #: Token → ranges of pull sequences that were acked under it.
    acked: dict[int, tuple[tuple[int, int], ...]]


class WaitingImage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """See `Redelivery`."""

    first: int
    next: int
    attempts: int
    retry_at_ms: int
    error: str
    history: tuple[Attempt, ...] = ()
    untried: int = 0


class LongRetryImage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """See `LongRetryRun`."""

    first: int
    next: int
    attempts: int
    retry_at_ms: int
    error: str
    history: tuple[Attempt, ...]
    retry_id: int
    untried: int = 0


#: The fields of an image, copied from the object of the same name.
_LEASE, _WAITING, _LONG_RETRY = (
    attrgetter(*kind.__struct_fields__) for kind in (LeaseImage, WaitingImage, LongRetryImage)
)


class GroupImage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """See `GroupState`."""

    subject: str
    group: str
    cursor: int
    max_attempts: int
    acked_count: int
    next_pull_floor: int
    consumers: tuple[ConsumerImage, ...]
    waiting: tuple[WaitingImage, ...]
    #: Dead letters of snapshots from before there were pages.
    dead: tuple[DeadLetter, ...]
    lost_count: int
    settings: GroupSettings = GroupSettings()
    is_paused: bool = False
    expired_count: int = 0
    #: Sequence and key of unsettled messages that an ordered group has reached.
    keyed: tuple[tuple[int, int], ...] = ()
    long_retries: tuple[LongRetryImage, ...] = ()
    #: Sequence and copy of each message whose long retry has ended.
    copies: tuple[tuple[int, int], ...] = ()
    seen_ms: int = 0
    owner: str = ""
    #: How many of the following pages hold its dead letters.
    pages: int = 0


class SnapshotImage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All groups."""

    version: int
    #: Time of the snapshot.
    at_ms: int
    groups: tuple[GroupImage, ...]
    #: Subject → name of the token that created it.
    owners: dict[str, str] = {}


class Taken(NamedTuple):
    """All groups at one offset of the action log, as values that do not change afterwards."""

    image: SnapshotImage
    #: The dead letters of all groups, block by block.
    pages: list[Page]


def encode_groups(
    states: Iterable[GroupState], now_ms: int, owners: Mapping[str, str] | None = None
) -> GroupsContent:
    """All groups as bytes, with the tokens that created subjects."""
    return content_of(image_of(states, now_ms, owners))


def image_of(
    states: Iterable[GroupState], now_ms: int, owners: Mapping[str, str] | None = None
) -> Taken:
    """The same as values that do not change afterwards."""
    groups: list[GroupImage] = []
    pages: list[Page] = []
    for state in states:
        contents = state.dead.contents()
        groups.append(_image(state, len(contents)))
        pages += contents
    image = SnapshotImage(SNAPSHOT_VERSION, now_ms, tuple(groups), dict(owners or {}))
    return Taken(image, pages)


def content_of(taken: Taken) -> GroupsContent:
    """Encode these values, in any thread."""
    return GroupsContent(msgspec.msgpack.encode(taken.image), taken.pages)


def decode_groups(
    content: GroupsContent, now_ms: int, pool: Pool | None = None
) -> list[GroupState]:
    """The groups of a snapshot; raises `UnknownFormatError` if it is not one of this version.

    If the clock was set back since, all times are moved with it. `pool` pages out dead letters.
    """
    return decode_all(content, now_ms, pool)[0]


def decode_all(
    content: GroupsContent, now_ms: int, pool: Pool | None = None
) -> tuple[list[GroupState], dict[str, str]]:
    """The same, with the tokens that created subjects."""
    image = _decode_image(content.groups)
    shift_ms = max(0, image.at_ms - now_ms)
    pages = iter(content.pages)
    states = [_state(group, shift_ms, pool) for group in image.groups]
    for state, group in zip(states, image.groups, strict=True):
        for page in islice(pages, group.pages):
            _add_page(state.dead, page, shift_ms)
    return states, image.owners


def check_groups(content: GroupsContent) -> SnapshotImage:
    """The groups without their pages; raises `UnknownFormatError` if it is not one of this version."""
    image, pages = _decode_image(content.groups), iter(content.pages)
    for group in image.groups:
        for _ in range(group.pages):
            _add_page(DeadLetters(), next(pages, MemoryPage(())), 0)
    if next(pages, None) is not None:
        raise unknown_content(_FILES, "a page without a group")
    return image


def _decode_image(groups: bytes) -> SnapshotImage:
    image = decode_whole(_FILES, groups, SnapshotImage)
    if image.version != SNAPSHOT_VERSION:
        raise unknown_content(_FILES, f"version {image.version}")
    return image


def _add_page(letters: DeadLetters, page: Page, shift_ms: int) -> None:
    try:
        if shift_ms:
            moved = map(partial(_moved_letter, shift_ms), letters_of(page.read()))
            letters.add(MemoryPage(tuple(moved)), is_kept=False)
        else:
            letters.add(page)
    except (msgspec.MsgspecError, OverflowError, ValueError) as error:
        raise unknown_content(_FILES, str(error)) from error


def _image(state: GroupState, pages: int) -> GroupImage:
    return GroupImage(
        subject=state.subject,
        group=state.group,
        cursor=state.cursor,
        max_attempts=state.max_attempts,
        acked_count=state.acked_count,
        next_pull_floor=state.next_pull_floor,
        consumers=tuple(
            ConsumerImage(
                name=name,
                next_pull_sequence=log.next_pull_sequence,
                last_seen_ms=log.last_seen_ms,
                leases=tuple(LeaseImage(*_LEASE(lease)) for lease in log.leases()),
                acked={token: tuple(ranges) for token, ranges in log.acked().items()},
            )
            for name, log in state.consumers()
        ),
        waiting=tuple(WaitingImage(*_WAITING(run)) for run in state.redeliveries.runs()),
        dead=(),
        lost_count=state.lost_count,
        settings=state.settings,
        is_paused=state.is_paused,
        expired_count=state.expired_count,
        keyed=() if state.by_key is None else tuple(state.by_key.sequences()),
        long_retries=tuple(
            LongRetryImage(*_LONG_RETRY(run)) for run in state.long_retries.runs.runs()
        ),
        copies=tuple(state.long_retries.copies.items()),
        seen_ms=state.seen_ms,
        owner=state.owner,
        pages=pages,
    )


def _state(image: GroupImage, shift_ms: int, pool: Pool | None) -> GroupState:
    state = GroupState(
        subject=image.subject,
        group=image.group,
        first_sequence=image.cursor,
        max_attempts=image.max_attempts,
        pool=pool,
    )
    state.acked_count = image.acked_count
    state.lost_count = image.lost_count
    state.expired_count = image.expired_count
    state.is_paused = image.is_paused
    state.seen_ms = image.seen_ms - shift_ms
    state.owner = image.owner
    state.configure(image.settings)
    state.next_pull_floor = image.next_pull_floor
    for consumer in image.consumers:
        state.restore_consumer(
            consumer.name,
            next_pull_sequence=consumer.next_pull_sequence,
            last_seen_ms=consumer.last_seen_ms - shift_ms,
            leases=[Lease(**_moved(lease, "until_ms", shift_ms)) for lease in consumer.leases],
            acked=consumer.acked,
        )
    for waiting in image.waiting:
        state.redeliveries.add(Redelivery(**_moved(waiting, "retry_at_ms", shift_ms)))
    for dead in image.dead:
        state.dead[dead.sequence] = DeadLetter(**_moved(dead, "at_ms", shift_ms))
    state.count_all()
    for run in image.long_retries:  # not moved, because their copies are not moved either
        state.long_retries.runs.add(LongRetryRun(**msgspec.structs.asdict(run)))
    state.long_retries.copies.update(image.copies)
    if image.keyed:
        state.restore_key_queues(image.keyed)
    return state


def _moved_letter(shift_ms: int, letter: DeadLetter) -> bytes:
    return msgspec.msgpack.encode(DeadLetter(**_moved(letter, "at_ms", shift_ms)))


def _moved(image: msgspec.Struct, time: str, shift_ms: int) -> dict[str, Any]:
    values = msgspec.structs.asdict(image)
    values[time] = max(1, values[time] - shift_ms)
    return values


class AtEnd(NamedTuple):
    """The state at the end of the action log."""

    groups: list[GroupState]
    #: Subject → name of the token that created it.
    owners: dict[str, str]
    #: How many actions on groups were replayed.
    replayed: int


def groups_at_end(
    snapshot: GroupsContent | None,
    actions: Iterable[Action],
    now_ms: int,
    pool: Pool | None = None,
) -> AtEnd:
    """The groups after all actions; `pool` pages out their dead letters."""
    states, owners = ([], {}) if snapshot is None else decode_all(snapshot, now_ms, pool)
    groups = {(state.subject, state.group): state for state in states}
    count = 0
    for action in actions:
        key = (action.subject, action.group)
        if not action.group:
            _note_subject(owners, action)
            continue
        state = groups.get(key)
        if state is None:
            if not isinstance(action, GroupDefined):
                continue
            state = groups[key] = new_state(action, pool)
        count += 1
        if isinstance(action, Ended):
            groups.pop(key).dead.forget(0)
            continue
        apply_action(state, _not_in_future(action, now_ms))
        if isinstance(action, SetAside) and action.at_ms > now_ms:
            # The due times of their copies do not change: delayed messages follow the current clock.
            state.long_retries.put_off(action.first, action.next, action.at_ms - now_ms)
    return AtEnd(list(groups.values()), owners, count)


def _note_subject(owners: dict[str, str], action: Action) -> None:
    if isinstance(action, Owned):
        owners[action.subject] = action.owner
    elif isinstance(action, Ended):
        owners.pop(action.subject, None)


def _not_in_future(action: Action, now_ms: int) -> Action:
    shift_ms = action.at_ms - now_ms
    if shift_ms <= 0:
        return action
    changes: dict[str, int] = {"at_ms": now_ms}
    for name in ("lease_until_ms", "retry_at_ms"):
        value = getattr(action, name, 0)
        if value:
            changes[name] = max(1, value - shift_ms)
    return msgspec.structs.replace(action, **changes)
