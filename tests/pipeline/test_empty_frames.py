"""Frames that Spark finds to be empty only while it runs: with adaptive execution it drops the rest of the plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from qmq_pipeline.jobs.audit import write_findings
from qmq_pipeline.tables.schemas import AUDIT_FINDINGS, PART_DAYS
from qmq_pipeline.tables.store import Tables
from qmq_pipeline.tables.table import KINDS, Table, arrow_kinds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def empty_at_run_time(spark: SparkSession, table: Table) -> DataFrame:
    """Rows of this table of which none is left after a shuffle."""
    columns = [f"CAST(id AS {KINDS[one.kind]}) AS `{one.name}`" for one in table.columns]
    names = ", ".join(f"`{name}`" for name in table.names)
    return spark.sql(
        f"SELECT {', '.join(columns)} FROM (SELECT id, count(*) AS n FROM range(0, 1000, 1, 4) "
        f"GROUP BY id HAVING n > 1) GROUP BY ALL"
    ).selectExpr(*names.split(", "))


@pytest.mark.parametrize("made", [None, [1, 2]], ids=["all", "some"])
def test_a_table_is_replaced_by_what_turns_out_to_be_empty(
    spark: SparkSession, tmp_path: Path, made: list[int] | None
) -> None:
    tables = Tables(spark, str(tmp_path))
    there = spark.sql("SELECT '2026-01-31' AS day, id AS part FROM range(1, 4)")
    assert tables.replace(there, PART_DAYS) == 3
    assert tables.replace(empty_at_run_time(spark, PART_DAYS), PART_DAYS, made) == 0
    left = [row["part"] for row in tables.read(PART_DAYS).collect()]
    assert left == ([] if made is None else [3])


def test_an_audit_whose_findings_turn_out_to_be_none_counts_none(
    spark: SparkSession, tmp_path: Path
) -> None:
    tables = Tables(spark, str(tmp_path))
    found = empty_at_run_time(spark, AUDIT_FINDINGS)
    assert set(write_findings(tables, "run", found, 10).values()) == {0}


def test_every_kind_of_column_has_a_type_of_spark_and_of_arrow() -> None:
    assert list(KINDS) == list(arrow_kinds())
