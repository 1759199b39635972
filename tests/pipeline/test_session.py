"""What a local session tells its JVM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.pipeline.quick import QUICK

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_jvm_compiles_late_what_a_start_alone_calls_and_the_users_options_come_behind(
    spark: SparkSession,
) -> None:
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    bean = jvm.java.lang.management.ManagementFactory.getRuntimeMXBean()
    said = list(bean.getInputArguments())
    late = said.index("-XX:Tier4InvocationThreshold=80000")
    users = [said.index(one) for one in QUICK["spark.driver.extraJavaOptions"].split()]
    assert late < min(users), "of two options the JVM takes the later"
