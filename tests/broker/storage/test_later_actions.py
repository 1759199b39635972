"""B13: an action that only a later version knows is no damage, and nothing is made of what is around it."""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from qmq_broker.errors import CorruptionError, UnknownFormatError
from qmq_broker.face.commands.store import store as store_command
from qmq_broker.face.exit_codes import ExitCode
from qmq_broker.storage.logs.actions import KIND_MAX, decode_actions
from qmq_broker.storage.store import Store
from qmq_broker.storage.upkeep.quarantine import quarantine_damage
from qmq_broker.storage.upkeep.verify import verify_store
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import FrameKind, build_frame
from tests.broker.service.rig import Rig
from tests.crash.recording_disk import RecordingDisk
from tests.crash.world import OPTIONS, World
from tests.kit.clock import FakeClock

LATER = [KIND_MAX + 1, 5, "orders", "billing", {"what": "nobody knows yet"}]


def append_later(store: Store) -> None:
    content = msgspec.msgpack.encode([[16, 5, "orders", "billing"], LATER])
    body = struct.pack(">I", len(content)) + content
    store.actions.log.append([(build_frame(FrameKind.ACTIONS, body, record_count=2), ())])
    store.actions.sync()


def assert_named(error: UnknownFormatError) -> None:
    assert (error.found, error.known) == (f"of kind {KIND_MAX + 1}", f"kinds 1 to {KIND_MAX}")
    assert "later" in error.remedy


def test_B13_a_log_with_a_later_action_is_refused_and_never_given_up() -> None:
    world = World(RecordingDisk())
    world.act(3)
    append_later(world.store)
    world.act(2)
    world.store.close()
    before = dict(world.disk.image.names)
    for look in (
        lambda disk: Store.open(disk, FakeClock(), OPTIONS),
        lambda disk: verify_store(disk, FakeClock(), check_groups=len),
        lambda disk: quarantine_damage(disk, FakeClock()),
    ):
        disk = RecordingDisk(world.disk.image)
        with pytest.raises(UnknownFormatError) as caught:
            look(disk)
        assert_named(caught.value)
        assert not disk.operations
    assert world.disk.image.names == before


def test_B13_the_broker_and_its_commands_say_so(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "data")
    rig.send(b"one")
    append_later(rig.store)
    rig.close()
    with pytest.raises(UnknownFormatError):
        rig.start()
    done = CliRunner().invoke(store_command, ["verify", str(tmp_path / "data")])
    assert done.exit_code == ExitCode.DIRECTORY, done.output
    assert f"kind {KIND_MAX + 1}" in done.output


@pytest.mark.parametrize(
    "later",
    [
        [16, 5, "orders", "billing", "one more field"],
        [9, 5, "orders", "billing", [[], [], False, None, 0, "one more setting"]],
        [9, 5, "orders", "billing", [[], [], False, [1, 2.0, 3, "one more term"], 0]],
    ],
)
def test_B13_a_field_that_only_a_later_version_knows_is_refused(later: object) -> None:
    with pytest.raises(UnknownFormatError, match="more fields"):
        decode_actions(msgspec.msgpack.encode([[16, 5, "orders", "billing"], later]))


@pytest.mark.parametrize("wrong", [[[3]], [[0, 1, "a", "b"]], [["3", 1]], [[]], [3], {"a": 1}])
def test_what_no_version_writes_is_damage(wrong: object) -> None:
    with pytest.raises(ProtocolError):
        decode_actions(msgspec.msgpack.encode(wrong))
    assert not issubclass(UnknownFormatError, CorruptionError)
