"""Files below the folder of the tables, on a disk or in an object store: written whole or not at all.

A disk has renames and locks: a draft takes its final name when it is complete. Object stores have
neither, but put whole files: there the draft is a temporary file of this machine. What the files mean:
`lake.py`.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import Any, Final

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from qmq_pipeline.errors import LakeError, LakeInUseError
from qmq_pipeline.tables.damage import told_by_name
from qmq_pipeline.tables.table import Table

LOCK: Final = "LOCK"
DRAFT: Final = ".draft-"
#: Key under which a Parquet file names its table and the version of its columns.
SCHEMA_KEY: Final = b"qmq.schema"
ROW_GROUP_ROWS: Final = 100_000
COMPRESSION: Final = "snappy"
#: In one step from this machine to an object store.
_SENT_BYTES: Final = 1024 * 1024
#: What has a meaning in Spark's patterns of paths.
_IN_PATTERNS: Final = re.compile(r"[][*?{}\\]")
#: Hadoop's name of a store, and pyarrow's.
_ARROW_SCHEMES: Final = {"s3a": "s3"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What a Parquet file says about the values of one column."""

    least: Any
    greatest: Any
    nulls: int


class LakeFiles:
    """The files below one folder; all paths are relative to it."""

    def __init__(self, root: str) -> None:
        """Raises `LakeError` for an address without a known file system."""
        self.root = root
        try:
            if "://" in root:
                self._files, self._path = pafs.FileSystem.from_uri(_arrow_url(root))
            else:
                self._files, self._path = pafs.LocalFileSystem(), root
        except (pa.ArrowInvalid, OSError) as error:
            raise LakeError(
                path=root, reason=str(error), remedy="Give a folder, or a URL like s3://bucket/path"
            ) from error
        self._is_disk = isinstance(self._files, pafs.LocalFileSystem)

    def refuse_file(self) -> None:
        """Raise `LakeError` where no folder can be: at the name of a file, or below one."""
        if not self._is_disk:
            return
        try:
            os.stat(self._full(""))
        except NotADirectoryError as error:
            raise LakeError(
                path=self.root,
                reason="this is no folder: it, or what it is in, is a file",
                remedy="Give --tables a folder",
            ) from error
        except OSError:
            pass  # it is not there yet, or whoever uses it says why it cannot be used

    def create(self) -> None:
        """Make the folder, and those above it; on a disk they survive a power cut."""
        made: list[str] = []
        above = os.path.abspath(self._path)
        while self._is_disk and not os.path.exists(above):
            above = os.path.dirname(above)
            made.append(above)
        self._files.create_dir(self._path, recursive=True)
        for one in made:
            _sync(one)

    def strangers(self) -> set[str]:
        """Entries of the folder itself, without the lock and drafts of a run that died; none on an object store."""
        if not self._is_disk or not os.path.isdir(self._path):
            return set()
        return {name for name in os.listdir(self._path) if name != LOCK and DRAFT not in name}

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock this folder for writing; raises `LakeInUseError` at once if another process holds it.

        The operating system holds the lock, so it ends with the process. Does nothing on an object
        store.
        """
        if not self._is_disk:
            yield
            return
        self.create()
        with self._lock_file(LOCK) as descriptor:
            if not _locked_alone(descriptor):
                raise LakeInUseError(
                    path=self.root,
                    reason="another run writes these tables",
                    remedy="Wait for its end, or give another folder",
                )
            yield

    @contextmanager
    def shared_lock(self, folder: str, when_alone: Callable[[], None]) -> Iterator[None]:
        """Lock a folder together with others that do so; calls `when_alone` first if there are none.

        Waits while another process is in its `when_alone`. On an object store nobody else is
        expected.
        """
        if not self._is_disk:
            when_alone()
            yield
            return
        self._files.create_dir(self._full(folder), recursive=True)
        with self._lock_file(f"{folder}/{LOCK}") as descriptor:
            if _locked_alone(descriptor):
                when_alone()
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            yield

    @contextmanager
    def _lock_file(self, path: str) -> Iterator[int]:
        descriptor = os.open(self._full(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def url(self, path: str) -> str:
        """A path in Spark's notation."""
        return f"{self.root.rstrip('/')}/{path}"

    def pattern(self, path: str) -> str:
        """The same for what Spark is to read, which it takes for a pattern: this path alone matches it."""
        return _IN_PATTERNS.sub(r"\\\g<0>", self.url(path))

    def names(self, folder: str, *, is_deep: bool = False) -> Iterator[str]:
        """Paths of the files in a folder; if `is_deep`, also of those below it."""
        if (
            self._is_disk and not is_deep
        ):  # a folder of many thousand: without a look at each of them
            yield from (f"{folder}/{name}" for name in self._entries(folder, are_folders=False))
            return
        selector = pafs.FileSelector(self._full(folder), allow_not_found=True, recursive=is_deep)
        prefix = self._full("")
        for one in self._files.get_file_info(selector):
            if one.type == pafs.FileType.File:
                yield one.path.removeprefix(prefix)

    def folders(self, folder: str) -> Iterator[str]:
        """Paths of the folders in a folder."""
        if self._is_disk:
            yield from (f"{folder}/{name}" for name in self._entries(folder, are_folders=True))
            return
        selector = pafs.FileSelector(self._full(folder), allow_not_found=True)
        prefix = self._full("")
        for one in self._files.get_file_info(selector):
            if one.type == pafs.FileType.Directory:
                yield one.path.removeprefix(prefix)

    def _entries(self, folder: str, *, are_folders: bool) -> Iterator[str]:
        """Names of the files, or of the folders, in a folder on a disk; none if it does not exist."""
        try:
            with os.scandir(self._full(folder)) as entries:
                yield from (one.name for one in entries if one.is_dir() is are_folders)
        except FileNotFoundError:
            return

    def delete(self, path: str) -> None:
        """Remove one file, which must exist."""
        self._files.delete_file(self._full(path))

    def delete_empty(self, folder: str) -> None:
        """Remove a folder and those below it, but none that has a file in it or below it."""
        if self._is_disk:  # an object store has no folders
            for path, _, _ in os.walk(self._full(folder), topdown=False):
                with suppress(OSError):  # it is not empty
                    os.rmdir(path)

    def read_text(self, path: str) -> str | None:
        """A small file; None if it does not exist."""
        try:
            with self._files.open_input_stream(self._full(path)) as stream:
                content: bytes = stream.read()
        except FileNotFoundError:
            return None
        return content.decode()

    def write_text(self, path: str, text: str) -> None:
        """Write or replace a small file."""
        with self._whole(path) as stream:
            stream.write(text.encode())

    def write_rows(
        self, path: str, table: Table, batches: Iterable[pa.RecordBatch]
    ) -> tuple[int, int]:
        """Write a Parquet file; its number of rows and its bytes."""
        version = {SCHEMA_KEY: f"{table.name}/{table.version}".encode()}
        how: dict[str, Any] = {
            "compression": COMPRESSION,
            "use_dictionary": table.repeating,
            "write_statistics": table.compared,
            "write_page_checksum": True,
        }
        rows = 0
        writer: pq.ParquetWriter | None = None
        with self._whole(path) as stream:
            try:
                for batch in batches:
                    if writer is None:
                        schema = batch.schema.with_metadata(version)
                        writer = pq.ParquetWriter(stream, schema, **how)
                    writer.write_batch(batch, row_group_size=ROW_GROUP_ROWS)
                    rows += batch.num_rows
                if writer is None:
                    writer = pq.ParquetWriter(stream, table.arrow().with_metadata(version))
                writer.close()
            except BaseException:
                if writer is not None:
                    writer.is_open = False  # the file is given up: it gets no end, not even later
                raise
        return rows, self._files.get_file_info(self._full(path)).size

    def read_rows(self, path: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Some columns of a Parquet file."""
        with self._parquet(path) as parquet:
            yield from parquet.iter_batches(columns=list(columns))

    def count_values(self, path: str, columns: Sequence[str]) -> dict[str, int]:
        """Column of a Parquet file → number of its values that are not null; columns it lacks are left out."""
        counts = dict.fromkeys(columns, 0)
        with self._parquet(path) as parquet:
            known = [name for name in columns if name in parquet.schema_arrow.names]
            for number in range(parquet.num_row_groups):
                for name in known:
                    counts[name] += _values(parquet, number, name)
        return counts

    def statistics(self, path: str) -> dict[str, Statistics]:
        """Column of a Parquet file → its least and greatest value; columns without values or
        statistics are left out.
        """
        with self._parquet(path) as parquet:
            metadata = parquet.metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        found: dict[str, Statistics] = {}
        for place in range(metadata.num_columns if groups else 0):
            name = groups[0].column(place).path_in_schema
            told = [group.column(place).statistics for group in groups]
            if all(one is not None and one.has_min_max and one.has_null_count for one in told):
                found[name] = Statistics(
                    least=min(one.min for one in told),
                    greatest=max(one.max for one in told),
                    nulls=sum(one.null_count for one in told),
                )
        return found

    def rows_and_bytes(self, path: str) -> tuple[int, int]:
        """The number of rows of a Parquet file, and its length."""
        with self._files.open_input_file(self._full(path)) as file:
            return pq.ParquetFile(file).metadata.num_rows, file.size()

    @contextmanager
    def _parquet(self, path: str) -> Iterator[pq.ParquetFile]:
        """A Parquet file, whose checksums are verified; raises `LakeError` if it is missing or damaged."""
        with told_by_name(self.root, path), self._files.open_input_file(self._full(path)) as file:
            yield pq.ParquetFile(file, page_checksum_verification=True)

    def sync_names(self, paths: Iterable[str]) -> None:
        """Make the names of files, and of the folders they are in, survive a power cut.

        An object store does that by itself.
        """
        if not self._is_disk:
            return
        folders = {""}
        for path in paths:
            while path := path.rpartition("/")[0]:
                folders.add(path)
        for folder in sorted(folders, key=len, reverse=True):
            _sync(self._full(folder))

    def sync_content(self, path: str) -> None:
        """Make what another program has written into a file survive a power cut; what this class writes does."""
        if self._is_disk:
            _sync(self._full(path))

    @contextmanager
    def _whole(self, path: str) -> Iterator[pa.NativeFile]:
        """A stream into a new file, which is synced and gets its name when the block ends without an error."""
        final = self._full(path)
        parent = final.rpartition("/")[0]
        self._files.create_dir(parent, recursive=True)
        if not self._is_disk:
            with self._sent(final) as stream:
                yield stream
            return
        draft = f"{parent}/{DRAFT}{uuid.uuid4().hex}"
        try:
            with self._files.open_output_stream(draft) as stream:
                yield stream
            _sync(draft)
        except BaseException:  # where a disk is full, the draft is what filled it
            with suppress(OSError):
                self._files.delete_file(draft)
            raise
        self._files.move(draft, final)

    @contextmanager
    def _sent(self, final: str) -> Iterator[pa.NativeFile]:
        """A stream into a file of this machine, which is sent to an object store when the block ends without an error.

        pyarrow cannot give up an object that it has begun to write: a part of it would become the whole, and take
        the place of the same file that another try has written and committed.
        """
        with TemporaryFile() as draft:
            yield pa.PythonFile(draft, mode="w")
            draft.seek(0)
            with self._files.open_output_stream(final) as stream:
                shutil.copyfileobj(draft, stream, _SENT_BYTES)

    def _full(self, path: str) -> str:
        return f"{self._path.rstrip('/')}/{path}"


def _locked_alone(descriptor: int) -> bool:
    """Lock a file for this process alone; False at once if another one has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _arrow_url(root: str) -> str:
    scheme, mark, rest = root.partition("://")
    return f"{_ARROW_SCHEMES.get(scheme, scheme)}{mark}{rest}"


def _values(parquet: pq.ParquetFile, row_group: int, name: str) -> int:
    """Number of values of one column in one row group that are not null; read where statistics do not say it."""
    group = parquet.metadata.row_group(row_group)
    columns = (group.column(place) for place in range(group.num_columns))
    statistics = next(one.statistics for one in columns if one.path_in_schema == name)
    if statistics is not None and statistics.has_null_count:
        return int(statistics.num_values)
    rows = parquet.read_row_group(row_group, columns=[name])
    return int(rows.num_rows - rows[name].null_count)
