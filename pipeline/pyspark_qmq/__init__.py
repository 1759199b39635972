"""Makes the format `qmq` known to Spark, which looks for `DefaultSource` in modules named `pyspark_…`.

For an unregistered format, Spark imports every such module on its path, and a module that raises
breaks all others. So this module defines only the name.
"""

from qmq_pipeline.sources.log_source import LogDataSource as DefaultSource

__all__ = ["DefaultSource"]
