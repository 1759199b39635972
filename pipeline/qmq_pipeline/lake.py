"""The folder of the tables: Parquet files, and one commit file for each batch of ranges that is done.

::

    <tables>/LAKE                                               version of this layout
    <tables>/bronze/messages/day=2026-01-31/<from>-<to>.parquet rows of one range of the log
    <tables>/bronze/messages/_commits/<from>-<to>.json          ranges, their files, rows and sequences
    <tables>/silver/lifecycle/_commits/…                        the same for derived tables

A data file counts once a commit names it. Files are named by the range they hold: who writes a range
again (a retry, a speculative twin, a second run after a crash) writes the same file. The driver commits
when all tasks are done; what a run left behind without a commit is removed by the next. So a row is
there once, whatever died when.

Derived tables are written anew as a whole or by part; a commit with `replaces` says which earlier ones it stands
for, so readers see the old state or the new one, never both.

Object stores have no rename, and put whole files: there the final name is written at once.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from qmq_pipeline.errors import LakeError
from qmq_pipeline.schemas import TABLES, Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LAKE_VERSION: Final = 1
#: Says that a folder is one of tables.
MARKER: Final = "LAKE"
_LOCK: Final = "LOCK"
_COMMITS: Final = "_commits"
#: Beside the commits: what the last run saw, for those who want to know how fresh a table is.
_STATE: Final = "_state.json"
_DIGITS: Final = 20
_DRAFT: Final = ".draft-"
#: Key under which a Parquet file says which table and version its columns are.
SCHEMA_KEY: Final = b"qmq.schema"
ROW_GROUP_ROWS: Final = 100_000
COMPRESSION: Final = "snappy"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One Parquet file of a range."""

    #: Below the table's folder.
    path: str
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeFacts:
    """What was written of one range."""

    #: What the range is of: the id of a store, or the name of a database.
    source: str
    first: int
    next: int
    rows: int
    files: tuple[DataFile, ...]
    #: subject → runs of sequences (first, next), in order of the log.
    sequences: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    #: subject → runs that stand in quarantine.
    lost: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    #: Times of storing of the first and last row, ms since 1970; 0 without rows.
    first_at_ms: int = 0
    last_at_ms: int = 0
    #: Whatever else the job wants to know next time.
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Ranges that became part of a table together."""

    name: str
    version: int
    ranges: tuple[RangeFacts, ...]
    #: Names of earlier commits that this one stands for.
    replaces: tuple[str, ...] = ()


class Lake:
    """The tables below one folder. Cheap to make; travels to workers as its path."""

    def __init__(self, root: str) -> None:
        """Raises `LakeError` for an address that no file system is known for."""
        self.root = root
        try:
            if "://" in root:
                self._files, self._path = pafs.FileSystem.from_uri(root)
            else:
                self._files, self._path = pafs.LocalFileSystem(), root
        except (pa.ArrowInvalid, OSError) as error:
            raise LakeError(
                path=root, reason=str(error), remedy="Give a folder, or a URL like s3://bucket/path"
            ) from error
        self._has_rename = isinstance(self._files, pafs.LocalFileSystem)

    def __reduce__(self) -> tuple[object, ...]:
        return Lake, (self.root,)

    def prepare(self) -> None:
        """Make the folder, or refuse one of another version."""
        known = self._read_text(MARKER)
        if known is None:
            self._files.create_dir(self._path, recursive=True)
            self._write_text(MARKER, json.dumps({"version": LAKE_VERSION}))
            return
        version = json.loads(known).get("version")
        if version != LAKE_VERSION:
            raise LakeError(
                path=self.root,
                reason=f"its layout is of version {version}; known: {LAKE_VERSION}",
                remedy="Use the version of qmq that made it, or another folder",
            )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Be the one who writes these tables; raises `LakeError` at once when another run does.

        Held by the operating system, so it ends with the process. Object stores have no such lock:
        there it is for the schedule to start one run at a time.
        """
        if not self._has_rename:
            yield
            return
        self._files.create_dir(self._path, recursive=True)
        descriptor = os.open(self._full(_LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise LakeError(
                    path=self.root,
                    reason="another run writes these tables",
                    remedy="Wait for its end, or give another folder",
                ) from error
            yield
        finally:
            os.close(descriptor)

    def folder(self, table: Table) -> str:
        """Where a table is, below the root."""
        return f"{table.layer}/{table.name}"

    def commits(self, table: Table) -> list[Commit]:
        """The commits that count, in order of their names; replaced ones are left out."""
        found = [
            _commit(json.loads(self._read_text(path) or "{}"))
            for path in sorted(self._list(f"{self.folder(table)}/{_COMMITS}"))
            if path.endswith(".json") and _DRAFT not in path and not path.endswith(_STATE)
        ]
        replaced = {name for one in found for name in one.replaces}
        return [one for one in found if one.name not in replaced]

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
    ) -> Commit:
        """Make the files of these ranges part of the table; all of them or none."""
        if not name:
            source = ranges[0].source[:8] if ranges else "none"
            first = min((one.first for one in ranges), default=0)
            after = max((one.next for one in ranges), default=0)
            name = f"{source}-{first:0{_DIGITS}d}-{after:0{_DIGITS}d}"
        made = Commit(
            name=name, version=table.version, ranges=tuple(ranges), replaces=tuple(replaces)
        )
        self._write_text(f"{self.folder(table)}/{_COMMITS}/{name}.json", json.dumps(asdict(made)))
        return made

    def write_state(self, table: Table, state: Mapping[str, Any]) -> None:
        """Keep what the last run found, whether it added something or not."""
        self._write_text(f"{self.folder(table)}/{_COMMITS}/{_STATE}", json.dumps(state))

    def read_state(self, table: Table) -> dict[str, Any]:
        """What the last run found; nothing when there was none."""
        found: dict[str, Any] = json.loads(
            self._read_text(f"{self.folder(table)}/{_COMMITS}/{_STATE}") or "{}"
        )
        return found

    def write_frame(self, frame: DataFrame, table: Table, run: str) -> int:
        """Let the rows of `frame` be the whole table from now on; returns how many.

        What was there before stays until the next run, for those who read it now.
        """
        before = [one.name for one in self.commits(table)]
        self.sweep(table)
        folder = f"{self.folder(table)}/run={run}"
        frame.select(*table.names).write.mode("overwrite").parquet(self.url(folder))
        files = tuple(self._frame_files(table, folder))
        rows = sum(file.rows for file in files)
        facts = RangeFacts(source=run, first=0, next=0, rows=rows, files=files)
        self.commit(table, [facts], replaces=before, name=run)
        return rows

    def append_frame(self, frame: DataFrame, table: Table, run: str) -> int:
        """Add the rows of `frame`; a run that is done again replaces its own."""
        folder = f"{self.folder(table)}/run={run}"
        frame.select(*table.names).write.mode("overwrite").parquet(self.url(folder))
        files = tuple(self._frame_files(table, folder))
        rows = sum(file.rows for file in files)
        facts = RangeFacts(source=run, first=0, next=0, rows=rows, files=files)
        self.commit(table, [facts], name=run)
        return rows

    def sweep(self, table: Table) -> int:
        """Remove data files that no commit names: what a run left that did not end. Returns how many.

        Requires: no other run writes this table.
        """
        kept = {file.path for one in self.ranges(table) for file in one.files}
        folder = self.folder(table)
        doomed = [
            path
            for path in self._list(folder, recursive=True)
            if f"/{_COMMITS}/" not in path and path.removeprefix(f"{folder}/") not in kept
        ]
        for path in doomed:
            self._files.delete_file(self._full(path))
        return len(doomed)

    def forget(self, table: Table, names: Iterable[str]) -> None:
        """Remove the files of replaced commits; readers that began before may still want them."""
        for name in names:
            path = f"{self.folder(table)}/{_COMMITS}/{name}.json"
            if self._read_text(path) is not None:
                self._files.delete_file(self._full(path))

    def write(self, table: Table, path: str, batches: Iterable[pa.RecordBatch]) -> DataFile:
        """Write one data file below the table's folder, whole or not at all."""
        final = self._full(f"{self.folder(table)}/{path}")
        parent = final.rpartition("/")[0]
        draft = f"{parent}/{_DRAFT}{uuid.uuid4().hex}" if self._has_rename else final
        self._files.create_dir(parent, recursive=True)
        version = {SCHEMA_KEY: f"{table.name}/{table.version}".encode()}
        rows = 0
        with self._files.open_output_stream(draft) as stream:
            writer: pq.ParquetWriter | None = None
            for batch in batches:
                if writer is None:
                    schema = batch.schema.with_metadata(version)
                    writer = pq.ParquetWriter(stream, schema, compression=COMPRESSION)
                writer.write_batch(batch, row_group_size=ROW_GROUP_ROWS)
                rows += batch.num_rows
            if writer is None:
                writer = pq.ParquetWriter(stream, table.arrow().with_metadata(version))
            writer.close()
        if self._has_rename:
            self._files.move(draft, final)
        return DataFile(path=path, rows=rows, bytes=self._files.get_file_info(final).size)

    def sync_files(self, table: Table, files: Iterable[DataFile]) -> None:
        """Make files, and their names, survive a power cut; an object store does that by itself."""
        if not self._has_rename:
            return
        for file in files:
            path = self._full(f"{self.folder(table)}/{file.path}")
            for one in (path, path.rpartition("/")[0]):
                descriptor = os.open(one, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def read_file(
        self, table: Table, path: str, columns: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        """Some columns of one data file, without Spark."""
        with self._files.open_input_file(self._full(f"{self.folder(table)}/{path}")) as file:
            yield from pq.ParquetFile(file).iter_batches(columns=list(columns))

    def read(self, spark: SparkSession, table: Table) -> DataFrame:
        """The table as it is committed now; columns that older files lack are null."""
        paths = [file.path for one in self.ranges(table) for file in one.files if file.rows]
        if not paths:
            return spark.createDataFrame([], table.ddl())
        base = self.url(self.folder(table))
        reader = spark.read.schema(table.ddl()).option("basePath", base)
        return reader.parquet(*(f"{base}/{path}" for path in paths)).select(*table.names)

    def _frame_files(self, table: Table, folder: str) -> Iterator[DataFile]:
        prefix = f"{self.folder(table)}/"
        for path in sorted(self._list(folder)):
            if path.endswith(".parquet"):
                with self._files.open_input_file(self._full(path)) as file:
                    rows = pq.ParquetFile(file).metadata.num_rows
                    yield DataFile(path=path.removeprefix(prefix), rows=rows, bytes=file.size())

    def url(self, path: str) -> str:
        """A path below the root as Spark wants it."""
        return f"{self.root.rstrip('/')}/{path}"

    def _full(self, path: str) -> str:
        return f"{self._path.rstrip('/')}/{path}"

    def _list(self, folder: str, *, recursive: bool = False) -> Iterator[str]:
        selector = pafs.FileSelector(self._full(folder), allow_not_found=True, recursive=recursive)
        prefix = self._full("")
        for one in self._files.get_file_info(selector):
            if one.type == pafs.FileType.File:
                yield one.path.removeprefix(prefix)

    def _read_text(self, path: str) -> str | None:
        try:
            with self._files.open_input_stream(self._full(path)) as stream:
                content: bytes = stream.read()
        except FileNotFoundError:
            return None
        return content.decode()

    def _write_text(self, path: str, text: str) -> None:
        final = self._full(path)
        parent = final.rpartition("/")[0]
        draft = f"{parent}/{_DRAFT}{uuid.uuid4().hex}" if self._has_rename else final
        self._files.create_dir(parent, recursive=True)
        with self._files.open_output_stream(draft) as stream:
            stream.write(text.encode())
        if self._has_rename:
            self._files.move(draft, final)


def tables_of_layer(layer: str) -> list[Table]:
    """Every table of a layer."""
    return [table for table in TABLES.values() if table.layer == layer]


def _commit(found: Mapping[str, Any]) -> Commit:
    return Commit(
        name=found["name"],
        version=found["version"],
        ranges=tuple(range_facts(one) for one in found["ranges"]),
        replaces=tuple(found["replaces"]),
    )


def range_facts(found: Mapping[str, Any]) -> RangeFacts:
    """Facts as they were written into a commit, or came from a worker."""
    return RangeFacts(**{**found, "files": tuple(DataFile(**one) for one in found["files"])})
