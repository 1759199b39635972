"""The folder of the tables: Parquet files, and one commit file for each finished batch of ranges.

::

    <tables>/LAKE                                               version of this layout
    <tables>/bronze/messages/day=2026-01-31/<from>-<to>.parquet rows of one range of the log
    <tables>/bronze/messages/_commits/<from>-<to>.json          ranges, their files, rows and sequences
    <tables>/bronze/messages/_tallies/1/day=…/<from>-<to>.parquet  what that file holds, see `tallies.py`
    <tables>/silver/lifecycle/_commits/…                        the same for derived tables
    <tables>/silver/lifecycle/_kept/delta.json                  files that a listing names, see `listing.py`

A data file counts once a commit names it. Files are named by the range they hold, so whoever writes
a range again (a retry, a speculative twin, a second run after a crash) writes the same file. Rows
of an outbox change in between, so there each try has a file of its own. The driver commits when all
tasks are done, and each run removes what earlier runs left without a commit. So a row is there
once, whichever process died, and whenever. `lake_files.py` writes the files. Small ones of a log
are merged: one commit takes the place of those that it `replaces` (`merging.py`).

Derived tables are written by part: a window of the log, or a day. Each run commits all parts, with
new files for those that changed and the old ones for the rest, and `replaces` the previous list. So
readers see the old state or the new one, never a mixture.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from qmq_pipeline.errors import LakeError
from qmq_pipeline.tables.commits import MERGED_AT, Commit, DataFile, RangeFacts
from qmq_pipeline.tables.lake_files import DRAFT, LakeFiles, Statistics
from qmq_pipeline.tables.marker import is_marked, mark
from qmq_pipeline.tables.small_files import read_commit, read_object
from qmq_pipeline.tables.sweeping import swept
from qmq_pipeline.tables.table import Table
from qmq_pipeline.tables.tallies import TALLY, Columns, Tallying, tally_columns, tally_path

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession

#: Folder of the commits, in that of a table.
COMMITS: Final = "_commits"
#: Beside the commits: what the last run saw, which tells how fresh a table is.
_STATE: Final = "_state.json"
#: Files that must stay although no commit names them any more, by who still lists them.
_KEPT: Final = "_kept"
#: Folder of what one run wrote of a derived table.
_RUN: Final = "run="
_DIGITS: Final = 20
#: Tells Spark's reader to verify the checksums of pages.
_VERIFY: Final = "parquet.page.verify-checksum.enabled"
#: Column of a data frame with the part of a derived table that a row belongs to; not in any file.
PART: Final = "part"


class Lake:
    """The tables below one folder. Cheap to make; travels to workers as its path."""

    def __init__(self, root: str, files: LakeFiles | None = None) -> None:
        """`files`: an alternative way to read and write them, instead of `LakeFiles`.

        Raises `LakeError` for an address without a known file system, and for a file.
        """
        # Otherwise creating a folder on the way would change where a `..` behind it leads.
        self.root = root if "://" in root else os.path.abspath(root)
        self._files = LakeFiles(self.root) if files is None else files
        self._files.refuse_file()

    def __reduce__(self) -> tuple[object, ...]:
        return Lake, (self.root,)

    def prepare(self) -> None:
        """Create the folder; refuse one of another version or with other things in it."""
        if not is_marked(self._files):
            mark(self._files)

    def require(self) -> None:
        """Refuse a folder that `ingest` has not made, or of another version; creates nothing."""
        if not is_marked(self._files):
            raise LakeError(
                path=self.root,
                reason="there are no tables here",
                remedy="Check the spelling of --tables, or run `qmq pipeline ingest` first",
            )

    def writing(self) -> AbstractContextManager[None]:
        """Lock the tables for writing; raises `LakeInUseError` at once if another run writes them.

        Object stores have no lock: there the schedule must start only one run at a time.
        """
        return self._files.lock()

    def adding_runs(self, *tables: Table) -> AbstractContextManager[None]:
        """Add a run to each of these tables of one layer, beside other processes that do so.

        Whoever begins while nobody else does first removes what runs have left that died before
        their commit. Requires: nobody changes these tables otherwise.
        """

        def sweep_dead() -> None:
            for table in tables:
                if self._has_dead_run(table):
                    self.sweep(table)

        return self._files.shared_lock(tables[0].layer, sweep_dead)

    def _has_dead_run(self, table: Table) -> bool:
        """Whether there is a folder or a file of a run without a commit; reads no commit."""
        folder, alive = self.folder(table), self.commit_names(table)
        runs = {path.rpartition(_RUN)[2] for path in self._files.folders(folder) if _RUN in path}
        files = (path.rpartition("/")[2] for path in self._files.names(folder))
        runs |= {name.removesuffix(".parquet") for name in files if name.endswith(".parquet")}
        return bool(runs - alive)

    def folder(self, table: Table) -> str:
        """Where a table is, below the root."""
        return f"{table.layer}/{table.name}"

    def commits(self, table: Table) -> list[Commit]:
        """The commits that count, in order of their names, without replaced ones."""
        every, replaced = self._all_commits(table)
        return [one for one in every if one.name not in replaced]

    def newest(self, table: Table) -> Commit | None:
        """The commit that counts, for tables whose commits replace each other."""
        return next(reversed(self.commits(table)), None)

    def _all_commits(self, table: Table) -> tuple[list[Commit], set[str]]:
        while True:
            names = sorted(self.commit_names(table))
            read = [read_commit(self._files, self._commit_path(table, name)) for name in names]
            found = [one for one in read if one is not None]
            if len(found) == len(read):
                return found, {name for one in found for name in one.replaces}
            # A commit was swept after its name was read; its replacement may be newer than the names.

    def commit_names(self, table: Table) -> set[str]:
        """Names of all commits, including replaced ones that are not swept yet."""
        return {
            path.rpartition("/")[2].removesuffix(".json")
            for path in self._files.names(f"{self.folder(table)}/{COMMITS}")
            if path.endswith(".json") and DRAFT not in path and not path.endswith(_STATE)
        }

    def read_commit(self, table: Table, name: str) -> Commit:
        """One commit. Requires: it exists."""
        found = read_commit(self._files, self._commit_path(table, name))
        assert found is not None, "whoever writes a table removes its commits alone"
        return found

    def _commit_path(self, table: Table, name: str) -> str:
        return f"{self.folder(table)}/{COMMITS}/{name}.json"

    def ranges(self, table: Table) -> list[RangeFacts]:
        """All committed ranges of a table, in order of source and position."""
        every = [one for commit in self.commits(table) for one in commit.ranges]
        return sorted(every, key=lambda one: (one.source, one.first))

    def commit(
        self,
        table: Table,
        ranges: Sequence[RangeFacts],
        *,
        replaces: Iterable[str] = (),
        name: str = "",
        notes: Mapping[str, Any] | None = None,
    ) -> Commit:
        """Make the files of these ranges part of the table, all of them or none.

        When this returns they survive a power cut on a disk, and no power cut leaves a commit whose
        files are not whole.
        """
        if not name:
            source = ranges[0].source[:8] if ranges else "none"
            first = min((one.first for one in ranges), default=0)
            after = max((one.next for one in ranges), default=0)
            name = f"{source}-{first:0{_DIGITS}d}-{after:0{_DIGITS}d}"
        made = Commit(
            name=name,
            version=table.version,
            ranges=tuple(ranges),
            replaces=tuple(replaces),
            notes=notes or {},
        )
        folder, path = self.folder(table), self._commit_path(table, name)
        self._files.sync_names(f"{folder}/{file.path}" for one in ranges for file in one.files)
        self._files.write_text(path, made.to_json())
        self._files.sync_names([path])
        return made

    def write_state(self, table: Table, state: Mapping[str, Any]) -> None:
        """Keep what the last run found, even if it added nothing."""
        self._files.write_text(f"{self.folder(table)}/{COMMITS}/{_STATE}", json.dumps(state))

    def read_state(self, table: Table) -> dict[str, Any]:
        """What the last run found; empty if there was none."""
        path = f"{self.folder(table)}/{COMMITS}/{_STATE}"
        remedy = "Remove it: the next run writes it again"
        return read_object(self._files, path, remedy=remedy) or {}

    def write_parts(
        self,
        frame: DataFrame,
        table: Table,
        run: str,
        *,
        made: Collection[str] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> Commit:
        """Replace the parts `made`, or all parts for None, by the rows of `frame`.

        The column `PART` says which part a row belongs to. Other parts stay. The files that a part
        had before stay until the next run, for queries that are reading them.
        """
        self.sweep(table)
        folder = f"{self.folder(table)}/{_RUN}{run}"
        chosen = frame.select(PART, *table.names)
        chosen.write.mode("overwrite").partitionBy(PART).parquet(self.url(folder))
        of_part: dict[str, list[DataFile]] = {}
        for file in self._frame_files(table, folder):
            name = file.path.rpartition("/")[0].rpartition(f"{PART}=")[2]
            of_part.setdefault(name, []).append(file)
        return self.replace_parts(table, run, of_part, made=made, notes=notes)

    def replace_parts(
        self,
        table: Table,
        run: str,
        files: Mapping[str, Sequence[DataFile]],
        *,
        made: Collection[str] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> Commit:
        """Commit new files for the parts `made`, with the old files of all others."""
        before = self.newest(table)
        kept = () if before is None or made is None else before.ranges
        ranges = [one for one in kept if one.source not in (made or ())]
        for name, some in files.items():
            rows = sum(file.rows for file in some)
            ranges.append(
                RangeFacts(
                    source=name, first=0, next=0, rows=rows, files=tuple(some), notes={"run": run}
                )
            )
        ranges.sort(key=lambda one: one.source)
        replaced = [one.name for one in self.commits(table)]
        return self.commit(table, ranges, replaces=replaced, name=run, notes=notes)

    def write_frame(self, frame: DataFrame, table: Table, run: str) -> tuple[DataFile, ...]:
        """Write the rows of `frame`, replacing what this run wrote before; they count from `append` on."""
        folder = f"{self.folder(table)}/{_RUN}{run}"
        frame.select(*table.names).write.mode("overwrite").parquet(self.url(folder))
        return tuple(self._frame_files(table, folder))

    def append(self, table: Table, run: str, files: Iterable[DataFile]) -> None:
        """Make these files part of the table; a repeated run replaces its own.

        Requires: the caller is within `adding_runs`.
        """
        some = tuple(files)
        rows = sum(one.rows for one in some)
        self.commit(
            table, [RangeFacts(source=run, first=0, next=0, rows=rows, files=some)], name=run
        )

    def sweep(self, table: Table, *, merged_before_ms: int | None = None) -> int:
        """Remove data files that no commit names, and replaced commits; the number of files.

        Such files are from a run that did not finish, or from parts that were rebuilt. Files that
        others list stay (see `keep`), and so do their lists, and merged files that are younger
        than `merged_before_ms`, if it is given. Requires: no other run writes this table.
        """
        commits, replaced = self._all_commits(table)
        folder = self.folder(table)
        if merged_before_ms is not None:
            old = (one for one in commits if one.notes.get(MERGED_AT, 0) <= merged_before_ms)
            replaced = {name for one in old for name in one.replaces}
        # The oldest goes first: then none is ever there without the one that replaces it.
        for one in commits:
            if one.name in replaced:
                self._files.delete(self._commit_path(table, one.name))
        named = [one for commit in commits if commit.name not in replaced for one in commit.ranges]
        kept = {file.path for one in named for file in one.files} | self.kept(table)
        names = self._files.names(folder, is_deep=True)
        doomed = swept(folder, names, kept)
        for path in doomed:
            self._files.delete(path)
        for path in self._files.folders(folder):
            if path.startswith(f"{folder}/{_RUN}"):
                self._files.delete_empty(path)
        return len(doomed)

    def keep(self, table: Table, name: str, paths: Iterable[str]) -> None:
        """Keep data files because `name` lists them, in place of those it listed before."""
        text = json.dumps({"files": sorted(paths)})
        self._files.write_text(f"{self.folder(table)}/{_KEPT}/{name}.json", text)

    def kept(self, table: Table) -> set[str]:
        """Data files that stay although no commit may name them, see `keep`."""
        remedy = "Remove it, and run `qmq pipeline expose` before any other job"
        lists = [
            read_object(self._files, path, field="files", remedy=remedy)
            for path in self._files.names(f"{self.folder(table)}/{_KEPT}")
            if DRAFT not in path
        ]
        return {path for one in lists if one is not None for path in one["files"]}

    def write(self, table: Table, path: str, batches: Iterable[pa.RecordBatch]) -> DataFile:
        """Write one data file below the table's folder, whole or not at all."""
        rows, length = self._files.write_rows(f"{self.folder(table)}/{path}", table, batches)
        return DataFile(path=path, rows=rows, bytes=length)

    def write_tallied(self, table: Table, path: str, batches: Iterable[pa.RecordBatch]) -> DataFile:
        """The same, and beside it the file's tally."""
        tallying = Tallying(table)
        file = self.write(table, path, tallying.passing(batches))
        self.write_tally(table, path, tallying)
        return file

    def write_tally(self, table: Table, path: str, tallying: Tallying) -> None:
        """Write the tally of a data file, whole or not at all."""
        tally = f"{self.folder(table)}/{tally_path(path)}"
        self._files.write_rows(tally, TALLY, [tallying.tally()])

    def read_tally(self, table: Table, path: str) -> Columns | None:
        """The tally of a data file; None if there is none that can be read."""
        tally = f"{self.folder(table)}/{tally_path(path)}"
        try:
            batches = list(self._files.read_rows(tally, TALLY.names))
        except (OSError, LakeError):
            return None  # it is made from the file, and whoever cannot write it says why
        return tally_columns(pa.Table.from_batches(batches, TALLY.arrow()))

    def count_values(
        self, table: Table, files: Iterable[DataFile], columns: Sequence[str]
    ) -> dict[str, int]:
        """Column → number of its values that are not null, from the file's own statistics."""
        counts = dict.fromkeys(columns, 0)
        for file in files:
            found = self._files.count_values(f"{self.folder(table)}/{file.path}", columns)
            for name, count in found.items():
                counts[name] += count
        return counts

    def file_statistics(self, table: Table, file: DataFile) -> dict[str, Statistics]:
        """Column → the least and greatest value in a data file, if the file has them."""
        return self._files.statistics(f"{self.folder(table)}/{file.path}")

    def read_file(
        self, table: Table, path: str, columns: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        """Some columns of one data file, without Spark. Raises `LakeError` if it is missing or damaged."""
        yield from self._files.read_rows(f"{self.folder(table)}/{path}", columns)

    def read(
        self, spark: SparkSession, table: Table, ranges: Iterable[RangeFacts] | None = None
    ) -> DataFrame:
        """The table as committed now, or some ranges of it; columns that older files lack are null."""
        chosen = self.ranges(table) if ranges is None else ranges
        paths = [file.path for one in chosen for file in one.files if file.rows]
        if not paths:
            return spark.sql(table.nothing())
        reader = self._reader(spark, table, table.ddl())
        return reader.parquet(*self._patterns(table, paths)).select(*table.names)

    def read_parts(
        self, spark: SparkSession, table: Table, ranges: Iterable[RangeFacts]
    ) -> DataFrame:
        """Parts of a derived table, with the name of each row's part."""
        paths = [file.path for one in ranges for file in one.files if file.rows]
        schema = f"{table.ddl()}, {PART} STRING"
        if not paths:
            return spark.sql(table.nothing()).selectExpr("*", f"CAST(NULL AS STRING) AS {PART}")
        reader = self._reader(spark, table, schema)
        return reader.parquet(*self._patterns(table, paths)).select(*table.names, PART)

    def _reader(self, spark: SparkSession, table: Table, schema: str) -> DataFrameReader:
        reader = spark.read.schema(schema).option(_VERIFY, "true")
        return reader.option("basePath", self.url(self.folder(table)))

    def _patterns(self, table: Table, paths: Iterable[str]) -> Iterator[str]:
        return (self._files.pattern(f"{self.folder(table)}/{path}") for path in paths)

    def _frame_files(self, table: Table, folder: str) -> Iterator[DataFile]:
        prefix = f"{self.folder(table)}/"
        for path in sorted(self._files.names(folder, is_deep=True)):
            if path.endswith(".parquet"):
                self._files.sync_content(path)
                rows, length = self._files.rows_and_bytes(path)
                yield DataFile(path=path.removeprefix(prefix), rows=rows, bytes=length)

    def url(self, path: str) -> str:
        """A path below the root in Spark's notation."""
        return self._files.url(path)
