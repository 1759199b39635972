"""Values of the driver as tables for Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


def arrow_frame(spark: SparkSession, table: pa.Table) -> DataFrame:
    """A small Arrow table as a DataFrame; of an empty one, Spark Connect needs the schema."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return spark.createDataFrame(table, from_arrow_schema(table.schema))
