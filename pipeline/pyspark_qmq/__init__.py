"""Lets Spark find the format `qmq` by itself: in modules named `pyspark_…`, under the name `DefaultSource`.

When an unregistered format is asked for, Spark imports every such module on its path, and
one that raises breaks all others. So this module holds only the name.
"""

from qmq_pipeline.sources.log_source import LogDataSource as DefaultSource

__all__ = ["DefaultSource"]
