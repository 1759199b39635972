"""The golden table of keepers of version 1 is written, and read, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.files.keepers import Keeper, read_keepers, write_keepers
from tests.golden.storage_version_1 import NOW_MS, STORE_ID
from tests.golden.version_1 import golden

PATH = "state/keepers"
KEEPERS = (
    Keeper("archive", 2 << 30, 64 << 20, NOW_MS),
    Keeper("second-site", 3 << 30, 128 << 20, NOW_MS + 5_000, 1 << 30, 0),
)
#: It came when both logs did not begin at 0 any more; that was added to version 1 at the end.
BEGUN = (Keeper("archive", 3 << 30, 64 << 20, NOW_MS, 0, 0, 2 << 30, 64 << 20),)
GOLDEN = pytest.mark.parametrize(
    ("name", "keepers"), [("keepers", KEEPERS), ("keepers_begun", BEGUN)], ids=["first", "begun"]
)


def made(root: Path) -> OsDisk:
    disk = OsDisk(str(root))
    disk.make_directory("state")
    return disk


@GOLDEN
def test_keepers_are_written_as_in_version_1(
    tmp_path: Path, name: str, keepers: tuple[Keeper, ...]
) -> None:
    write_keepers(made(tmp_path), STORE_ID, keepers)
    assert (tmp_path / PATH).read_bytes() == golden(name)


@GOLDEN
def test_the_golden_keepers_are_read_and_those_of_another_store_are_refused(
    tmp_path: Path, name: str, keepers: tuple[Keeper, ...]
) -> None:
    disk = made(tmp_path)
    assert read_keepers(disk, STORE_ID) == ()
    (tmp_path / PATH).write_bytes(golden(name))
    assert read_keepers(disk, STORE_ID) == keepers
    with pytest.raises(CorruptionError, match="of store 00112233"):
        read_keepers(disk, bytes(16))
