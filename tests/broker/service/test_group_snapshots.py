"""Groups survive in snapshots when old actions go, also when snapshots are damaged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from qmq_broker.errors import CorruptionError
from qmq_broker.service.delivery.snapshot import decode_groups, encode_groups
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.snapshots import GroupsContent
from tests.broker.service.retaining import (
    HOUR_MS,
    RETAINING,
    act,
    files,
    keep_house,
    send,
    with_options,
)
from tests.broker.service.rig import GROUP, SUBJECT, Rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path, store_options=RETAINING)
    yield made
    made.close()


def plain(content: GroupsContent) -> tuple[bytes, list[bytes]]:
    return content.groups, [page.read() for page in content.pages]


def test_a_snapshot_and_what_follows_give_the_groups_of_the_whole_log(rig: Rig) -> None:
    rig.send(b"late", expires_at_ms=1)
    act(rig, 12)
    whole = encode_groups(rig.broker.delivery.groups(), 0)
    with_options(rig, snapshot_bytes=1)
    assert encode_groups(rig.broker.delivery.groups(), 0) == whole
    keep_house(rig, ms=1_000)
    assert any(name.startswith("groups.") for name in files(rig, "state"))
    act(rig, 7)
    keep_house(rig, ms=1_000)
    act(rig, 7)
    after = encode_groups(rig.broker.delivery.groups(), 0)
    rig.restart()
    assert encode_groups(rig.broker.delivery.groups(), 0) == after
    assert files(rig, "actionlog")[0] != "0" * 20, "actions below both snapshots are gone"


def test_a_snapshot_knows_which_pull_sequences_forgotten_consumers_had(rig: Rig) -> None:
    send(rig, 2)
    rig.settle(rig.pull("gone").ack(), "gone")
    state = rig.broker.delivery.group(SUBJECT, GROUP)
    assert state is not None
    assert state.forget_idle_consumers(rig.now_ms + 1) == 1
    (again,) = decode_groups(encode_groups([state], 0), 0)
    assert again.next_pull_sequence("gone") == state.next_pull_sequence("gone") == 2


def test_a_damaged_snapshot_leaves_the_one_before_and_more_of_the_log(rig: Rig) -> None:
    with_options(rig, snapshot_bytes=1)
    for _ in range(3):
        act(rig, 5)
        keep_house(rig, ms=1_000)
    act(rig, 2)
    expected = encode_groups(rig.broker.delivery.groups(), 0)
    for path in layout.SNAPSHOTS:
        content = (rig.directory / path).read_bytes()
        rig.close()
        (rig.directory / path).write_bytes(content[:-1])
        rig.start()
        assert plain(encode_groups(rig.broker.delivery.groups(), 0)) == plain(expected)
        (rig.directory / path).write_bytes(content)


def test_without_any_snapshot_and_with_the_first_actions_gone_the_start_is_refused(
    rig: Rig,
) -> None:
    with_options(rig, snapshot_bytes=1)
    for _ in range(3):
        act(rig, 5)
        keep_house(rig, ms=1_000)
    rig.close()
    kept = {path: (rig.directory / path).read_bytes() for path in layout.SNAPSHOTS}
    for path in kept:
        (rig.directory / path).unlink()
    with pytest.raises(CorruptionError, match="actionlog"):
        rig.start()
    for path, content in kept.items():
        (rig.directory / path).write_bytes(content)
    rig.start()


def test_a_clock_set_back_moves_the_times_of_a_snapshot_with_it(rig: Rig) -> None:
    with_options(rig, snapshot_bytes=1)
    send(rig, 2)
    rig.pull(max_messages=1, lease_ms=60_000)
    keep_house(rig, ms=1_000)
    rig.clock.wall_ms -= 24 * HOUR_MS
    rig.restart()
    rig.pass_ms(61_000)
    assert rig.pull(max_messages=2, consumer="two").sequences == [1]
    rig.pass_ms(2_000)
    assert rig.pull(max_messages=2, consumer="two").sequences == [0]
