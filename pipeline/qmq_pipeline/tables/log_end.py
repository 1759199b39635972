"""Where a table of a log ends, by the names of its commits: as quick after years of small commits as on the first day.

Ranges of a log follow each other, and a commit is named by what it holds, `<store>-<first>-<next>`. So the last range
is in the commit whose name ends last, and what a run left behind that died stands behind it: commits of tables that were
written before the one that says how far the log was read, and data files in the folders of the last range's day and
of later ones. Nothing else has to be looked at. A commit that stands for several (`merging.py`) is named by all that it
holds; it is never behind the last of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from qmq_pipeline.tables.commits import Commit, RangeFacts
from qmq_pipeline.tables.lake import COMMITS, Lake
from qmq_pipeline.tables.lake_files import LakeFiles
from qmq_pipeline.tables.merging import Span
from qmq_pipeline.tables.table import Table
from qmq_pipeline.tables.tallies import tally_path

#: Folders of days, see `work/ranges.py`.
_DAY: Final = "day="
#: Behind everything: what bears no range is a draft of somebody who died.
_NO_RANGE: Final = 2**63


class LogEnd:
    """The end of one table, as it stands when this is made. Requires: no other run writes the table."""

    def __init__(self, lake: Lake, table: Table) -> None:
        self._files = LakeFiles(lake.root)
        self._folder = lake.folder(table)
        #: Path of a commit → where it ends.
        self._commits = {
            path: end
            for path in self._files.names(f"{self._folder}/{COMMITS}")
            if (end := _end_of(path)) != _NO_RANGE and path.endswith(".json")
        }

    def last(self) -> RangeFacts | None:
        """The last range that was committed; None where there is none."""
        name = max(self._commits, key=lambda path: (self._commits[path], path), default=None)
        if name is None:
            return None
        commit = Commit.from_json(self._files.read_text(name) or "{}")
        return max(commit.ranges, key=lambda one: one.next)

    def spans(self) -> list[Span]:
        """All commits, those that others stand for among them."""
        found = []
        for path, end in self._commits.items():
            name = path.rpartition("/")[2].removesuffix(".json")
            first = name.split("-")[-2:-1]
            found += [Span(int(one), end, name) for one in first if one.isdecimal()]
        return found

    def clear_behind(self, last: RangeFacts | None) -> int:
        """Remove commits and files behind the `last` range of the log that counts; how many data files."""
        next_offset = 0 if last is None else last.next
        first_day = "" if last is None else _day_of(last)
        doomed = [path for path, end in self._commits.items() if end > next_offset]
        files = [
            path
            for day in self._days()
            if day.rpartition("/")[2] >= first_day
            for path in self._files.names(day)
            if _end_of(path) > next_offset
        ]
        for path in (*doomed, *files):
            self._files.delete(path)
        return len(files)

    def _days(self) -> Iterator[str]:
        """Folders of data files, and of their tallies."""
        tallies = tally_path(_DAY).rpartition("/")[0]
        for folder in (self._folder, f"{self._folder}/{tallies}"):
            for path in self._files.folders(folder):
                if path.rpartition("/")[2].startswith(_DAY):
                    yield path


def _end_of(path: str) -> int:
    """Where the range ends that a file or a commit bears in its name."""
    stem = path.rpartition("/")[2].partition(".")[0]
    digits = stem.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else _NO_RANGE


def _day_of(last: RangeFacts) -> str:
    """The folder of the day of its last row; before all of them when it has no rows."""
    if not last.last_at_ms:
        return ""
    return f"{_DAY}{datetime.fromtimestamp(last.last_at_ms / 1000, UTC).date()}"
