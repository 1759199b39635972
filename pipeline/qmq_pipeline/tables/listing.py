"""The files of a table, listed once more for programs that read Delta or Iceberg.

Both formats are lists of Parquet files with a schema and a history, and our files are fit for either. So nothing
is copied: a listing is made to name exactly the files that our commits name. What it named before is compared
with what it is to name, so whoever did what to it meanwhile, a run that died included, the next update mends it.

`delta.py` and `iceberg.py` are the two; `jobs/expose.py` keeps them up to date.
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
    """What becomes of a listing in one step: its readers see the state before it or the one after it."""

    #: The newest commit whose files are listed then.
    commit: str
    added: Sequence[DataFile]
    #: Paths below the table's folder; one that is added too was written anew under its name.
    removed: Collection[str]


class Listing(Protocol):
    """One table as Delta or Iceberg tells of it. Used by one thread; raises `LakeError`."""

    #: Where programs find it: a folder or URL, or the name in a catalog.
    name: str

    def files(self) -> dict[str, int] | None:
        """The files it names now, below the table's folder, and their bytes; None when it is not there yet."""

    def apply(self, change: Change) -> None:
        """Make the change, with the columns that the table has by now; makes the listing if it is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """What one update did."""

    #: Where programs find the table, see `Listing.name`.
    where: str
    rows: int
    #: Files that were not listed before, and that are no more.
    added: int
    removed: int


def update(lake: Lake, table: Table, listing: Listing, name: str) -> Updated:
    """Let a listing name the files that the table's commits name now; `name` is that of its kind.

    First the files of both are kept from being swept, then the listing changes in one step, then only its own
    are kept: whenever a run dies, what is listed is there, and the next one goes on. Requires: the table has a
    commit, and no other run writes it.
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
        lake.keep(table, name, {*wanted, *listed})
        listing.apply(Change(commit=commits[-1].name, added=added, removed=removed))
    lake.keep(table, name, wanted)
    rows = sum(file.rows for file in wanted.values())
    return Updated(where=listing.name, rows=rows, added=len(added), removed=len(removed))
