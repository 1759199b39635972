"""The list of bugs that the crash tests must be able to find, each with the search that finds it.

A bug is a switch of the test build: a function that replaces another one, or a disk that skips calls. A default
run's sample of the crash states must find it. `LOG_BUGS` are known from other logs; `MORE_BUGS` came up here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import pytest

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.files import layout
from qmq_client.wire.errors import QmqError
from tests.broker.storage.damaged import Directory, flip
from tests.crash import planted_opening as opening
from tests.crash import planted_writing as writing
from tests.crash.enumeration import CHECKED, crash_again, crash_everywhere, crash_in_recovery
from tests.crash.random_lives import random_life
from tests.crash.recording_disk import Operation, RecordingDisk
from tests.crash.scenarios import (
    GIVING_UP,
    SCENARIOS,
    Scenario,
    a_full_disk,
    appends_before_a_sync,
    checkpoints_and_flushes,
    failed_syncs,
    first_start,
    keepers,
    keepers_by_force,
    kills,
    kills_among_recycled_segments,
    repeats,
    restarts_without_messages,
    retention,
    retention_by_age,
    retention_of_a_quiet_subject,
    retention_once,
    rolls,
    snapshots,
    snapshots_and_kills,
)
from tests.crash.world import OPTIONS, BrokenPromiseError

Plant: TypeAlias = Callable[[pytest.MonkeyPatch], None]
MakeDisk: TypeAlias = Callable[[], RecordingDisk]
Search: TypeAlias = Callable[[MakeDisk], object]

LIVES: tuple[Scenario, ...] = (*SCENARIOS, *(random_life(seed) for seed in range(12)))
RETAINING_LIVES = (retention, retention_of_a_quiet_subject, kills_among_recycled_segments)


class ForgetfulDisk(RecordingDisk):
    """A disk on which some calls of some files do nothing."""

    def __init__(self, call: str, path: str, *, spared: int = 0) -> None:
        super().__init__()
        self._call = call
        self._path = path
        self._spared = spared

    def perform(self, call: str, path: str, operation: Operation) -> None:
        if call == self._call and path.startswith(self._path):
            self._spared -= 1
            if self._spared < 0:
                return
        super().perform(call, path, operation)


def crashed(make_disk: MakeDisk, *, lives: Sequence[Scenario] = LIVES) -> None:
    """Crash these lives everywhere."""
    for life in lives:
        crash_everywhere(life, make_disk(), one_in=CHECKED)


def crashed_in_recovery(
    make_disk: MakeDisk,
    *,
    lives: Sequence[Scenario] = LIVES,
    every: int = 3,
    last: int | None = None,
) -> None:
    """Crash recoveries of these lives, or of their last operations."""
    for life in lives:
        crash_in_recovery(life, make_disk(), every=every, last=last, one_in=CHECKED)


def crashed_again(make_disk: MakeDisk, *, lives: Sequence[Scenario], every: int = 5) -> None:
    """Crash second lives behind these."""
    for life in lives:
        crash_again(life, make_disk(), every=every, one_in=CHECKED)


def damaged(make_disk: MakeDisk) -> None:
    """Damage accepted data in segments that are not the last: every opening must refuse."""
    for path in (
        layout.segment_path(layout.COMMIT_LOG, 0),
        layout.segment_path(layout.COMMIT_LOG, OPTIONS.segment_bytes),
        layout.segment_path(layout.ACTION_LOG, 0),
    ):
        for position in range(100, 800, 100):
            directory = Directory(is_clean=False)
            directory.forget_queues()
            directory.change(path, flip(position))
            try:
                directory.open()
            except CorruptionError:
                continue
            raise BrokenPromiseError(f"B4: opened with byte {position} of {path} altered")


class Bug(NamedTuple):
    """One bug and how it is looked for."""

    plant: Plant | None = None
    search: Search = crashed
    make_disk: MakeDisk = RecordingDisk

    def is_found(self, monkeypatch: pytest.MonkeyPatch) -> bool:
        """Plant it and search; a life or a store that breaks under it counts too."""
        if self.plant is not None:
            self.plant(monkeypatch)
        try:
            self.search(self.make_disk)
        except (BrokenPromiseError, QmqError):
            return True
        return False


def forgetful(call: str, path: str, *, spared: int = 0) -> MakeDisk:
    """Disks on which these calls do nothing, but for the first ones."""
    return lambda: ForgetfulDisk(call, path, spared=spared)


def retaining(plant: Plant | None = None, make_disk: MakeDisk = RecordingDisk) -> Bug:
    """A bug in giving up old segments."""
    return Bug(plant, partial(crashed, lives=RETAINING_LIVES), make_disk)


#: Bugs that logs have had, in any product.
LOG_BUGS: dict[str, Bug] = {
    "commits are not synced": Bug(make_disk=forgetful("sync", "commitlog/")),
    "answered before the sync": Bug(writing.an_acknowledgement_before_the_sync),
    # The opening syncs it twice: with the first segment, and before.
    "the directory is not synced after a roll": Bug(
        make_disk=forgetful("sync_directory", "commitlog", spared=2)
    ),
    "the old segment is not synced at a roll": Bug(writing.a_sealed_segment_is_not_synced),
    "no checksum": Bug(opening.no_checksum),
    "a checksum that does not reach as far as the length": Bug(
        opening.a_checksum_over_the_head_alone
    ),
    "a checksum that says nothing of the place": retaining(
        opening.old_frames_are_believed_wherever_they_stand
    ),
    "visible before it is durable": Bug(writing.messages_visible_before_the_sync),
    "a gap ends the log in its last segment only": Bug(
        opening.a_gap_ends_only_the_last_segment, damaged
    ),
    "recovery cuts what was accepted": Bug(opening.the_last_frame_is_cut),
    "the checkpoint comes before the data": Bug(
        writing.the_checkpoint_speaks_of_what_is_not_synced
    ),
    "a snapshot is renamed without a sync": Bug(
        None, partial(crashed, lives=(snapshots,)), forgetful("sync", "state/groups.")
    ),
    "actions are replayed twice": Bug(
        opening.the_action_log_is_replayed_twice, partial(crashed, lives=(snapshots_and_kills,))
    ),
    "the epoch is not raised": Bug(opening.epoch_is_not_raised),
    "the window of ids is not restored": Bug(
        opening.the_window_is_not_restored, partial(crashed, lives=(repeats, kills))
    ),
    "retention by the time of the wrong segment": Bug(
        writing.retention_by_the_time_of_the_wrong_segment,
        partial(crashed, lives=(retention_by_age,)),
    ),
    "a failed sync is tried again": Bug(
        writing.a_failed_sync_is_tried_again, partial(crashed, lives=(failed_syncs,))
    ),
    "a full disk leaves half a frame": Bug(
        writing.a_full_disk_leaves_half_a_frame_and_the_log_goes_on,
        partial(crashed, lives=(a_full_disk,)),
    ),
}

MORE_BUGS: dict[str, Bug] = {
    "actions are not synced": Bug(make_disk=forgetful("sync", "actionlog/")),
    "the root is not synced at the first start": Bug(make_disk=forgetful("sync_directory", "")),
    "a new format is not synced": Bug(
        make_disk=forgetful("sync", layout.draft_path(layout.FORMAT))
    ),
    "a bad frame is passed over": Bug(opening.bad_frames_are_skipped),
    "the table comes before the entries": Bug(writing.the_table_comes_before_the_entries),
    "the journal leaves an id out": Bug(writing.the_journal_leaves_an_id_out),
    "the journal leaves a queue out": Bug(writing.the_journal_leaves_a_queue_out),
    "the journal is written before the sync": Bug(writing.the_journal_is_written_before_the_sync),
    "the epoch is not written": Bug(opening.epoch_is_not_written),
    "the accepted tail is not made durable": Bug(
        opening.the_tail_is_not_made_durable,
        partial(crashed_in_recovery, lives=(first_start, rolls, checkpoints_and_flushes, kills)),
    ),
    "later segments stay": Bug(
        opening.later_segments_stay,
        partial(crashed_again, lives=(appends_before_a_sync, rolls, kills)),
    ),
    "stale frames are believed": Bug(
        opening.stale_frames_are_believed,
        partial(crashed_again, lives=(appends_before_a_sync, rolls, kills)),
    ),
    "a start believes names that are not durable": Bug(
        opening.names_in_state_are_believed_unsynced,
        # Few openings show it: those while files go that the new note does not tell of any more.
        partial(crashed_in_recovery, lives=(retention_once,), every=1, last=GIVING_UP),
    ),
    "a start writes the slot beside one that is not durable": Bug(
        opening.the_slot_that_was_read_is_believed_unsynced,
        partial(crashed_in_recovery, lives=(restarts_without_messages,), every=1),
    ),
    "a note of the beginning is not synced": retaining(
        make_disk=forgetful("sync", layout.draft_path(layout.RETAINED))
    ),
    "the name of that note is not synced": retaining(
        make_disk=forgetful("sync_directory", layout.STATE, spared=4)
    ),
    "a snapshot ahead of its log": Bug(
        writing.a_snapshot_before_the_sync_of_its_actions,
        partial(crashed, lives=(snapshots_and_kills,)),
    ),
    "a keeper is answered before it is noted": Bug(
        writing.a_keeper_is_answered_before_it_is_noted, partial(crashed, lives=(keepers,))
    ),
    "the note of keepers is not synced": Bug(
        search=partial(crashed, lives=(keepers,)),
        make_disk=forgetful("sync", layout.draft_path(layout.KEEPERS)),
    ),
    "retention asks no keeper": Bug(
        writing.retention_asks_no_keeper, partial(crashed, lives=(keepers,))
    ),
    "segments go all at once": Bug(
        writing.segments_go_all_at_once, partial(crashed, lives=(keepers_by_force,))
    ),
    "files go before the note": retaining(writing.files_go_before_the_note),
    "sequences are not noted": retaining(writing.sequences_are_not_noted),
    "more goes than was asked for": retaining(writing.more_goes_than_was_asked_for),
    "a spare is used under its old head": retaining(writing.a_spare_is_used_under_its_old_head),
}
