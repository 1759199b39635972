"""Settings with which Spark is done with a few rows soon: of a test's time most is Spark's thinking, not its work."""

from __future__ import annotations

import os
import sys

#: One partition to shuffle into, no code generation, no compiler that thinks long, no plan written down for a page
#: that nobody opens, and of small files no program that is started to rename them.
QUICK = {
    "spark.sql.shuffle.partitions": "1",
    "spark.default.parallelism": "2",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.maxPlanStringLength": "1000",
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "100000",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.ui.explainMode": "simple",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.ui.enabled": "false",
}


def quick_environment() -> dict[str, str]:
    """For a process that starts its own Spark: the same, and what this process has on its path."""
    settings = " ".join(f"--conf '{name}={value}'" for name, value in QUICK.items())
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYSPARK_SUBMIT_ARGS": f"{settings} pyspark-shell",
    }
