"""Finds the end of a log's table by the names of its commits: as fast after years of small commits
as on the first day.

The ranges of a log follow each other, and a commit is named by what it holds,
`<store>-<first>-<next>`. So the last range is in the commit with the highest end. Whatever a run
that died has left is behind it: commits of tables that are written before the one that says how far
the log was read, and data files in the folder of the last range's day or of later days. Nothing
else needs to be read. A commit that replaces others (`merging.py`) is named by all that it holds,
so it never ends after the last of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from qmq_pipeline.tables.commits import RangeFacts
from qmq_pipeline.tables.lake import COMMITS, Lake
from qmq_pipeline.tables.lake_files import LakeFiles
from qmq_pipeline.tables.merging import Span
from qmq_pipeline.tables.small_files import read_commit
from qmq_pipeline.tables.table import Table
from qmq_pipeline.tables.tallies import tally_path

#: Folders of days, see `work/ranges.py`.
_DAY: Final = "day="
#: Sorts last: a name without a range is a draft that some dead run has left.
_NO_RANGE: Final = 2**63


class LogEnd:
    """The end of one table when this was made. Requires: no other run writes the table, but for `last`."""

    def __init__(self, lake: Lake, table: Table) -> None:
        self._files = LakeFiles(lake.root)
        self._folder = lake.folder(table)
        self._kept = {f"{self._folder}/{path}" for path in lake.kept(table)}
        #: Path of a commit → the end of its range.
        self._commits = {
            path: end
            for path in self._files.names(f"{self._folder}/{COMMITS}")
            if (end := _end_of(path)) != _NO_RANGE and path.endswith(".json")
        }

    def last(self) -> RangeFacts | None:
        """The last committed range; None if there is none."""
        while (newest := self._newest()) is not None:
            commit = read_commit(self._files, newest)
            if commit is not None:
                return max(commit.ranges, key=lambda one: one.next)
            del self._commits[newest]  # it was merged, and swept since this was made
        return None

    def sync(self) -> None:
        """Make the last commit survive a power cut: the run that wrote it may have died before it did."""
        newest = self._newest()
        self._files.sync_names([] if newest is None else [newest])

    def _newest(self) -> str | None:
        return max(self._commits, key=lambda path: (self._commits[path], path), default=None)

    def spans(self) -> list[Span]:
        """All commits, including those that others replace."""
        found = []
        for path, end in self._commits.items():
            name = path.rpartition("/")[2].removesuffix(".json")
            first = name.split("-")[-2:-1]
            found += [Span(int(one), end, name) for one in first if one.isdecimal()]
        return found

    def clear_behind(self, last: RangeFacts | None) -> int:
        """Remove commits and files behind `last`, the last range that counts; the number of data files.

        What a listing names stays, see `Lake.keep`.
        """
        next_offset = 0 if last is None else last.next
        first_day = "" if last is None else _day_of(last)
        doomed = [path for path, end in self._commits.items() if end > next_offset]
        files = [
            path
            for day in self._days()
            if day.rpartition("/")[2] >= first_day
            for path in self._files.names(day)
            if _end_of(path) > next_offset and path not in self._kept
        ]
        for path in (*doomed, *files):
            self._files.delete(path)
        return len(files)

    def _days(self) -> Iterator[str]:
        """Folders of data files and of their tallies."""
        tallies = tally_path(_DAY).rpartition("/")[0]
        for folder in (self._folder, f"{self._folder}/{tallies}"):
            for path in self._files.folders(folder):
                if path.rpartition("/")[2].startswith(_DAY):
                    yield path


def _end_of(path: str) -> int:
    """The end of the range in the name of a file or commit."""
    stem = path.rpartition("/")[2].partition(".")[0]
    digits = stem.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else _NO_RANGE


def _day_of(last: RangeFacts) -> str:
    """The folder of the day of the last row; "", which sorts first, if there are no rows."""
    if not last.last_at_ms:
        return ""
    return f"{_DAY}{datetime.fromtimestamp(last.last_at_ms / 1000, UTC).date()}"
