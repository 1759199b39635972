"""Settings with which Spark is done with a few rows soon: of a test's time most is Spark's thinking, not its work."""

from __future__ import annotations

#: One partition to shuffle into and one task for all files of a table, no code generation, no compiler that thinks long,
#: no plan that is checked after each rule or written down for a page that nobody opens.
QUICK = {
    "spark.sql.shuffle.partitions": "1",
    "spark.default.parallelism": "2",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.lightweightPlanChangeValidation": "false",
    "spark.sql.maxPlanStringLength": "1000",
    "spark.sql.files.openCostInBytes": "0",
    "spark.sql.files.minPartitionNum": "1",
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "100000",
    "spark.sql.ui.explainMode": "simple",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.ui.enabled": "false",
}
