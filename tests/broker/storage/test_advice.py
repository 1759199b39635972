"""Every advice of `verify` is followed here, over every file under every harm, and works at the first try."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qmq_broker.errors import CorruptionError, StoreError, UnknownFormatError
from qmq_broker.service.delivery.snapshot import check_groups
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.files.faults import Fault, Level
from qmq_broker.storage.keepers import LogOffsets
from qmq_broker.storage.logs.kinds import COMMIT_KINDS
from qmq_broker.storage.store import Store
from qmq_broker.storage.upkeep.quarantine import quarantine_damage
from qmq_broker.storage.upkeep.rebuild import rebuild_store
from qmq_broker.storage.upkeep.verify import Verification, verify_store
from tests.broker.delay.delay_rig import HOUR_MS, DelayRig
from tests.broker.service.rig import Rig
from tests.broker.storage.later import frames_in
from tests.kit.clock import FakeClock

OPTIONS: dict[str, Any] = {
    "segment_bytes": 4096,
    "action_segment_bytes": 2048,
    "growth_bytes": 1024,
    "checkpoint_ms": 1,
    "queue_flush_bytes": 2048,
}


def live(directory: Path, how: str) -> None:
    """A store with every kind of file, and of some of them several."""
    rig = DelayRig(directory, **OPTIONS | HOW[how])
    store = rig.store
    store.keep("archive", LogOffsets(0, 0), rig.now_ms)
    for number in range(9):
        rig.send(*[b"m" * 200] * 2, key=f"k{number}")
        rig.send_delayed({b"%d" % number: rig.now_ms + (number % 3 + 1) * HOUR_MS})
        rig.settle(rig.pull(max_messages=2).ack())
        rig.clock.pass_ms(1_000)
        store.actions.sync()
        for _ in range(3):
            store.step()
        if number in (3, 6):
            offset, content = rig.broker.delivery.snapshot(rig.now_ms)
            store.actions.write_snapshot(offset, content())
        while store.index.step(2**20).is_unfinished or store.summaries.step(2**20):
            pass
    if how == "stopped":
        rig.close()
    else:
        Rig.kill(rig)


#: How it ended, and its options.
HOW: dict[str, dict[str, Any]] = {
    "stopped": {},
    "killed": {},
    "killed with nothing copied": {"queue_flush_bytes": 2**30},
}


class Patient:
    """A directory that is harmed, and one that is whole, as a backup is."""

    def __init__(self, whole: Path, directory: Path) -> None:
        self.whole = whole
        self.directory = directory

    def admit(self) -> None:
        """Begin again with a whole directory."""
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.copytree(self.whole, self.directory)

    def verify(self) -> Verification:
        with_disk = OsDisk(str(self.directory))
        try:
            return verify_store(with_disk, FakeClock(), check_groups=check_groups)
        finally:
            with_disk.close()

    def start(self, *, is_quarantining: bool = False) -> None:
        """Start as the broker does, and stop in order; raises what keeps it from that."""
        options = DelayRig.options_of(OPTIONS)
        disk = OsDisk(str(self.directory))
        try:
            if is_quarantining:
                quarantine_damage(disk, FakeClock(), check_groups=check_groups)
            store = Store.open(disk, FakeClock(), options, check_groups=check_groups)
            try:
                list(store.actions.replay())
                while store.index.step(2**20).is_unfinished or store.summaries.step(2**20):
                    pass
            finally:
                store.close()
        finally:
            disk.close()

    def put_back(self, path: str) -> None:
        shutil.copy(self.whole / path, self.directory / path)

    def follow(self) -> str:
        """Follow what `verify` says of each fault; what is not as it said, or nothing."""
        found = self.verify()
        stopping = [fault for fault in found.faults if "does not start" in fault.meaning]
        if not stopping:
            return self._serves(found)
        copy = Patient(self.whole, self.directory.with_name("copy"))
        shutil.rmtree(copy.directory, ignore_errors=True)
        shutil.copytree(self.directory, copy.directory)
        try:
            copy.start()
        except (CorruptionError, UnknownFormatError):
            return self._mended(found)
        return f"starts, but: {stopping[0].line()}"

    def _serves(self, found: Verification) -> str:
        try:
            if found.worst is Level.REBUILT and len(found.faults) % 2:
                disk = OsDisk(str(self.directory))
                rebuild_store(disk, FakeClock(), with_index=True)
                disk.close()
            self.start()
        except StoreError as error:
            return f"does not start: {error}; told: {[one.line() for one in found.faults]}"
        left = self.verify()
        if found.worst is not Level.DAMAGED and left.worst not in (None, Level.IGNORED):
            return f"still {[one.line() for one in left.faults]}"
        return self._mended(found) if found.worst is Level.DAMAGED else ""

    def _mended(self, found: Verification) -> str:
        try:
            if found.faults[0].file == layout.FORMAT:
                assert "put it back" in found.faults[0].remedy
                assert "verify again" in found.faults[0].remedy
                self.put_back(layout.FORMAT)
                return self.follow()
            is_quarantining = self._follow_each(found.faults)
            self.start(is_quarantining=is_quarantining)
        except StoreError as error:
            told = [one.line() for one in found.faults]
            return f"the remedy does not work at the first try: {error}; told: {told}"
        left = [one for one in self.verify().faults if one.level is Level.DAMAGED]
        bad = [one.line() for one in left if "holds back" not in one.meaning]
        return f"mended, but {bad}" if bad else ""

    def _follow_each(self, faults: list[Fault]) -> bool:
        """Do what is said of each fault; whether a quarantine is."""
        is_quarantining = False
        for fault in faults:
            if fault.level is not Level.DAMAGED:
                continue
            if "Remove it" in fault.remedy:
                (self.directory / fault.file).unlink()
            elif "--quarantine" in fault.remedy:
                is_quarantining = True
            elif "Put the segment back" in fault.remedy:
                self.put_back(fault.file)
            else:
                assert "Restore a backup" in fault.remedy, fault.line()
                self.admit()
                return False
        return is_quarantining


def flipped(at: float) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        altered = bytearray(content)
        if altered:
            altered[int((len(altered) - 1) * at)] ^= 4
        return bytes(altered)

    return change


#: What becomes of a file.
HARMS: dict[str, Callable[[bytes], bytes]] = {
    "first byte flipped": flipped(0),
    "a byte flipped early": flipped(0.1),
    "a byte flipped in the middle": flipped(0.5),
    "last byte flipped": flipped(1),
    "cut in half": lambda content: content[: len(content) // 2],
    "last bytes cut": lambda content: content[:-9],
    "empty": lambda content: b"",
    "a page of zeros": lambda content: bytes(512) + content[512:],
}


@pytest.fixture(scope="module", params=HOW)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole") / "data"
    live(directory, request.param)
    return directory


@pytest.fixture
def patient(whole: Path, tmp_path: Path) -> Patient:
    return Patient(whole, tmp_path / "data")


def files_of(directory: Path) -> Iterator[str]:
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != layout.LOCK:
            yield str(path.relative_to(directory))


def folders_of(directory: Path) -> Iterator[str]:
    for path in sorted(directory.rglob("*")):
        if path.is_dir():
            yield str(path.relative_to(directory))


def test_B4_a_whole_store_is_well(patient: Patient) -> None:
    patient.admit()
    assert [fault.line() for fault in patient.verify().faults] == []
    assert patient.follow() == ""
    kinds = {name.partition("/")[0] for name in files_of(patient.whole)}
    assert kinds >= {"commitlog", "actionlog", "entries", "state", "ids", "summary"}


@pytest.mark.parametrize("harm", HARMS)
def test_B4_each_advice_works_at_the_first_try_when_one_file_is_harmed(
    patient: Patient, harm: str
) -> None:
    wrong = {}
    for path in files_of(patient.whole):
        patient.admit()
        file = patient.directory / path
        file.write_bytes(HARMS[harm](file.read_bytes()))
        if said := patient.follow():
            wrong[path] = said
    assert not wrong, "\n".join(f"{path}: {said}" for path, said in wrong.items())


def test_B4_each_advice_works_at_the_first_try_when_a_file_or_folder_is_missing(
    patient: Patient,
) -> None:
    wrong = {}
    for path in files_of(patient.whole):
        patient.admit()
        (patient.directory / path).unlink()
        if said := patient.follow():
            wrong[path] = said
    for path in folders_of(patient.whole):
        patient.admit()
        shutil.rmtree(patient.directory / path)
        if said := patient.follow():
            wrong[f"{path}/"] = said
    assert not wrong, "\n".join(f"{path}: {said}" for path, said in wrong.items())


def test_B4_each_advice_works_at_the_first_try_when_a_file_is_of_another_store(
    patient: Patient, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    live(other, "killed")
    wrong = {}
    for path in set(files_of(patient.whole)) & set(files_of(other)):
        patient.admit()
        shutil.copy(other / path, patient.directory / path)
        if said := patient.follow():
            wrong[path] = said
    assert not wrong, "\n".join(f"{path}: {said}" for path, said in wrong.items())


@pytest.mark.parametrize("how", ["stopped", "killed"])
@pytest.mark.parametrize("gone", ["", "state/actions", "checkpoint.1"])
def test_B4_an_older_action_log_with_its_checkpoints_is_noticed(
    tmp_path: Path, how: str, gone: str
) -> None:
    """Else what was acked since is delivered again, and nobody knows why."""
    rig = DelayRig(tmp_path / "data", **OPTIONS)
    old = tmp_path / "old"
    for number in range(4):
        rig.send(b"a")
        rig.settle(rig.pull().ack())
        rig.clock.pass_ms(1_000)
        rig.store.actions.sync()
        rig.store.step()
        if not number:
            shutil.copytree(tmp_path / "data", old)
    rig.close() if how == "stopped" else Rig.kill(rig)
    patient = Patient(tmp_path / "data", tmp_path / "patient")
    patient.admit()
    shutil.rmtree(patient.directory / layout.ACTION_LOG)
    for path in (layout.ACTION_LOG, *layout.CHECKPOINTS):
        if (old / path).is_dir():
            shutil.copytree(old / path, patient.directory / path)
        else:
            shutil.copy(old / path, patient.directory / path)
    if gone:
        (patient.directory / gone).unlink()
    if gone == "state/actions":
        return patient.start()  # nobody can know
    (found,) = [one for one in patient.verify().faults if one.level is Level.DAMAGED]
    assert found.file.startswith(layout.ACTION_LOG)
    assert "state/actions says synced up to" in found.what
    with pytest.raises(CorruptionError, match="state/actions says synced up to"):
        patient.start()
    assert patient.follow() == ""
    return None


def good_frames(patient: Patient) -> set[tuple[str, int]]:
    """Segment and place of each frame with messages that is as it was before any harm."""
    found = set()
    for path in (patient.whole / layout.COMMIT_LOG).glob("0*"):
        whole, harmed = path.read_bytes(), patient.directory / layout.COMMIT_LOG / path.name
        content = harmed.read_bytes() if harmed.exists() else b""
        for first in frames_in(whole):
            if whole[first + 5] not in COMMIT_KINDS or not whole[first + 7]:
                continue
            frame = slice(first, first + int.from_bytes(whole[first + 8 : first + 12]))
            if content[frame] == whole[frame]:
                found.add((path.name, first))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_B4_each_advice_works_at_the_first_try_when_two_files_are_harmed(
    patient: Patient, seed: int
) -> None:
    rng, wrong = random.Random(seed), {}
    paths = [*files_of(patient.whole)]
    for _ in range(25):
        patient.admit()
        harmed = {path: rng.choice([*HARMS, "missing"]) for path in rng.sample(paths, 2)}
        for path, harm in harmed.items():
            file = patient.directory / path
            if harm == "missing":
                file.unlink()
            else:
                file.write_bytes(HARMS[harm](file.read_bytes()))
        good = good_frames(patient)
        if said := patient.follow():
            wrong[str(harmed)] = said
        elif lost := good - good_frames(patient):
            wrong[str(harmed)] = f"lost what was good: {sorted(lost)}"
    assert not wrong, f"seed {seed}:\n" + "\n".join(map(": ".join, wrong.items()))


def test_B4_no_quarantine_gives_up_a_store_whose_FORMAT_is_that_of_another(
    patient: Patient, tmp_path: Path
) -> None:
    live(tmp_path / "other", "killed")
    patient.admit()
    shutil.copy(tmp_path / "other" / layout.FORMAT, patient.directory / layout.FORMAT)
    before = {path: (patient.directory / path).read_bytes() for path in files_of(patient.directory)}
    with pytest.raises(CorruptionError, match="the segments here are of store"):
        patient.start(is_quarantining=True)
    after = {path: (patient.directory / path).read_bytes() for path in files_of(patient.directory)}
    assert after == before


def test_B4_a_checkpoint_of_another_store_that_got_further_vouches_for_nothing(
    patient: Patient, tmp_path: Path
) -> None:
    """Else a start stops, and a quarantine covers space that was never written."""
    other = tmp_path / "other"
    live(other, "killed")
    rig = DelayRig(other, **OPTIONS)
    for _ in range(40):
        rig.send(b"m" * 900)
        rig.clock.pass_ms(1_000)
        rig.store.step()
    rig.close()
    for number, path in enumerate(layout.CHECKPOINTS):
        patient.admit()
        shutil.copy(other / path, patient.directory / path)
        if not number:
            assert patient.follow() == ""
        patient.start(is_quarantining=True)
        assert not (patient.directory / layout.QUARANTINE).exists()
        found = patient.verify()
        assert found.worst in (None, Level.IGNORED)
