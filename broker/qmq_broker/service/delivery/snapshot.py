"""All groups as bytes and back: the content of a snapshot of the action log.

MessagePack arrays with a version in front. New fields go to the end and have a default. A start
that loads a snapshot and replays what follows it ends with the same state as a replay of
everything.

Actions stamped later than now were written before the clock was set back. Deadlines are moved with the clock, so
that no lease lasts longer than it was given for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any, Final, NamedTuple, cast

import msgspec

from qmq_broker.storage.files import layout
from qmq_broker.storage.files.small_file import decode_whole, unknown_content
from qmq_client.group.actions import Action, Ended, GroupDefined, GroupSettings, Owned, SetAside
from qmq_client.group.apply import apply_action, new_state
from qmq_client.group.aside import AsideRun
from qmq_client.group.dead_letters import DeadLetter, encoded_array
from qmq_client.group.history import Attempt
from qmq_client.group.leases import Lease
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


class AsideImage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """See `AsideRun`."""

    first: int
    next: int
    attempts: int
    retry_at_ms: int
    error: str
    history: tuple[Attempt, ...]
    ticket: int
    untried: int = 0


#: What stands in an image, from the value of which it is one.
_LEASE, _WAITING, _ASIDE = (
    attrgetter(*kind.__struct_fields__) for kind in (LeaseImage, WaitingImage, AsideImage)
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
    dead: tuple[DeadLetter, ...]
    lost_count: int
    settings: GroupSettings = GroupSettings()
    is_paused: bool = False
    expired_count: int = 0
    #: Sequence and key of messages that an ordered group has reached and is not done with.
    keyed: tuple[tuple[int, int], ...] = ()
    #: What is away.
    aside: tuple[AsideImage, ...] = ()
    #: Sequence and copy of what came back.
    copies: tuple[tuple[int, int], ...] = ()
    seen_ms: int = 0
    owner: str = ""


class SnapshotImage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All groups."""

    version: int
    #: When it was made.
    at_ms: int
    groups: tuple[GroupImage, ...]
    #: Subject → name of the token that brought it into being.
    owners: dict[str, str] = {}


def encode_groups(
    states: Iterable[GroupState], now_ms: int, owners: Mapping[str, str] | None = None
) -> bytes:
    """All groups as bytes, and which token brought a subject into being."""
    return encode_image(image_of(states, now_ms, owners))


def image_of(
    states: Iterable[GroupState], now_ms: int, owners: Mapping[str, str] | None = None
) -> SnapshotImage:
    """The same as values that do not change with the groups."""
    groups = tuple(_image(state) for state in states)
    return SnapshotImage(SNAPSHOT_VERSION, now_ms, groups, dict(owners or {}))


def encode_image(image: SnapshotImage) -> bytes:
    """Those values as bytes. In any thread: with a million dead letters it takes a while."""
    # The letters are bytes already (see `_image`).
    groups = [
        msgspec.structs.replace(
            group,
            dead=msgspec.Raw(encoded_array(cast("tuple[bytes, ...]", group.dead))),
        )
        for group in image.groups
    ]
    return msgspec.msgpack.encode(msgspec.structs.replace(image, groups=groups))


def decode_groups(content: bytes, now_ms: int) -> list[GroupState]:
    """The groups of a snapshot; raises `UnknownFormatError` if it is not one of this version.

    If the clock was set back since, all times are moved with it.
    """
    return decode_all(content, now_ms)[0]


def decode_all(content: bytes, now_ms: int) -> tuple[list[GroupState], dict[str, str]]:
    """The same, and which token brought a subject into being."""
    image = check_groups(content)
    shift_ms = max(0, image.at_ms - now_ms)
    return [_state(group, shift_ms) for group in image.groups], image.owners


def check_groups(content: bytes) -> SnapshotImage:
    """The content of a snapshot; raises `UnknownFormatError` if it is not one of this version."""
    image = decode_whole(_FILES, content, SnapshotImage)
    if image.version != SNAPSHOT_VERSION:
        raise unknown_content(_FILES, f"version {image.version}")
    return image


def _image(state: GroupState) -> GroupImage:
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
        # As bytes that are ready: there may be a million. `encode_image` joins them.
        dead=cast("tuple[DeadLetter, ...]", state.dead.encoded()),
        lost_count=state.lost_count,
        settings=state.settings,
        is_paused=state.is_paused,
        expired_count=state.expired_count,
        keyed=() if state.lanes is None else tuple(state.lanes.sequences()),
        aside=tuple(AsideImage(*_ASIDE(run)) for run in state.aside.runs.runs()),
        copies=tuple(state.aside.copies.items()),
        seen_ms=state.seen_ms,
        owner=state.owner,
    )


def _state(image: GroupImage, shift_ms: int) -> GroupState:
    state = GroupState(
        subject=image.subject,
        group=image.group,
        first_sequence=image.cursor,
        max_attempts=image.max_attempts,
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
    for away in image.aside:  # not moved: their copies are not
        state.aside.runs.add(AsideRun(**msgspec.structs.asdict(away)))
    state.aside.copies.update(image.copies)
    if image.keyed:
        state.restore_lanes(image.keyed)
    return state


def _moved(image: msgspec.Struct, time: str, shift_ms: int) -> dict[str, Any]:
    values = msgspec.structs.asdict(image)
    values[time] = max(1, values[time] - shift_ms)
    return values


class AtEnd(NamedTuple):
    """What the action log says."""

    groups: list[GroupState]
    #: Subject → name of the token that brought it into being.
    owners: dict[str, str]
    #: How many actions on groups were replayed.
    replayed: int


def groups_at_end(snapshot: bytes, actions: Iterable[Action], now_ms: int) -> AtEnd:
    """The groups after all that; `b""` is no snapshot."""
    states, owners = decode_all(snapshot, now_ms) if snapshot else ([], {})
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
            state = groups[key] = new_state(action)
        count += 1
        if isinstance(action, Ended):
            del groups[key]
            continue
        apply_action(state, _not_in_future(action, now_ms))
        if isinstance(action, SetAside) and action.at_ms > now_ms:
            # Their copies stay due when they were: delayed messages follow the clock as it is.
            state.aside.put_off(action.first, action.next, action.at_ms - now_ms)
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
