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
