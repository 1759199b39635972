"""Converts values of the driver to tables of Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


def arrow_frame(spark: SparkSession, table: pa.Table) -> DataFrame:
    """A small Arrow table as a DataFrame; for an empty one, Spark Connect needs the schema."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return spark.createDataFrame(table, from_arrow_schema(table.schema))
