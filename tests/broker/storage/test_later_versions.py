"""B13: what another version wrote is no damage. Every command refuses it and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from qmq_broker.errors import UnknownFormatError
from qmq_broker.face.commands.store import DUMPED
from qmq_broker.face.commands.store import store as store_command
from qmq_broker.face.exit_codes import ExitCode
from qmq_broker.service.delivery.snapshot import check_groups, encode_groups
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.checkpoint import SLOT_BYTES
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.retained import Retained, write_retained
from qmq_broker.storage.files.small_file import unseal
from qmq_broker.storage.keepers import LogOffsets
from qmq_broker.storage.schedule.bucket import HOUR_MS, LOGS
from qmq_broker.storage.schedule.states import DelayedState
from qmq_broker.storage.store import Store
from qmq_broker.storage.upkeep.backup import back_up
from qmq_broker.storage.upkeep.quarantine import quarantine_damage
from qmq_broker.storage.upkeep.rebuild import rebuild_store
from qmq_broker.storage.upkeep.verify import verify_store
from qmq_client.wire.checksum import crc32c
from qmq_client.wire.frame import build_message_frame, parse_message_frame
from tests.broker.delay.delay_rig import DelayRig
from tests.broker.service.rig import SUBJECT, Rig, make_frame
from tests.broker.storage.damaged import Directory, flip
from tests.broker.storage.later import frames_in, stamped_as, with_flags
from tests.crash.recording_disk import RecordingDisk
from tests.crash.world import OPTIONS
from tests.kit.clock import FakeClock

FIRST = layout.segment_path(layout.COMMIT_LOG, 0)


def sealed_with(change: Callable[[list[object]], object]) -> Callable[[bytes], bytes]:
    """A small file of MessagePack with other content and the right checksum."""

    def altered(data: bytes) -> bytes:
        content = unseal(data)
        assert content is not None
        new = msgspec.msgpack.encode(change(msgspec.msgpack.decode(content)))
        return new + b"\ncrc32c %08x\n" % crc32c(new)

    return altered


def one_more(fields: list[object]) -> list[object]:
    return [*fields, {"a field": "of a later version"}]


def later_format(data: bytes) -> bytes:
    content = unseal(data)
    assert content is not None
    new = content.replace(b"}", b',"compression":"zstd"}')
    return new + b"\ncrc32c %08x\n" % crc32c(new)


def later_slot(magic: bytes, more: bytes) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        content = magic + data[8:96] + more + data[96 + len(more) : SLOT_BYTES - 4]
        return content + crc32c(content).to_bytes(4)

    return change


def later_group(snapshot: list[object]) -> list[object]:
    groups = msgspec.msgpack.encode([2, 0, []])
    return [*snapshot[:3], groups]


#: What a later version could have written: file and change.
LATER: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "a version of the last frame": (layout.COMMIT_LOG, stamped_as(-1, 4, 2)),
    "a kind of the last frame": (layout.COMMIT_LOG, stamped_as(-1, 5, 99)),
    "a version of an action frame": (layout.ACTION_LOG, stamped_as(-1, 4, 2)),
    "a kind of an action frame": (layout.ACTION_LOG, stamped_as(-1, 5, 99)),
    "a version of a segment head": (FIRST, stamped_as(0, 4, 2)),
    "a field of FORMAT": (layout.FORMAT, later_format),
    "a magic of a checkpoint": ("checkpoint", later_slot(b"QMQCKPT2", b"")),
    "a field of a checkpoint": ("checkpoint", later_slot(b"QMQCKPT1", b"more")),
    "a field of state/retained": (layout.RETAINED, sealed_with(one_more)),
    "a field of state/keepers": (layout.KEEPERS, sealed_with(one_more)),
    "a field of state/schedule": (layout.SCHEDULE_TABLE, sealed_with(one_more)),
    "a field of a snapshot": ("snapshot", sealed_with(one_more)),
    "a version of groups": ("snapshot", sealed_with(later_group)),
}

#: What a rebuild does not read.
NOT_REBUILT = (
    "a version of an action frame",
    "a kind of an action frame",
    "a version of groups",
)


def written_later(what: str, *, is_clean: bool) -> Directory:
    """A directory as a later version would have left it."""
    path, change = LATER[what]
    directory = Directory(is_clean=False)
    store = directory.world.store
    store.actions.write_snapshot(store.actions.log.written_offset, encode_groups([], 0))
    directory.world.act(2)
    directory.world.sync_actions()
    write_retained(directory.world.disk, Retained(store.store_id, 0, {}))
    store.keep("archive", LogOffsets(store.durable_offset, 0), 0)
    if is_clean:
        store.close()
    directory.image = directory.world.disk.image
    if path in (layout.COMMIT_LOG, layout.ACTION_LOG):
        path = max(name for name in directory.files() if name.startswith(f"{path}/000"))
    if path == "checkpoint":
        for one in layout.CHECKPOINTS:
            directory.change(one, change)
    elif path == "snapshot":
        directory.change(next(p for p in layout.SNAPSHOTS if p in directory.image.names), change)
    else:
        directory.change(path, change)
    return directory


def start(disk: Disk) -> object:
    return Store.open(disk, FakeClock(), OPTIONS, check_groups=check_groups)


def verify(disk: Disk) -> object:
    return verify_store(disk, FakeClock(), check_groups=check_groups)


def quarantine(disk: Disk) -> object:
    return quarantine_damage(disk, FakeClock(), check_groups=check_groups)


def rebuild(disk: Disk) -> object:
    return rebuild_store(disk, FakeClock())


def backup(disk: Disk) -> object:
    return back_up(disk, RecordingDisk(), FakeClock(), link=lambda path: False)


#: What a backup copies without reading it.
COPIED_UNREAD = ("a version of a segment head", "a version of groups")
UNREAD: dict[Callable[[Disk], object], tuple[str, ...]] = {
    rebuild: NOT_REBUILT,
    backup: COPIED_UNREAD,
}
READ = [
    (command, what)
    for command in (start, verify, quarantine, rebuild, backup)
    for what in LATER
    if what not in UNREAD.get(command, ())
]


@pytest.mark.parametrize(("command", "what"), READ)
@pytest.mark.parametrize("is_clean", [True, False])
def test_B13_every_command_refuses_what_a_later_version_wrote_and_changes_nothing(
    what: str, is_clean: bool, command: Callable[[Disk], object]
) -> None:
    directory = written_later(what, is_clean=is_clean)
    before = directory.files()
    disk = RecordingDisk(directory.image)
    with pytest.raises(UnknownFormatError) as caught:
        command(disk)
    assert "later" in caught.value.remedy
    directory.image = disk.image
    assert directory.files() == before


@pytest.mark.parametrize("what", COPIED_UNREAD)
def test_B13_a_backup_of_what_it_does_not_read_is_refused_like_the_original(what: str) -> None:
    copy = RecordingDisk()
    source = RecordingDisk(written_later(what, is_clean=True).image)
    back_up(source, copy, FakeClock(), link=lambda path: False)
    for command in (start, verify):
        with pytest.raises(UnknownFormatError):
            command(RecordingDisk(copy.image))


def test_B13_a_later_frame_behind_a_torn_one_keeps_the_tail_from_being_cut() -> None:
    """It may have been acknowledged: what stands before it is not known to be the end of the log."""
    directory = Directory(is_clean=False, has_checkpoint=False)
    directory.remove(layout.SCHEDULE_TABLE)
    path = max(name for name in directory.files() if name.startswith(f"{layout.COMMIT_LOG}/000"))
    directory.change(path, stamped_as(-1, 4, 2))
    before_last = frames_in(directory.content(path))[-2]
    directory.change(path, flip(before_last + 60))
    before = directory.files()
    for command in (start, verify, quarantine, rebuild):
        disk = RecordingDisk(directory.image)
        with pytest.raises(UnknownFormatError, match="version 2"):
            command(disk)
        assert directory.files() == before


def test_B13_a_stamp_that_does_not_fit_is_damage_and_no_later_version() -> None:
    directory = Directory(is_clean=False)
    path = max(name for name in directory.files() if name.startswith(f"{layout.COMMIT_LOG}/000"))
    last = frames_in(directory.content(path))[-1]
    for position in (last + 4, last + 5):
        original = directory.content(path)
        directory.change(path, flip(position))
        assert directory.refusal().segment == path
        directory.put(path, original)


@pytest.mark.parametrize("log", LOGS)
@pytest.mark.parametrize(("field", "what"), [(4, "version 2"), (5, "kind 99")])
def test_B13_later_frames_of_delayed_messages_are_refused_and_never_given_up(
    tmp_path: Path, log: str, field: int, what: str
) -> None:
    rig = DelayRig(tmp_path / "data")
    due_ms = rig.clock.now_ms() + HOUR_MS
    rig.send_delayed({b"one": due_ms, b"two": due_ms})
    assert rig.cancel(rig.find_all()[0]) == [DelayedState.CANCELLED]
    rig.close()
    path = next(one for one in (tmp_path / "data" / log).rglob("*") if one.is_file())
    later = stamped_as(-1, field, 2 if field == 4 else 99)(path.read_bytes())
    path.write_bytes(later)
    disk = OsDisk(str(tmp_path / "data"))
    for command in (verify, quarantine):
        with pytest.raises(UnknownFormatError, match=what):
            command(disk)
    with pytest.raises(UnknownFormatError, match=what):
        Store.open(disk, FakeClock(), DelayRig.options_of({}))
    disk.close()
    done = CliRunner().invoke(store_command, ["dump", log, str(tmp_path / "data")])
    assert done.exit_code == ExitCode.DIRECTORY, done.output
    assert path.read_bytes() == later


@pytest.mark.parametrize("log", [layout.COMMIT_LOG, layout.ACTION_LOG])
@pytest.mark.parametrize(("field", "value"), [(4, 2), (5, 99)])
def test_B13_later_frames_in_old_segments_are_never_given_up(
    tmp_path: Path, log: str, field: int, value: int
) -> None:
    data = tmp_path / "data"
    rig = DelayRig(data, segment_bytes=4096, action_segment_bytes=2048, growth_bytes=1024)
    for _ in range(20):
        rig.send(b"m" * 400)
        rig.settle(rig.pull().ack())
    rig.close()
    path = sorted((data / log).glob("0*"))[0]
    path.write_bytes(stamped_as(2, field, value)(path.read_bytes()))
    files = [one for one in data.rglob("*") if one.is_file() and one.name != layout.LOCK]
    before = {one: one.read_bytes() for one in files}
    disk = OsDisk(str(data))
    is_commit = log == layout.COMMIT_LOG
    for command in (verify, quarantine, rebuild if is_commit else start):
        with pytest.raises(UnknownFormatError):
            command(disk)
    disk.close()
    kind = "frames" if is_commit else "actions"
    done = CliRunner().invoke(store_command, ["dump", kind, str(data)])
    assert done.exit_code == ExitCode.DIRECTORY, done.output
    assert {one: one.read_bytes() for one in files} == before


def test_B13_the_commands_say_which_version_is_needed(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "data")
    rig.send(b"one")
    rig.close()
    path = tmp_path / "data" / FIRST
    path.write_bytes(stamped_as(-1, 5, 99)(path.read_bytes()))
    for words in (["verify"], ["dump", "frames"], ["dump", "records"], ["rebuild"]):
        arguments = [*words, str(tmp_path / "data"), *(["queues"] if words == ["rebuild"] else [])]
        done = CliRunner().invoke(store_command, arguments)
        assert done.exit_code == ExitCode.DIRECTORY, done.output
        assert "of kind 99" in done.output
        assert "Start the version that wrote it, or a later one" in done.output


#: Which kinds of rows are made of what a later version wrote.
DUMPED_LATER = {
    "a version of the last frame": ("frames", "records"),
    "a kind of the last frame": ("frames", "records"),
    "a version of an action frame": ("actions",),
    "a kind of an action frame": ("actions",),
    "a version of a segment head": ("frames", "records"),
    "a field of FORMAT": DUMPED,
    "a magic of a checkpoint": ("checkpoint",),
    "a field of a checkpoint": ("checkpoint",),
    "a field of state/retained": ("retained", "entries"),
    "a field of state/keepers": ("keepers",),
    "a field of state/schedule": (),
    "a field of a snapshot": ("snapshot",),
    "a version of groups": ("snapshot",),
}


@pytest.mark.parametrize("what", LATER)
def test_B13_dump_shows_nothing_of_what_a_later_version_wrote(tmp_path: Path, what: str) -> None:
    directory = written_later(what, is_clean=True)
    for path, content in directory.files().items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    for kind in DUMPED_LATER[what]:
        done = CliRunner().invoke(store_command, ["dump", kind, str(tmp_path), "--limit", "999"])
        assert done.exit_code == ExitCode.DIRECTORY, (kind, done.output)
        assert "Start the version that wrote it, or a later one" in done.output


def test_B13_flags_of_a_record_that_only_a_later_version_knows_are_refused(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    frame = parse_message_frame(make_frame([b"x", b"y"]))
    records = [frame.record(0), with_flags(frame.record(1), 0b10000)]
    later = parse_message_frame(build_message_frame({SUBJECT: records}))
    rig.store.append([later])
    rig.store.commit_and_step()
    rig.close()
    for words in (["dump", "records"], ["verify", "--deep"]):
        done = CliRunner().invoke(store_command, [*words, str(tmp_path)])
        assert done.exit_code == ExitCode.DIRECTORY, done.output
        assert "flags 0x10" in done.output
        assert "Start the version that wrote it, or a later one" in done.output


@pytest.mark.parametrize("what", COPIED_UNREAD)
def test_B13_what_a_backup_copies_without_reading_is_refused_in_the_copy(what: str) -> None:
    directory, copy = written_later(what, is_clean=True), RecordingDisk()
    back_up(RecordingDisk(directory.image), copy, FakeClock(), link=lambda path: False)
    with pytest.raises(UnknownFormatError):
        start(copy)
