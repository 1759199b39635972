"""Spark's data source `qmq_outbox`: the rows of one or many outbox tables.

::

    spark.read.format("qmq_outbox").option("url", "postgresql://reader@db/orders").load()
    spark.read.format("qmq_outbox").option("database", "orders,payments").load()    # of qmq.toml

Bodies stay in the database. A partition is a range of row numbers, read in short transactions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from qmq_client.settings.config import DatabaseSection, load_config
from qmq_pipeline.errors import OptionError
from qmq_pipeline.places.options import known_options, number_option
from qmq_pipeline.rows.outbox import RANGE_ROWS, batches, first_and_next_id, id_ranges
from qmq_pipeline.tables.schemas import OUTBOX

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

FORMAT: Final = "qmq_outbox"
#: Databases are told from each other by a blank: a URL has none.
OPTIONS: Final = ("url", "database", "config", "table_prefix", "schema", "partition_rows")
_PARTITION_ROWS_MAX: Final = 100_000_000


@dataclass(frozen=True, slots=True)
class OutboxPartition(InputPartition):
    """What one task reads."""

    #: A `DatabaseSection` as plain values.
    section: Mapping[str, Any]
    first_id: int
    next_id: int
    scanned_at_ms: int


class OutboxDataSource(DataSource):
    """The format `qmq_outbox`."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return OUTBOX.ddl()

    def reader(self, schema: StructType) -> DataSourceReader:
        return OutboxReader(
            databases_of(self.options, os.environ), schema.fieldNames(), _rows(self)
        )


class OutboxReader(DataSourceReader):
    """Reads every row that is there when it is planned."""

    def __init__(
        self, sections: Sequence[DatabaseSection], columns: Sequence[str], partition_rows: int
    ) -> None:
        for name in columns:
            if name not in OUTBOX.names:
                raise OptionError(
                    option="schema",
                    value=name,
                    allowed=", ".join(OUTBOX.names),
                    remedy="Choose from these.",
                )
        self._sections = [dict(msgspec.to_builtins(one)) for one in sections]
        self._columns = list(columns)
        self._partition_rows = partition_rows

    def partitions(self) -> Sequence[InputPartition]:
        found: list[InputPartition] = []
        for section in self._sections:
            ends = first_and_next_id(msgspec.convert(section, DatabaseSection))
            first_id, next_id, now_ms = ends
            found += [
                OutboxPartition(section, first, after, now_ms)
                for first, after in id_ranges(first_id, next_id, self._partition_rows)
            ]
        return found

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, OutboxPartition):
            return
        for batch in batches(
            msgspec.convert(partition.section, DatabaseSection),
            first_id=partition.first_id,
            next_id=partition.next_id,
            scanned_at_ms=partition.scanned_at_ms,
        ):
            yield batch.select(self._columns)


def databases_of(
    given: Mapping[str, str], environment: Mapping[str, str]
) -> tuple[DatabaseSection, ...]:
    """The databases that these options mean: by URL, by name in `qmq.toml`, or all that are there."""
    options = known_options(given, OPTIONS)
    named = [
        *options.get("url", "").split(),
        *options.get("database", "").replace(",", " ").split(),
    ]
    config = options.get("config")
    loaded = load_config(
        environment=environment, file=Path(config) if config else None, databases=named
    )
    sections = loaded.config.databases
    if not sections:
        raise OptionError(
            option="url",
            value="no database is given, and none is configured",
            allowed="SQLAlchemy URLs, separated by blanks; or names of configured databases",
            remedy="Give one as url.",
        )
    changes = {name: options[name] for name in ("table_prefix", "schema") if name in options}
    return tuple(msgspec.structs.replace(one, **changes) for one in sections)


def _rows(source: DataSource) -> int:
    options = known_options(source.options, OPTIONS)
    text = options.get("partition_rows")
    if text is None:
        return RANGE_ROWS
    return number_option("partition_rows", text, 1, _PARTITION_ROWS_MAX)
