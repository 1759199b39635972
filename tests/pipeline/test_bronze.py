"""Bronze tables that tests make without Spark are those that `ingest` makes, in the first run and the next."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from qmq_pipeline.jobs.ingest import ingest
from qmq_pipeline.places.options import Place
from qmq_pipeline.tables.schemas import ACTIONS, LOG, OUTBOX, PROGRESS, SPANS
from tests.pipeline.bronze import write_bronze
from tests.pipeline.rows import Row, rows_of
from tests.pipeline.test_incremental import CUT, Life

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: They are of the moment.
_TIMES = ("scanned_at", "day", "at")


def rows(tables: str) -> dict[str, list[str]]:
    return {
        table.name: sorted(repr(_steady(row)) for row in rows_of(tables, table))
        for table in (LOG, ACTIONS, OUTBOX, SPANS, PROGRESS)
    }


def _steady(row: Row) -> Row:
    steady = {name: value for name, value in row.items() if name not in _TIMES}
    if "notes" in row:
        notes = json.loads(row["notes"])
        notes |= {"parts": sorted(notes["parts"].items())}
        notes |= {"scans": [*notes["scans"]], "read_at_ms": bool(notes["read_at_ms"])}
        steady["notes"] = sorted(notes.items())
    return steady


def test_bronze_made_without_spark_is_what_ingest_makes(
    spark: SparkSession, tmp_path: Path
) -> None:
    life = Life(3, tmp_path)
    place, databases = Place(path=str(life.directory.path)), (life.database.section,)
    config = replace(CUT, tables=str(tmp_path / "tables"), place=place, databases=databases)
    direct = replace(config, tables=str(tmp_path / "direct"))
    for _ in range(2):
        for _ in range(4):
            life.step()
        made, told = write_bronze(direct), ingest(spark, config)
        assert (made.rows, made.outbox) == (told.rows, told.outbox)
        assert rows(direct.tables) == rows(config.tables)
    life.directory.close()
    life.database.close()
