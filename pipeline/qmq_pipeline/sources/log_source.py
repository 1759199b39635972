"""Spark's data source `qmq`: the logs of a broker as tables.

::

    spark.read.format("qmq").option("path", "/var/lib/qmq").option("columns", "subject,stored_at").load()

A partition is a range of the log that begins and ends at frames. To plan, the driver reads a few bytes
of each segment; workers read, verify and decode, and pass Arrow batches on. A range that is read
twice gives the same rows (P1): its content never changes, and nothing beyond the durable end is
planned.

This class is registered in every session, but most sessions never use it. So it imports the readers
(`log_batches.py`, `log_stream.py`) only when Spark requests one, in a separate process.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from qmq_pipeline.places.options import LogOptions


FORMAT: Final = "qmq"


class LogDataSource(DataSource):
    """The format `qmq`."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        from qmq_pipeline.places.options import parse_log_options

        options = parse_log_options(self.options)
        return options.table.ddl(options.columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        from qmq_pipeline.sources.log_batches import batch_reader

        return batch_reader(self._options(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from qmq_pipeline.sources.log_stream import LogStreamReader

        return LogStreamReader(self._options(schema))

    def _options(self, schema: StructType) -> LogOptions:
        """The options with the columns of the schema, which the user may have narrowed."""
        from qmq_pipeline.places.options import parse_columns, parse_log_options
        from qmq_pipeline.places.places import with_token

        options = parse_log_options(self.options)
        return replace(
            options,
            place=with_token(options.place, os.environ),
            columns=parse_columns(",".join(schema.fieldNames()), options.table),
        )
