"""The crash tests are worth something: each bug of the list is found by them, and nothing without."""

from __future__ import annotations

import pytest

from qmq_broker.storage.files import layout
from tests.crash.enumeration import crash_again, crash_everywhere
from tests.crash.planted import LOG_BUGS, MORE_BUGS, RETAINING_LIVES, Bug, ForgetfulDisk, damaged
from tests.crash.recording_disk import RecordingDisk
from tests.crash.scenarios import (
    checkpoints_and_flushes,
    clean_stops,
    kills_among_recycled_segments,
    snapshots,
)

BUGS = LOG_BUGS | MORE_BUGS


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_a_planted_bug_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bug.is_found(monkeypatch)


def test_nothing_is_found_where_nothing_is_planted(one_in: int) -> None:
    """Lives with another seed than in `test_crash_states.py`, and the search that is no crash."""
    for life in RETAINING_LIVES:
        crash_everywhere(life, RecordingDisk(), seed=2, one_in=one_in)
    damaged(RecordingDisk)


def test_the_list_of_bugs_is_whole() -> None:
    assert len(LOG_BUGS) == 18, "those that logs have had"
    assert len(BUGS) == len(LOG_BUGS) + len(MORE_BUGS)
    switches = [bug.plant for bug in BUGS.values() if bug.plant is not None]
    assert len(set(switches)) == len(switches)


def test_queue_files_that_are_not_synced_are_harmless(one_in: int) -> None:
    """They are derived and checked: the one place where a lost sync costs nothing but time."""
    for life in (checkpoints_and_flushes, clean_stops):
        crash_everywhere(life, ForgetfulDisk("sync", "consumequeue/"), one_in=one_in)


def test_one_snapshot_that_is_not_synced_is_harmless(one_in: int) -> None:
    """The other one and more of the log give the same groups."""
    for path in layout.SNAPSHOTS:
        disk = ForgetfulDisk("sync", layout.draft_path(path))
        crash_everywhere(snapshots, disk, one_in=one_in)


def test_B3_what_was_cut_in_a_recycled_segment_never_comes_back(one_in: int, sparser: int) -> None:
    life, every = kills_among_recycled_segments, 29 * sparser
    assert crash_again(life, RecordingDisk(), every=every, one_in=one_in) > 500
