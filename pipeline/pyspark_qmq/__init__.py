"""The format `qmq`, as Spark finds it by itself: in modules named `pyspark_…`, under the name `DefaultSource`.

Spark imports every such module on its path when a format is asked for that nobody registered, and one that
raises takes all others with it. So there is nothing here but the name.
"""

from qmq_pipeline.sources.log_source import LogDataSource as DefaultSource

__all__ = ["DefaultSource"]
