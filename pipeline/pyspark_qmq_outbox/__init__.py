"""Lets Spark find the format `qmq_outbox` by itself; see `pyspark_qmq`."""

from qmq_pipeline.sources.outbox_source import OutboxDataSource as DefaultSource

__all__ = ["DefaultSource"]
