"""Spark's data source `qmq_outbox`: the rows of one or many outbox tables.

::

    spark.read.format("qmq_outbox").option("url", "postgresql://reader@db/orders").load()
    spark.read.format("qmq_outbox").option("database", "orders,payments").load()    # of qmq.toml

`outbox_batches.py` reads batches, `outbox_stream.py` streams; they are imported only when a reader is
asked for, as in `log_source.py`. Bodies stay in the database. A partition is a range of row numbers,
read in short transactions.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from qmq_pipeline.places.outbox_options import OutboxOptions

FORMAT: Final = "qmq_outbox"


class OutboxDataSource(DataSource):
    """The format `qmq_outbox`."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        from qmq_pipeline.places.outbox_options import parse_outbox_options
        from qmq_pipeline.tables.schemas import OUTBOX

        # A wrong option is reported here, by `load`: a stream would report it in a separate thread.
        parse_outbox_options(self.options, os.environ, OUTBOX.names)
        return OUTBOX.ddl()

    def reader(self, schema: StructType) -> DataSourceReader:
        from qmq_pipeline.sources.outbox_batches import OutboxBatchReader

        return OutboxBatchReader(self._options(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from qmq_pipeline.sources.outbox_stream import OutboxStreamReader

        return OutboxStreamReader(self._options(schema))

    def _options(self, schema: StructType) -> OutboxOptions:
        from qmq_pipeline.places.outbox_options import parse_outbox_options

        return parse_outbox_options(self.options, os.environ, schema.fieldNames())
