"""Makes the format `qmq_outbox` known to Spark; see `pyspark_qmq`."""

from qmq_pipeline.sources.outbox_source import OutboxDataSource as DefaultSource

__all__ = ["DefaultSource"]
