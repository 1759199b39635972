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


def made(root: Path) -> OsDisk:
    disk = OsDisk(str(root))
    disk.make_directory("state")
    return disk


def test_keepers_are_written_as_in_version_1(tmp_path: Path) -> None:
    write_keepers(made(tmp_path), STORE_ID, KEEPERS)
    assert (tmp_path / PATH).read_bytes() == golden("keepers")


def test_the_golden_keepers_are_read_and_those_of_another_store_are_refused(tmp_path: Path) -> None:
    disk = made(tmp_path)
    assert read_keepers(disk, STORE_ID) == ()
    (tmp_path / PATH).write_bytes(golden("keepers"))
    assert read_keepers(disk, STORE_ID) == KEEPERS
    with pytest.raises(CorruptionError, match="of store 00112233"):
        read_keepers(disk, bytes(16))
