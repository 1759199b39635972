"""Registers the sources in a Spark session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qmq_pipeline.sources.log_source import LogDataSource
from qmq_pipeline.sources.outbox_source import OutboxDataSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(session: SparkSession) -> None:
    """Make `session.read.format("qmq")` and `qmq_outbox` work; may be called again."""
    from pyspark.errors import AnalysisException

    for source in (LogDataSource, OutboxDataSource):
        try:
            session.dataSource.register(source)
        except (
            AnalysisException
        ) as error:  # Spark 4.0 refuses sources that it has already found itself
            if "already" not in str(error).lower():
                raise
