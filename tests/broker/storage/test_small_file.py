"""Small files are replaced as a whole, whatever a power cut left of the last time."""

from __future__ import annotations

import random

import pytest

from qmq_broker.storage.files.layout import draft_path
from qmq_broker.storage.files.small_file import read_file, replace_file, unseal
from tests.crash.power_cut import cut_states
from tests.crash.recording_disk import PassingDisk, RecordingDisk, images

PATH = "state/keepers"
#: What stands in the place of less is not whole.
LONGER = b"old and longer"


def content(disk: RecordingDisk) -> bytes | None:
    data = read_file(disk, PATH)
    return None if data is None else unseal(data)


@pytest.mark.parametrize("is_half_renamed", [False, True])
def test_B3_a_file_is_the_old_or_the_new_one_wherever_the_power_goes(
    is_half_renamed: bool,
) -> None:
    """Also where of the last rename both names are left, which lead to one file."""
    disk = RecordingDisk()
    disk.make_directory("state")
    disk.sync_directory("")
    replace_file(disk, PATH, LONGER)
    if is_half_renamed:
        disk.image.name(draft_path(PATH), disk.image.names[PATH])
        disk.sync_directory("state")
    again = RecordingDisk(disk.image)
    replace_file(again, PATH, b"new")
    for count, image in images(again.first_image, again.operations):
        killed = content(PassingDisk(image.copy()))
        cut = {
            content(PassingDisk(one)) for one in cut_states(image, random.Random(1), scattered=9)
        }
        assert {killed, *cut} <= {LONGER, b"new"}, count
    assert content(again) == b"new"
    assert again.names("state") == ["keepers"]
