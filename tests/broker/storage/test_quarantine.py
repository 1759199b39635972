"""Damaged ranges given up by explicit option: told, kept, covered, passed over; nothing valid is cut."""

from __future__ import annotations

import random
import shutil
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from qmq_broker.errors import CorruptionError
from qmq_broker.face.exit_codes import ExitCode
from qmq_broker.options import SEGMENT_BYTES
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.logs.frame_scan import FrameScan
from qmq_broker.storage.logs.kinds import COMMIT_KINDS
from qmq_broker.storage.logs.lost import LOST_FRAME_BYTES_MAX, LostRun, lost_frames
from qmq_broker.storage.logs.segments import SEGMENT_HEAD_BYTES, Segments
from qmq_broker.storage.store import Store
from qmq_broker.storage.upkeep.inspect_log import DamagedRange
from qmq_broker.storage.upkeep.quarantine import quarantine_damage
from qmq_broker.storage.upkeep.quarantine_report import QuarantineReport, RangeCover, read_reports
from qmq_broker.storage.upkeep.verify import verify_store
from qmq_client.commands.root import root
from qmq_client.wire.frame import FRAME_HEADER_BYTES, FrameKind
from tests.broker.service.rig import GROUP, SUBJECT, Rig
from tests.broker.storage.damage_cases import (
    FIRST,
    SECOND,
    SEGMENT,
    THIRD,
    directory_with_groups,
    remove_all,
)
from tests.broker.storage.damaged import WITNESSES, Directory, flip, without_its_last_frame
from tests.crash.power_cut import cut_states
from tests.crash.recording_disk import Image, RecordingDisk, RecordingFile, images
from tests.crash.world import OPTIONS, World, make_frame
from tests.kit.broker_process import BrokerProcess
from tests.kit.clock import FakeClock

Harm = Callable[[Directory], None]


def _in_two_places(directory: Directory) -> None:
    directory.change(FIRST, flip(300))
    directory.change(THIRD, flip(130))


HARMS: dict[str, Harm] = {
    "a header": lambda d: d.change(FIRST, flip(88 + 9)),
    "a body": lambda d: d.change(FIRST, flip(700)),
    "a segment head": lambda d: d.change(SECOND, flip(60)),
    "a page of zeros": lambda d: d.change(SECOND, lambda c: c[:512] + bytes(512) + c[1024:]),
    "a page of ones": lambda d: d.change(FIRST, lambda c: c[:1024] + b"\xff" * 512 + c[1536:]),
    "a segment that is cut": lambda d: d.change(FIRST, lambda c: c[:1000]),
    "an empty segment": lambda d: d.put(SECOND, b""),
    "the first segment": lambda d: d.remove(FIRST),
    "a segment in the middle": lambda d: d.remove(SECOND),
    "the last frame": lambda d: d.change(THIRD, flip(d.next_offset % SEGMENT - 20)),
    "the last segment": lambda d: d.remove(THIRD),
    "all but the last segment": lambda d: remove_all(d, (FIRST, SECOND)),
    "everything": lambda d: d.remove(layout.COMMIT_LOG),
    "two places": _in_two_places,
}


def quarantine(directory: Directory) -> list[QuarantineReport]:
    disk = RecordingDisk(directory.image)
    reports = quarantine_damage(disk, FakeClock())
    directory.image = disk.image
    return reports


def lost_of(reports: list[QuarantineReport]) -> dict[str, set[int]]:
    lost: dict[str, set[int]] = {}
    for report in reports:
        for run in report.lost:
            sequences = range(run.first_sequence, run.first_sequence + run.count)
            assert lost.setdefault(run.subject, set()).isdisjoint(sequences)
            lost[run.subject].update(sequences)
    return lost


def survivors(store: Store) -> dict[str, dict[int, bytes]]:
    """Sequence → record of every message that can be read."""
    found: dict[str, dict[int, bytes]] = {}
    for subject in store.subjects():
        queue = store.queue(subject)
        assert queue is not None
        entries = queue.entries(0, queue.next_sequence)
        assert len(entries) == queue.next_sequence, "sequences are dense"
        there = {n: entry for n, entry in enumerate(entries) if entry.record_bytes}
        records = store.read_records(list(there.values()), subject=subject)
        found[subject] = dict(zip(there, records, strict=True))
    return found


def check(directory: Directory, image: Image, lost: dict[str, set[int]]) -> None:
    """What is there is what was sent, at its sequence, but for what was told to be lost."""
    disk = RecordingDisk(image)
    store = Store.open(disk, FakeClock(), OPTIONS)
    found = survivors(store)
    for subject, records in directory.records.items():
        expected = {n: one for n, one in enumerate(records) if n not in lost.get(subject, set())}
        assert found.get(subject, {}) == expected
    frame = make_frame(directory.world.ids, {"orders": 10})
    placed = store.append([frame])
    store.commit_and_step()
    assert placed[0].places[0].first_sequence == len(directory.records["orders"])
    store.close()
    store = Store.open(disk, FakeClock(), OPTIONS)
    assert len(survivors(store)["orders"]) == len(found.get("orders", {})) + 1
    store.close()
    assert not [
        f for f in verify_store(disk, FakeClock(), check_groups=len).faults if f.level == "damaged"
    ]


@pytest.mark.parametrize("is_clean", [True, False])
@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_B4_a_damaged_range_is_reported_kept_and_passed_over(harm: Harm, is_clean: bool) -> None:
    directory = directory_with_groups() if is_clean else Directory(is_clean=False)
    harm(directory)
    damaged = directory.files()
    reports = quarantine(directory)
    assert reports
    files = directory.files()
    for report in reports:
        path = layout.quarantine_path(report.first_offset, report.next_offset, "raw")
        base = report.first_offset // SEGMENT * SEGMENT
        content = damaged.get(layout.segment_path(layout.COMMIT_LOG, base), b"")
        position = report.first_offset - base
        assert (
            files[path] == content[position : position + report.next_offset - report.first_offset]
        )
    assert read_reports(RecordingDisk(directory.image)) == reports
    lost = lost_of(reports)
    if harm is not HARMS["a segment head"]:
        assert lost
    check(directory, directory.image, lost)
    assert quarantine(directory) == [], "once is enough"


@pytest.mark.parametrize("gone", layout.CHECKPOINTS)
def test_B4_after_it_one_of_the_checkpoints_is_enough_whichever_it_is(gone: str) -> None:
    directory = directory_with_groups()
    HARMS["the last segment"](directory)
    lost = lost_of(quarantine(directory))
    directory.remove(gone)
    check(directory, directory.image, lost)


def test_B4_what_covers_damage_has_epoch_and_time_of_what_follows_it() -> None:
    world = World(RecordingDisk())
    for _ in range(2):
        for _ in range(3):
            world.send(world.frame(orders=100))
            world.clock.pass_ms(1_000)
        world.store.close()
        world = World(world.disk, history=world.history, ids=world.ids, clock=world.clock)
    world.disk.unlock()
    file = world.disk.open(FIRST)
    file.write(300, [b"\xff"])
    (report,) = quarantine_damage(world.disk, FakeClock())
    segments = Segments(world.disk, layout.COMMIT_LOG, SEGMENT)
    scan = FrameScan(segments, COMMIT_KINDS, store_id=world.store.store_id, first_offset=0)
    headers = [frame.header for frame in scan]
    assert scan.next_offset == world.store.durable_offset
    (lost,) = [one for one in headers if one.kind is FrameKind.LOST]
    assert lost.physical_offset == report.first_offset
    (behind,) = [one for one in headers if one.physical_offset == report.next_offset]
    assert (lost.epoch, lost.stored_at_ms) == (behind.epoch, behind.stored_at_ms)
    assert {one.epoch for one in headers} == {1, 2}


@pytest.mark.parametrize("witness", WITNESSES)
def test_B4_what_a_shorter_log_has_lost_is_given_up_whoever_says_so(witness: str) -> None:
    directory = without_its_last_frame(witnesses=[witness])
    disk = RecordingDisk(directory.image)
    (report,) = quarantine_damage(disk, FakeClock())
    assert (report.log, report.next_offset) == (layout.COMMIT_LOG, directory.next_offset)
    store = Store.open(RecordingDisk(disk.image), FakeClock(), OPTIONS)
    assert store.durable_offset == directory.next_offset
    knows_entries = witness in {"table of the queues", "journal of entries"}
    lost = {run.subject: run.count for run in report.lost}
    assert lost == ({"orders": 2, "Invoices": 1} if knows_entries else {})


def test_B4_nothing_is_given_up_where_nothing_is_damaged() -> None:
    directory = directory_with_groups()
    before = directory.files()
    assert quarantine(directory) == []
    assert directory.files() == before
    assert quarantine_damage(RecordingDisk(), FakeClock()) == []


def test_B4_what_is_no_range_of_a_log_is_not_given_up() -> None:
    directory = directory_with_groups()
    directory.change(layout.FORMAT, flip(9))
    with pytest.raises(CorruptionError):
        quarantine(directory)


@pytest.mark.parametrize(
    "name", ["a body", "a segment in the middle", "two places", "the last frame"]
)
def test_B4_a_power_cut_anywhere_in_a_quarantine_is_made_up_for_by_the_next(name: str) -> None:
    directory = directory_with_groups()
    HARMS[name](directory)
    # What was taken away does not come back by a power cut.
    directory.image.durable_names = dict(directory.image.names)
    disk = RecordingDisk(directory.image)
    lost = lost_of(quarantine_damage(disk, FakeClock()))
    rng = random.Random(5)
    states = 0
    for _, image in images(disk.first_image, disk.operations):
        for state in cut_states(image, rng, scattered=2):
            states += 1
            again = RecordingDisk(state)
            quarantine_damage(again, FakeClock())
            check(directory, again.image, lost)
    assert states > 30
    # What was told to be done is done: the last one needs no next.
    for state in cut_states(disk.image, rng, scattered=9):
        check(directory, state, lost)


def test_X3_a_power_cut_in_a_quarantine_never_changes_a_segment_that_a_backup_shares() -> None:
    directory = directory_with_groups()
    HARMS["two places"](directory)
    image = directory.image
    shared = {f"{path.rpartition('/')[2]}.backup": image.names[path] for path in (FIRST, THIRD)}
    image.names |= shared
    image.durable_names = dict(image.names)
    contents = {path: image.content(number) for path, number in shared.items()}
    disk = RecordingDisk(image)
    lost = lost_of(quarantine_damage(disk, FakeClock()))
    rng = random.Random(7)
    states = 0
    for _, before in images(disk.first_image, disk.operations):
        for state in cut_states(before, rng, scattered=2):
            states += 1
            again = RecordingDisk(state)
            quarantine_damage(again, FakeClock())
            for path, content in contents.items():
                for after in (state, again.image):
                    assert after.content(after.names[path]) == content
            check(directory, again.image, lost)
    assert states > 30
    # What was told to be done is done, also where a segment got a file of its own.
    for state in cut_states(disk.image, rng, scattered=9):
        check(directory, state, lost)


def test_B4_without_the_option_an_interrupted_quarantine_halts_or_refuses_or_is_whole() -> None:
    directory = directory_with_groups()
    HARMS["two places"](directory)
    disk = RecordingDisk(directory.image)
    lost = lost_of(quarantine_damage(disk, FakeClock()))
    outcomes = {"halts": 0, "refuses pulls": 0, "whole": 0}
    for _, image in images(disk.first_image, disk.operations):
        try:
            Store.open(RecordingDisk(image), FakeClock(), OPTIONS).close()
        except CorruptionError:
            outcomes["halts"] += 1
            continue
        try:
            check(directory, image, lost)
            outcomes["whole"] += 1
        except CorruptionError:
            outcomes["refuses pulls"] += 1
    assert min(outcomes.values()) > 0


def test_a_long_range_is_covered_by_frames_that_a_scan_can_hold() -> None:
    runs = [LostRun("orders", 5, 7)]
    for range_bytes in (64, 1024, LOST_FRAME_BYTES_MAX, LOST_FRAME_BYTES_MAX + 8, 5 * 2**20 + 16):
        if range_bytes == 64:
            with pytest.raises(ValueError, match="no room"):
                lost_frames(range_bytes, runs)
            continue
        frames = lost_frames(range_bytes, runs)
        assert sum(map(len, frames)) == range_bytes
        assert all(FRAME_HEADER_BYTES < len(frame) <= LOST_FRAME_BYTES_MAX for frame in frames)


class Sink(RecordingFile):
    """A file that keeps where something was written, and nothing of it."""

    def __init__(self, file: RecordingFile) -> None:
        super().__init__(file._disk, file.path, file.number)
        self.written: dict[int, int] = {}

    def write(self, position: int, parts: Sequence[bytes | memoryview]) -> None:
        self.written[position] = sum(map(len, parts))


def test_B10_a_lost_segment_of_a_gib_is_covered_in_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    segment_bytes = 1 << 30
    disk = RecordingDisk()
    segments = Segments(disk, layout.COMMIT_LOG, segment_bytes)
    segments.make(0, SEGMENT_HEAD_BYTES, bytes(SEGMENT_HEAD_BYTES))
    sink = Sink(disk.open(segments.path(0)))
    monkeypatch.setattr(segments, "file", lambda _: sink)
    cover = RangeCover(disk, segments, b"s" * 16)
    hole = DamagedRange(0, segment_bytes, "gone")
    tracemalloc.start()
    frames = cover.frames(hole, [LostRun("orders", 5, 7)])
    cover.cover(hole, frames, epoch=3, stored_at_ms=1)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    ends = [position + count for position, count in sorted(sink.written.items())]
    assert sorted(sink.written) == [0, *ends[:-1]], "without a gap, each once"
    assert ends[-1] == segment_bytes
    assert peak_bytes < 16 * LOST_FRAME_BYTES_MAX


def _damaged_rig(tmp_path: Path) -> Rig:
    """Ten messages one by one, the group had two of them; the fifth and the sixth are damaged."""
    rig = Rig(tmp_path / "data")
    offsets = [rig.send(b"%d" % number).physical_offset for number in range(10)]
    given = rig.pull(max_messages=2)
    rig.settle(given.ack(given.part(0)))
    rig.settle(given.nack(delay_ms=0))
    rig.close()
    path = tmp_path / "data" / "commitlog" / f"{0:020d}"
    content = bytearray(path.read_bytes())
    for number in (1, 4, 5):
        content[offsets[number] + 90] ^= 1
    path.write_bytes(content)
    # A start without it reads the frames.
    shutil.rmtree(tmp_path / "data" / layout.IDS)
    return rig


def test_B4_a_group_gets_everything_but_what_is_lost_and_that_is_counted(tmp_path: Path) -> None:
    rig = _damaged_rig(tmp_path)
    with pytest.raises(CorruptionError):
        rig.start()
    disk = OsDisk(str(rig.directory))
    assert lost_of(quarantine_damage(disk, rig.clock)) == {SUBJECT: {1, 4, 5}}
    rig.start()
    rig.pass_ms(100_000)
    sequences: list[int] = []
    while (given := rig.pull()).bodies:
        sequences += given.sequences
        rig.settle(given.ack((given.part(0)[0], given.part(len(given.bodies) - 1)[1])))
    assert sorted(set(sequences)) == [2, 3, 6, 7, 8, 9]
    status = rig.broker.query.groups(group=GROUP)[0]
    assert (status.lost, status.lag) == (3, 0)
    peeked = rig.broker.query.records(SUBJECT, first_sequence=0, count=20)
    assert [sequence for sequence, _ in peeked.records] == [0, 2, 3, 6, 7, 8, 9]
    assert peeked.next_sequence == 10
    peeked = rig.broker.query.records(SUBJECT, first_sequence=4, count=2)
    assert ([sequence for sequence, _ in peeked.records], peeked.next_sequence) == ([6, 7], 8)
    rig.restart()
    assert rig.broker.query.groups(group=GROUP)[0].lost == 3
    assert not rig.pull().bodies
    rig.close()


def test_B4_the_broker_starts_on_damaged_data_only_with_the_option(tmp_path: Path) -> None:
    rig = _damaged_rig(tmp_path)
    assert BrokerProcess(rig.directory).run_to_end() == ExitCode.CORRUPTION
    with BrokerProcess(rig.directory, "--quarantine") as process:
        assert process.log.count("quarantined") == 3
        assert f'lost="{SUBJECT} 1 to 1"' in process.log
        words = ["tail", SUBJECT, "--first", "0", "-n", "2", "--broker", process.url]
        shown = CliRunner().invoke(root, words)
        assert [line.split()[0] for line in shown.stdout.splitlines()] == ["0", "2"]
        assert shown.stderr == "gone: 1 of the messages 0 to 2\n"
        assert process.stop() == ExitCode.OK
    with BrokerProcess(rig.directory) as process:
        assert process.stop() == ExitCode.OK


def test_B13_a_broker_that_is_refused_has_given_up_nothing(tmp_path: Path) -> None:
    rig = _damaged_rig(tmp_path)
    before = {path: path.read_bytes() for path in rig.directory.rglob("*") if path.is_file()}
    other = ("--segment-bytes", str(SEGMENT_BYTES), "--quarantine")
    assert BrokerProcess(rig.directory, *other).run_to_end() == ExitCode.DIRECTORY
    assert {
        path: path.read_bytes() for path in rig.directory.rglob("*") if path.is_file()
    } == before
