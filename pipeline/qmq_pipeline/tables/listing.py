"""The files of a table, listed again for programs that read Delta or Iceberg.

Both formats are lists of Parquet files with a schema and a history, and our files suit both. So
nothing is copied: the listing is made to name exactly the files that our commits name. Each update
compares what the listing names with what it should name, and so also repairs whatever others, or a
run that died, have left.

The two are `delta.py` and `iceberg.py`; `jobs/expose.py` keeps them up to date.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from qmq_pipeline.tables.commits import DataFile
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One step of a listing: its readers see the state before it or the state after it."""

    #: The newest commit whose files are then listed.
    commit: str
    added: Sequence[DataFile]
    #: Paths below the table's folder; one that is also added was rewritten under its name.
    removed: Collection[str]


class Listing(Protocol):
    """One table in Delta or Iceberg. Used by one thread; raises `LakeError`."""

    #: Where programs find it: a folder or URL, or the name in a catalog.
    name: str
    #: By which name its files are kept in the lake; no two listings of a table have the same.
    kept_as: str

    def files(self) -> dict[str, int] | None:
        """The files it names now, below the table's folder, with their bytes; None if it does not exist yet."""

    def apply(self, change: Change) -> None:
        """Make the change, with the table's current columns; creates the listing if it does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """The result of one update."""

    #: Where programs find the table, see `Listing.name`.
    where: str
    rows: int
    #: Files that were added to the listing, and files that were removed.
    added: int
    removed: int


def update(lake: Lake, table: Table, listing: Listing) -> Updated:
    """Make a listing name the files of the table's current commits.

    First the old and the new files are protected from sweeping, then the listing changes in one
    step, then only the new ones stay protected. Whenever a run dies, every listed file exists and
    the next run continues. Requires: the table has a commit, and no other run writes it.
    """
    commits = lake.commits(table)
    ranges = [one for commit in commits for one in commit.ranges]
    wanted = {file.path: file for one in ranges for file in one.files if file.rows}
    found = listing.files()
    listed = found or {}
    added = [file for path, file in wanted.items() if listed.get(path) != file.bytes]
    removed = [
        path for path, size in listed.items() if path not in wanted or wanted[path].bytes != size
    ]
    if found is None or added or removed:
        lake.keep(table, listing.kept_as, {*wanted, *listed})
        listing.apply(Change(commit=commits[-1].name, added=added, removed=removed))
    lake.keep(table, listing.kept_as, wanted)
    rows = sum(file.rows for file in wanted.values())
    return Updated(where=listing.name, rows=rows, added=len(added), removed=len(removed))
