"""Golden bytes about groups: a snapshot as brokers wrote it before groups had settings, the actions that
came with them, and a record that expires. All are read, and what is written today is the same."""

from __future__ import annotations

from typing import Final

import msgspec

from qmq_broker.service.delivery.snapshot import decode_groups, encode_groups
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.snapshots import GroupsContent, SnapshotFiles
from qmq_client.group.actions import (
    Action,
    BackoffTerms,
    BroughtBack,
    Configured,
    Ended,
    GroupSettings,
    Keyed,
    MovedBack,
    Owned,
    Passed,
    Paused,
    Purged,
    Replayed,
    SetAside,
    Skipped,
    Sought,
)
from qmq_client.group.dead_letters import EXPIRED, REJECTED, DeadLetter
from qmq_client.group.state import GroupState
from qmq_client.wire.record import Record, decode_record, encode_record
from qmq_client.wire.record_parts import record_expires_at_ms
from tests.crash.recording_disk import RecordingDisk
from tests.golden.storage_version_1 import NOW_MS
from tests.golden.version_1 import golden

_WHERE: Final = (NOW_MS, "flight.departed", "tallies")
#: One of each kind, in the order of their tags.
ACTIONS: Final[tuple[Action, ...]] = (
    Skipped(*_WHERE, 0, 4),
    Configured(
        *_WHERE,
        GroupSettings(
            any_tags=("severe", "weather"),
            all_tags=("delayed",),
            is_ordered=True,
            backoff=BackoffTerms(500, 1.5, 60_000),
            idle_ms=300_000,
        ),
    ),
    Sought(*_WHERE, 17),
    Paused(*_WHERE, True),
    Passed(*_WHERE, 20),
    Keyed(*_WHERE, 24, (20, 21, 23), (0, 2**62 + 1, 77)),
    Replayed(*_WHERE, 4, 6, (77, 0)),
    Purged(*_WHERE, 4, 5),
    Ended(*_WHERE),
)
#: Actions of long retries, which came later.
LONG_RETRY: Final[tuple[Action, ...]] = (
    SetAside(*_WHERE, 4, 6, 3 << 32),
    BroughtBack(*_WHERE, 4, 17),
)
#: What came with groups that a start moves back.
MOVED: Final[tuple[Action, ...]] = (MovedBack(*_WHERE, 4, 17),)
#: What came with the shares of tokens: of a group, and of a subject that was removed later.
OWNED: Final[tuple[Action, ...]] = (
    Owned(*_WHERE, "shop"),
    Owned(NOW_MS, "flight.departed", "", "shop"),
    Ended(NOW_MS, "flight.departed", ""),
)
EXPIRING: Final = Record(
    message_id=bytes.fromhex("0123456789abcdef0000000000000009"),
    subject="flight.departed",
    body=b"gate B12",
    key="N14228",
    tags=("gate",),
    headers=(("trace", "4bf92f35"),),
    born_at_ms=NOW_MS,
    expires_at_ms=NOW_MS + 60_000,
)


def test_actions_of_groups_are_written_and_read_byte_for_byte() -> None:
    data = golden("actions_groups")
    assert msgspec.msgpack.decode(data, type=tuple[Action, ...]) == ACTIONS
    assert msgspec.msgpack.encode(ACTIONS) == data


def test_actions_of_long_retries_are_written_and_read_byte_for_byte() -> None:
    data = golden("actions_aside")
    assert msgspec.msgpack.decode(data, type=tuple[Action, ...]) == LONG_RETRY
    assert msgspec.msgpack.encode(LONG_RETRY) == data


def test_actions_of_groups_that_are_moved_back_are_written_and_read_byte_for_byte() -> None:
    data = golden("actions_moved_back")
    assert msgspec.msgpack.decode(data, type=tuple[Action, ...]) == MOVED
    assert msgspec.msgpack.encode(MOVED) == data


def test_actions_of_shares_are_written_and_read_byte_for_byte() -> None:
    data = golden("actions_owned")
    assert msgspec.msgpack.decode(data, type=tuple[Action, ...]) == OWNED
    assert msgspec.msgpack.encode(OWNED) == data


def test_a_record_that_expires_is_written_and_read_byte_for_byte() -> None:
    data = golden("record_expiring")
    assert decode_record("flight.departed", data) == EXPIRING
    assert encode_record(EXPIRING) == data
    assert record_expires_at_ms(data) == EXPIRING.expires_at_ms


def test_a_snapshot_from_before_groups_had_settings_is_read() -> None:
    (state,) = decode_groups(GroupsContent(golden("snapshot_first")), 1_800_000_000_000)
    assert (state.subject, state.group, state.cursor, state.acked_count) == (
        "orders",
        "billing",
        6,
        1,
    )
    assert (state.in_flight, state.waiting, list(state.dead)) == (3, 1, [3])
    assert (state.settings, state.is_paused, state.by_key) == (GroupSettings(), False, None)
    (again,) = decode_groups(encode_groups([state], 1_800_000_000_000), 1_800_000_000_000)
    assert (again.in_flight, again.waiting, list(again.dead)) == (3, 1, [3])


def test_a_snapshot_with_pages_of_dead_letters_is_written_and_read_byte_for_byte() -> None:
    state = GroupState(subject="flight.departed", group="tallies", first_sequence=9, max_attempts=3)
    state.dead[4] = DeadLetter(
        sequence=4, attempts=3, reason=REJECTED, error="no such airport", at_ms=NOW_MS
    )
    state.dead[7] = DeadLetter(sequence=7, attempts=0, reason=EXPIRED, error="", at_ms=NOW_MS + 1)
    disk, store_id = RecordingDisk(), bytes(range(16))
    disk.make_directory(layout.STATE)
    SnapshotFiles(disk, store_id).write(300, encode_groups([state], NOW_MS))
    path = layout.SNAPSHOTS[1]
    assert disk.open(path).read(0, 10**6) == golden("snapshot_pages")
    newest = SnapshotFiles(disk, store_id).newest
    assert newest is not None
    assert newest.snapshot.offset == 300
    assert newest.content is not None
    (again,) = decode_groups(newest.content, NOW_MS)
    assert dict(again.dead) == dict(state.dead)
