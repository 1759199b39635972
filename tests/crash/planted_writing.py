"""Bugs in writing, to be planted: each is a switch that a test turns on for its own time."""

from __future__ import annotations

from typing import Any

import pytest

from qmq_broker.errors import DiskError, DiskFullError
from qmq_broker.storage import keepers
from qmq_broker.storage.commit_log import CommitLog
from qmq_broker.storage.files.keepers import Keeper
from qmq_broker.storage.files.snapshots import GroupsContent, SnapshotFiles
from qmq_broker.storage.ids import journal as id_journal
from qmq_broker.storage.keepers import Keepers, LogOffsets
from qmq_broker.storage.logs import segmented_log
from qmq_broker.storage.logs.action_log import ActionLog
from qmq_broker.storage.logs.segmented_log import SegmentedLog
from qmq_broker.storage.logs.segments import Segments
from qmq_broker.storage.queues.consume_queue import ConsumeQueue
from qmq_broker.storage.queues.consume_queues import ConsumeQueues
from qmq_broker.storage.retention import Retention
from qmq_broker.storage.store import Store
from tests.crash.world import World


def an_acknowledgement_before_the_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(self: World) -> None:
        self.acknowledge()
        self.store.commit_and_step()

    monkeypatch.setattr(World, "sync", sync)


def messages_visible_before_the_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = ConsumeQueue.stage

    def stage_and_show(self: ConsumeQueue, entries: bytes) -> None:
        stage(self, entries)
        self.make_visible()

    monkeypatch.setattr(ConsumeQueue, "stage", stage_and_show)


def a_failed_sync_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time it says yes, for pages that look stored."""

    def sync_until_it_works(self: SegmentedLog) -> None:
        point = self._written_point()
        if point.durable_offset == self._durable.durable_offset:
            return
        file = self._segments.file(self._segments.base_of(point.last_frame_offset))
        try:
            file.sync()
        except DiskError:
            file.sync()
        self._durable = point

    monkeypatch.setattr(SegmentedLog, "sync", sync_until_it_works)


def a_full_disk_leaves_half_a_frame_and_the_log_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    flush, grow = SegmentedLog._flush, SegmentedLog._grow

    def grow_in_good_faith(self: SegmentedLog, base: int, length: int, stored_at_ms: int) -> None:
        if not self._segments.has(base):
            grow(self, base, length, stored_at_ms)

    def flush_what_has_room(self: SegmentedLog, offset: int, parts: list[bytes]) -> None:
        segments = self._segments
        if parts:
            base = segments.base_of(offset)
            try:
                segments.file(base).write(offset - base, parts)
            except DiskFullError:
                return

    assert flush is not None
    monkeypatch.setattr(SegmentedLog, "_grow", grow_in_good_faith)
    monkeypatch.setattr(SegmentedLog, "_flush", flush_what_has_room)


def retention_by_the_time_of_the_wrong_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a segment was begun says nothing of its last message."""

    def expired_offset(self: Store, now_ms: int) -> int:
        log = self._commit_log.log
        old = [b for b in log.bases() if log.made_at_ms(b) <= now_ms - self._options.retain_ms]
        return old[-1] + log.segment_bytes if old else 0

    monkeypatch.setattr(Store, "expired_offset", expired_offset)


def the_checkpoint_speaks_of_what_is_not_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SegmentedLog, "durable_point", property(SegmentedLog._written_point))
    monkeypatch.setattr(SegmentedLog, "durable_offset", property(lambda self: self.written_offset))
    append = CommitLog.append

    def append_and_tell(self: CommitLog, frames: Any) -> object:
        return append(self, frames)

    monkeypatch.setattr(CommitLog, "append", append_and_tell)


def the_table_comes_before_the_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """One queue's entries are in no file, but the table says that all are."""
    begin_flush = ConsumeQueues.begin_flush

    def plan_all_but_one(self: ConsumeQueues, indexed_offset: int) -> None:
        begin_flush(self, indexed_offset)
        if self._flush is not None and self._flush.queues:
            self._flush.queues.pop()

    monkeypatch.setattr(ConsumeQueues, "begin_flush", plan_all_but_one)


def the_journal_leaves_an_id_out(monkeypatch: pytest.MonkeyPatch) -> None:
    content = id_journal._content
    monkeypatch.setattr(id_journal, "_content", lambda added: content(added[:-1]))


def the_journal_leaves_a_queue_out(monkeypatch: pytest.MonkeyPatch) -> None:
    write_journal = ConsumeQueues.write_journal

    def write_all_but_one(self: ConsumeQueues, durable_offset: int, copied_offset: int) -> None:
        if self._unjournaled:
            self._unjournaled.popitem()
        write_journal(self, durable_offset, copied_offset)

    monkeypatch.setattr(ConsumeQueues, "write_journal", write_all_but_one)


def the_journal_is_written_before_the_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """It tells of frames that a power cut may take."""

    def commit_and_step(self: Store) -> None:
        self._queues.make_visible()
        self._queues.write_journal(self.written_offset, 0)
        self._commit_log.log.sync()
        self._make_visible()
        self._step()

    monkeypatch.setattr(Store, "commit_and_step", commit_and_step)


def a_sealed_segment_is_not_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    roll = SegmentedLog._roll

    def roll_without_sync(self: SegmentedLog, base: int) -> None:
        sealed = base - self._segments.segment_bytes
        if self._segments.has(sealed):
            file = self._segments.file(sealed)
            monkeypatch.setattr(file, "sync", lambda: None)
        roll(self, base)

    monkeypatch.setattr(segmented_log.SegmentedLog, "_roll", roll_without_sync)


def a_snapshot_before_the_sync_of_its_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    write = SnapshotFiles.write

    def write_ahead(self: ActionLog, offset: int, content: GroupsContent) -> int:
        write(self._snapshots, offset, content)
        self.log.sync()
        given_up = self.log.give_up_below(self._snapshots.first_offset)
        self.log.put_away()
        return given_up

    monkeypatch.setattr(ActionLog, "write_snapshot", write_ahead)


def files_go_before_the_note(monkeypatch: pytest.MonkeyPatch) -> None:
    note = Retention._note

    def files_first(self: Retention, first_offset: int) -> None:
        log = self._parts.commit_log
        log.give_up_below(first_offset)
        log.put_away()
        note(self, first_offset)

    monkeypatch.setattr(Retention, "_note", files_first)


def a_keeper_is_answered_before_it_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep = Keepers.keep

    def at_once(self: Keepers, name: str, told: LogOffsets, at_ms: int, **bounds: Any) -> Keeper:
        with monkeypatch.context() as patch:
            patch.setattr(keepers, "write_keepers", lambda *_: None)
            return keep(self, name, told, at_ms, **bounds)

    monkeypatch.setattr(Keepers, "keep", at_once)


def retention_asks_no_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = LogOffsets(keepers.NO_BOUND, keepers.NO_BOUND)
    monkeypatch.setattr(Keepers, "needed", nobody)


def segments_go_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names are synced when the last of them is gone."""
    put_away = Segments.put_away

    def put_away_together(self: Segments, **options: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(self.disk, "sync_directory", lambda path: None)
            put_away(self, **options)
        self.disk.sync_directory(self.directory)

    monkeypatch.setattr(Segments, "put_away", put_away_together)


def sequences_are_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConsumeQueues, "sequences_at", lambda self, offset: {})


def more_goes_than_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    give_up_below = SegmentedLog.give_up_below
    monkeypatch.setattr(
        SegmentedLog,
        "give_up_below",
        lambda self, offset: give_up_below(self, offset + self.segment_bytes),
    )


def a_spare_is_used_under_its_old_head(monkeypatch: pytest.MonkeyPatch) -> None:
    adopt = Segments.adopt
    monkeypatch.setattr(Segments, "adopt", lambda self, base, head: adopt(self, base, b""))
