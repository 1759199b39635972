"""The format `qmq_outbox`, as Spark finds it by itself; see `pyspark_qmq`."""

from qmq_pipeline.sources.outbox_source import OutboxDataSource as DefaultSource

__all__ = ["DefaultSource"]
