"""Giving up damage of the action log, by explicit option: groups go back to where it is whole.

The state of the groups is a snapshot plus the actions after it, and no action can be applied
without those before it: an ack after a lost hand-out would skip messages that nobody was given. So
everything from the first damaged byte on is given up, including good frames behind it. The groups
go back to their state at that point, and what was settled since is delivered again. No message is
lost by that.

A group created in the part that is given up is forgotten: whoever pulls for it creates it anew. If
both snapshots are damaged and the log does not reach back to its beginning, that happens to all
groups.

Damage below the snapshot is covered and changes nothing: the groups are known without it. But no
older snapshot may go on through what is covered, so the newest one is first written over it. Where
damage reaches from below it beyond it, a frame has to begin at the snapshot: a start reads from there.
"""

from __future__ import annotations

from qmq_broker.clock import Clock
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk
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
        self._snapshots = SnapshotFiles(disk, format_.store_id)
        below = [hole for hole in verdict.damaged if hole.next_offset <= snapshot_offset]
        #: Whether the older snapshot would have to go on through what is covered.
        self._is_older_unfit = any(
            hole.next_offset > self._snapshots.first_offset for hole in below
        )
        #: Whole, including the good frames behind the damage.
        self._ranges = below.copy()
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
            for piece in _cut_at(snapshot_offset, whole)
            for part in by_segment(self._segments, piece.first_offset, piece.next_offset)
        ]
        self._stamped = self._stamps([part for part, _ in self._parts], verdict)

    def run(self) -> list[QuarantineReport]:
        """Report, keep, cover; durable on return."""
        reports = [self._told(whole) for whole in self._ranges]
        newest = self._snapshots.newest
        if self._is_older_unfit and newest is not None:
            self._snapshots.write(newest.offset, newest.content)  # over the older one
        # The damage last: until then the log stops any start, so none goes on behind it.
        for (part, frames), stamp in reversed([*zip(self._parts, self._stamped, strict=True)]):
            epoch, stored_at_ms = stamp
            self._cover.cover(part, frames, epoch=epoch, stored_at_ms=stored_at_ms)
        if self._is_unknown:
            for _ in layout.SNAPSHOTS:
                self._snapshots.write(self._end, b"")
        return reports

    def _begins_later(self) -> bool:
        return not self._segments.has(0)

    def _told(self, whole: DamagedRange) -> QuarantineReport:
        parts = [
            part
            for part, _ in self._parts
            if whole.first_offset <= part.first_offset < whole.next_offset
        ]
        return self._report(whole, parts, [])


def _cut_at(offset: int, whole: DamagedRange) -> list[DamagedRange]:
    """A range in two pieces, if this is inside it."""
    if not whole.first_offset < offset < whole.next_offset:
        return [whole]
    return [whole._replace(next_offset=offset), whole._replace(first_offset=offset)]
