"""The tables of one pipeline, read and written by Spark in the format of the session.

::

    <root>/bronze/log/kind=message/part=12/*.parquet    one file of each kind and part of the log
    <root>/bronze/log/_checkpoint                       of the stream that writes this table
    <root>/silver/lifecycle/part=12/*.parquet           derived tables: a file for each part, or for each day
    <root>/jobs/progress/job=lifecycle/*.parquet        the progress of each job

Folders of a table are its *partitions*. A job rewrites a whole partition (dynamic overwrite), so a repetition adds
nothing. Delta and Iceberg do that in one transaction. Parquet has none: each partition is replaced by deleting and
renaming a folder when all its files are written, and a query that reads at that moment may miss it.
If a job dies at that moment, its next run rewrites the partition.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from qmq_client.clock import SYSTEM_CLOCK
from qmq_pipeline.errors import OptionError, TablesError, TablesInUseError
from qmq_pipeline.tables.schemas import PROGRESS, TABLES
from qmq_pipeline.tables.table import KINDS, Table

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Observation, SparkSession

PARQUET, DELTA, ICEBERG = "parquet", "delta", "iceberg"
FORMATS: Final = (PARQUET, DELTA, ICEBERG)
LOCK: Final = "LOCK"
_CHECKPOINT: Final = "_checkpoint"
#: Tells Spark's reader of Parquet to verify the checksums of pages.
_VERIFY: Final = "parquet.page.verify-checksum.enabled"
#: Characters with a meaning in Spark's patterns of paths.
_IN_PATTERNS: Final = re.compile(r"[][*?{}\\]")
#: The text of Spark's error for a table that does not exist yet.
_ABSENT: Final = (
    "PATH_NOT_FOUND",
    "TABLE_OR_VIEW_NOT_FOUND",
    "DELTA_TABLE_NOT_FOUND",
    "not a Delta table",
)
_NO_CONNECTOR: Final = "DATA_SOURCE_NOT_FOUND"
#: Most partitions that a query counts one by one; with more it would be too long.
_COUNTED_MAX: Final = 500


class Tables:
    """All tables below one folder. Cheap to make."""

    def __init__(
        self, spark: SparkSession, root: str, *, format_: str = PARQUET, namespace: str = ""
    ) -> None:
        """`namespace`: the namespace for the tables in the session's catalog; needed for Iceberg."""
        self.spark = spark
        self.root = root.rstrip("/") if "://" in root else os.path.abspath(root)
        self._format = format_
        self._namespace = namespace
        #: The recorded progress of jobs, cached.
        self._notes: dict[str, str] | None = None
        #: Tables whose copy in the connector's cache was refreshed.
        self._looked: set[Table] = set()

    # ---- the folder ---------------------------------------------------------------------------

    @property
    def _is_local(self) -> bool:
        return "://" not in self.root

    def require(self) -> None:
        """Refuse a folder without tables; creates nothing."""
        if not self.exists(PROGRESS):
            raise TablesError(
                path=self.root,
                reason="there are no tables here",
                remedy="Check the spelling of --tables, or run `qmq pipeline ingest` first",
            )

    @contextmanager
    def writing(self, layer: str) -> Iterator[None]:
        """Lock the tables of a layer for writing; raises `TablesInUseError` at once if another run writes them.

        The lock belongs to the process and ends with it. An object store has no lock: there only
        one run may be started at a time, or the format must be Delta or Iceberg.
        """
        if not self._is_local:
            self._add_columns(one for one in TABLES.values() if one.layer == layer)
            yield
            return
        self._prepare()
        path = f"{self.root}/{LOCK}.{layer}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._lock(descriptor, layer)
            self._add_columns(one for one in TABLES.values() if one.layer == layer)
            yield
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int, layer: str) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TablesInUseError(
                path=self.root,
                reason=f"another run is writing the {layer} tables",
                remedy="Wait for its end, or give another folder",
            ) from error

    def _prepare(self) -> None:
        """Create the folder; refuse one with other things in it."""
        try:
            os.makedirs(self.root, exist_ok=True)
            names = set(os.listdir(self.root))
        except (FileExistsError, NotADirectoryError) as error:
            raise TablesError(
                path=self.root,
                reason="this is not a folder: it, or a folder above it, is a file",
                remedy="Give --tables a folder",
            ) from error
        if names and not any(name == PROGRESS.layer or name.startswith(LOCK) for name in names):
            raise TablesError(
                path=self.root,
                reason="it holds files other than tables of qmq",
                remedy="Give a folder that is new or empty, or one that `qmq pipeline` has made",
            )

    # ---- reading ------------------------------------------------------------------------------

    def path(self, table: Table) -> str:
        """The folder of a table."""
        return f"{self.root}/{table.layer}/{table.name}"

    def checkpoint(self, table: Table) -> str:
        """The checkpoint of the stream that writes a table. It is inside the table's folder, so if
        that is deleted, all data is read again.
        """
        return f"{self.path(table)}/{_CHECKPOINT}"

    def exists(self, table: Table) -> bool:
        """Whether the table was ever written."""
        return self._found(table) is not None

    def read(self, table: Table) -> DataFrame:
        """All rows; none if the table was never written. Columns that older files lack are null."""
        from pyspark.sql import functions as fn

        found = self._found(table)
        if found is None:
            return self.spark.sql(table.nothing())
        missing = {one.name: KINDS[one.kind] for one in table.without(found.columns)}
        return found.select(
            *(
                fn.lit(None).cast(missing[name]).alias(name) if name in missing else fn.col(name)
                for name in table.names
            )
        )

    def view(self, table: Table, name: str = "") -> None:
        """Make the table a temporary view, by default as `qmq_` and its name."""
        self.read(table).createOrReplaceTempView(name or f"qmq_{table.name}")

    def look_again(self, table: Table) -> None:
        """Refresh the table at its next read: a stream writes in a session of its own, and Iceberg caches tables."""
        self._looked.discard(table)

    def _found(self, table: Table) -> DataFrame | None:
        from pyspark.errors import AnalysisException

        reader = self.spark.read
        try:
            if self._format == ICEBERG:
                if table not in self._looked:
                    self.spark.catalog.refreshTable(self._name(table))
                    self._looked.add(table)
                found = reader.table(self._name(table))
            elif self._format == DELTA:
                found = reader.format(DELTA).load(self.path(table))
            else:
                path = _IN_PATTERNS.sub(r"\\\g<0>", self.path(table))
                found = reader.schema(table.ddl()).option(_VERIFY, "true").parquet(path)
            _ = found.schema  # Spark Connect looks for the table only now
        except AnalysisException as error:
            if any(word in str(error) for word in _ABSENT):
                return None
            raise
        except Exception as error:  # the error's class depends on Spark's version, and on Connect
            if _NO_CONNECTOR not in str(error):
                raise
            raise self._without_connector() from error
        return found

    # ---- writing ------------------------------------------------------------------------------

    def append(self, frame: DataFrame, table: Table) -> None:
        """Add rows."""
        self._write(frame, table, "append")

    def overwrite(self, frame: DataFrame, table: Table) -> None:
        """Replace each partition that the frame has rows of; all others stay."""
        self._write(frame, table, "partitions")

    def replace(
        self, frame: DataFrame, table: Table, made: Collection[int | str] | None = None
    ) -> int:
        """Replace the partitions `made`, or the whole table for None, by the rows; returns their number.

        Each partition becomes one file, or a few if Spark finds it too large. Requires: `frame` has rows of
        no other partition.
        """
        from pyspark.sql import Observation
        from pyspark.sql import functions as fn

        if made is not None and not self.exists(table):
            made = None
        if made is not None and len(made) > _COUNTED_MAX and self._format == PARQUET:
            some = sorted(made)[:_COUNTED_MAX]
            rows = self.replace(frame.where(_is_in(table, some)), table, some)
            rest = sorted(set(made) - set(some))
            return rows + self.replace(frame.where(_is_in(table, rest)), table, rest)
        observed = Observation()
        counts = [fn.count(fn.lit(1)).alias("rows")]
        some = [] if made is None else sorted(made)
        names = [f"of_{number}" for number, _ in enumerate(some)]
        key = table.partitions[-1] if table.partitions else ""
        counts += [
            fn.count_if(fn.col(key) == one).alias(name)
            for name, one in zip(names, some, strict=True)
        ]
        shown = frame.select(*table.names).observe(observed, *counts)
        if table.partitions:
            shown = shown.hint("rebalance", *(fn.col(name) for name in table.partitions))
        else:
            shown = shown.coalesce(1)
        self._write(shown, table, "all" if made is None else "partitions", made)
        found = _seen(observed)
        if not found:
            if not frame.isEmpty():
                raise RuntimeError(f"Spark did not count the rows of {table.name}")
            found = dict.fromkeys(("rows", *names), 0)
        if self._format == PARQUET:
            for name, one in zip(names, some, strict=True):
                if not found[name]:
                    self._clear(table, one)
        return int(found["rows"])

    def _clear(self, table: Table, partition: int | str) -> None:
        """Remove a partition that has no rows any more."""
        nothing = self.spark.sql(table.nothing()).drop(*table.partitions)
        path = f"{self.path(table)}/{table.partitions[-1]}={partition}"
        nothing.write.mode("overwrite").parquet(path)

    def _write(
        self,
        frame: DataFrame,
        table: Table,
        mode: str,
        made: Collection[int | str] | None = None,
    ) -> None:
        """`mode`: append, partitions (those of the rows, or those `made`) or all."""
        rows = frame.select(*table.names)
        if self._format == ICEBERG:
            self._write_iceberg(rows, table, mode, made)
            return
        writer = rows.write.format(self._format).partitionBy(*table.partitions)
        if mode == "partitions" and self._format == DELTA and made is not None:
            writer = writer.option("replaceWhere", _sql_in(table, made))
        elif mode != "append":
            is_whole = mode == "all"
            writer = writer.option("partitionOverwriteMode", "static" if is_whole else "dynamic")
        if self._format == DELTA:
            writer = writer.option("mergeSchema", "true")  # columns may have been added
        writer.mode("append" if mode == "append" else "overwrite").save(self.path(table))
        if self._namespace:
            self._register(table)

    def _write_iceberg(
        self, rows: DataFrame, table: Table, mode: str, made: Collection[int | str] | None
    ) -> None:
        from pyspark.sql import functions as fn

        self._add_columns([table])
        writer = rows.writeTo(self._name(table))
        if mode == "all" or not self.exists(table):
            of_format = writer.using(ICEBERG)
            if table.partitions:
                of_format = of_format.partitionedBy(*(fn.col(one) for one in table.partitions))
            of_format.createOrReplace()
        elif mode == "append":
            writer.append()
        elif made is not None:
            writer.overwrite(_is_in(table, made))
        else:
            writer.overwritePartitions()

    def _add_columns(self, tables: Iterable[Table]) -> None:
        """Add the columns of this version to tables of Iceberg: before a query reads such a table and replaces it."""
        for table in tables if self._format == ICEBERG else ():
            found = self._found(table)
            if found is not None and (added := table.without(found.columns)):
                columns = table.ddl([one.name for one in added])
                self.spark.sql(f"ALTER TABLE {self._name(table)} ADD COLUMNS ({columns})")

    def _register(self, table: Table) -> None:
        """Register the table in the session's catalog."""
        name = self._name(table)
        location = self.path(table).replace("'", "\\'")
        columns = f"({table.ddl()})" if self._format == PARQUET else ""
        parted = ", ".join(table.partitions)
        parted = f"PARTITIONED BY ({parted})" if parted and self._format == PARQUET else ""
        self.spark.sql(
            f"CREATE TABLE IF NOT EXISTS {name} {columns} USING {self._format} {parted} "
            f"LOCATION '{location}'"
        )
        if parted:
            self.spark.sql(f"ALTER TABLE {name} RECOVER PARTITIONS")

    def _name(self, table: Table) -> str:
        return f"{self._namespace}.{table.name}"

    def _without_connector(self) -> OptionError:
        return OptionError(
            option="--table-format",
            value=f"{self._format}, and this session of Spark has no connector for it",
            allowed="a format whose connector the session has",
            remedy="Start Spark with it (spark-submit --packages, or PYSPARK_SUBMIT_ARGS), or use parquet.",
        )

    # ---- how far each job has come ------------------------------------------------------------

    def progress(self, job: str) -> dict[str, Any]:
        """The progress that a job recorded at the end of its last run; empty if no run has ended."""
        if self._notes is None:
            rows = self.read(PROGRESS).select("job", "notes").collect()
            self._notes = {row["job"]: row["notes"] for row in rows}
        found: dict[str, Any] = json.loads(self._notes.get(job, "{}"))
        return found

    def note_progress(self, job: str, notes: Mapping[str, Any]) -> None:
        """Record the progress of a job, replacing the earlier one."""
        at = datetime.fromtimestamp(SYSTEM_CLOCK.now_ms() / 1000, UTC)
        row = self.spark.createDataFrame([(at, json.dumps(notes), job)], PROGRESS.ddl())
        self.overwrite(row.coalesce(1), PROGRESS)
        self._notes = None


def _is_in(table: Table, made: Collection[int | str]) -> Column:
    from pyspark.sql import functions as fn

    return fn.col(table.partitions[-1]).isin(sorted(made))


def _sql_in(table: Table, made: Collection[int | str]) -> str:
    values: Sequence[int | str] = sorted(made)
    texts = (f"'{one}'" if isinstance(one, str) else str(one) for one in values)
    return f"{table.partitions[-1]} IN ({', '.join(texts)})"


def _seen(observed: Observation) -> Mapping[str, int]:
    """The observed values; none if adaptive execution dropped the plan because it had no rows.

    PySpark then fails at a row without a schema, or gives no names (SPARK-54620).
    """
    try:
        found: dict[str, int] = observed.get
    except Exception as error:  # Spark's classes do not exist with Connect alone
        if type(error).__name__ != "Py4JJavaError":
            raise
        return {}
    return found
