"""Giving up damage of the action log, by explicit option: groups are set back to where it is whole.

What consumers did is known from a snapshot and the actions behind it. An action cannot be taken without
those before it: an ack behind a hand-out that is lost would pass over messages that nobody was given. So
everything from the first damaged byte on is given up, also the good frames behind it; the groups stand
where they were there, and what was settled since is delivered again. Nothing is lost by that.

A group that was made in what is given up is not known any more: whoever pulls for it makes it anew. When
both snapshots are damaged and the log does not reach back to its beginning, that is so for all of them.

Damage below the snapshot is covered and changes nothing: the groups are known without it.
"""

from __future__ import annotations

from qmq_broker.clock import Clock
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk import Disk
from qmq_broker.storage.files.format_file import Format
from qmq_broker.storage.files.snapshots import SnapshotFiles
from qmq_broker.storage.upkeep.inspect_files import SmallFiles
from qmq_broker.storage.upkeep.inspect_log import DamagedRange
from qmq_broker.storage.upkeep.quarantine_cover import by_segment
from qmq_broker.storage.upkeep.quarantine_report import LogQuarantine, QuarantineReport
from qmq_broker.storage.upkeep.verify_log import LogVerdict


class ActionQuarantine(LogQuarantine):
    """One run over an action log that has holes. Close it."""

    def __init__(
        self, disk: Disk, clock: Clock, format_: Format, files: SmallFiles, verdict: LogVerdict
    ) -> None:
        """Decides; changes nothing."""
        super().__init__(disk, clock, format_, files, layout.ACTION_LOG)
        snapshot_offset = files.action_first_offset
        self._end = verdict.next_offset
        self._epoch = max(verdict.epoch, files.checkpoint.epoch if files.checkpoint else 0)
        #: Whole, with the good frames behind the damage.
        self._ranges = [hole for hole in verdict.damaged if hole.next_offset <= snapshot_offset]
        behind = [hole for hole in verdict.damaged if hole.next_offset > snapshot_offset]
        #: Neither a snapshot nor the log says where the groups began.
        self._is_unknown = bool(behind) and not snapshot_offset and self._begins_later()
        if behind:
            first = behind[0].first_offset
            if self._is_unknown:
                first = self._segments.base_of(self._end)
            self._ranges.append(DamagedRange(first, self._end, behind[0].reason))
        self._parts = [
            (part, self._cover.frames(part, []))
            for whole in self._ranges
            for part in by_segment(self._segments, whole.first_offset, whole.next_offset)
        ]

    def run(self) -> list[QuarantineReport]:
        """Report, keep, cover; durable on return."""
        reports = [self._told(whole) for whole in self._ranges]
        # The damage last: until then the log halts a start, and none goes on behind it.
        for part, frames in reversed(self._parts):
            stored_at_ms = self._stored_at_ms()
            self._cover.cover(part, frames, epoch=self._epoch, stored_at_ms=stored_at_ms)
        if self._is_unknown:
            for _ in layout.SNAPSHOTS:
                SnapshotFiles(self._disk, self._format.store_id).write(self._end, b"")
        return reports

    def _begins_later(self) -> bool:
        return not self._segments.has(0)

    def _stored_at_ms(self) -> int:
        last = self._files.checkpoint
        return last.action_log.last_stored_at_ms if last else self._clock.now_ms()

    def _told(self, whole: DamagedRange) -> QuarantineReport:
        parts = [
            part
            for part, _ in self._parts
            if whole.first_offset <= part.first_offset < whole.next_offset
        ]
        return self._report(whole, parts, [])
