"""The oldest series of Spark that has every job, with the connectors of Delta and Iceberg, and with Parquet.

One process has one session with both connectors, in which the commands of all formats run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from qmq_client.commands.exit_codes import ATTENTION, DONE
from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.tables.schemas import LIFECYCLE, LOG
from tests.conftest import give_up
from tests.pipeline.commands import Commands, commands
from tests.pipeline.gold import acked, pulled
from tests.pipeline.quick import QUICK
from tests.pipeline.world import START_MS, DataDirectory, OutboxDatabase, messages
from tests.services.connectors import connectors
from tests.services.drivers import environment_apart
from tests.services.rungs import RungError

SPARK: Final = "pyspark>=4.1.2,<4.2"
#: As docs/pipeline-tables.md says, for this series of Spark.
CONNECTORS: Final = (
    "io.delta:delta-spark_4.1_2.13:4.4.0",
    "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.11.0",
)
SETTINGS: Final = {
    **QUICK,
    "spark.sql.extensions": (
        "io.delta.sql.DeltaSparkSessionExtension,"
        "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"
    ),
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
    "spark.sql.catalog.lake.type": "hadoop",
    "spark.databricks.delta.snapshotPartitions": "1",
}
#: Format → the catalog's name for its tables.
NAMESPACES: Final = {"delta": "delta_qmq", "iceberg": "lake.qmq", "parquet": "parquet_qmq"}
#: A table, and a column that a version before did not have.
OLDER: Final = ((LOG, "now_due_at"), (LIFECYCLE, "total_ms"))

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("spark")]


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """The process of the oldest Spark."""
    try:
        environment = environment_apart([SPARK])
        jars = connectors(CONNECTORS, environment, (4, 1))
    except RungError as error:
        give_up(f"the oldest Spark for the tests. {error}", os.environ)
    folder = tmp_path_factory.mktemp("oldest")
    settings = {
        **SETTINGS,
        "spark.jars": ",".join(map(str, jars)),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.sql.catalog.lake.warehouse": str(folder / "lake"),
    }
    words = [word for name, value in settings.items() for word in ("--conf", f"'{name}={value}'")]
    environment["PYSPARK_SUBMIT_ARGS"] = " ".join([*words, "pyspark-shell"])
    with commands(environment, folder) as process:
        yield process


@dataclass(frozen=True, slots=True)
class Shop:
    """A broker's files and an outbox, which has a row of a message that was lost."""

    folder: Path

    def grow(self, ids: MessageIds, count: int, first: int) -> None:
        """More messages, and a group that takes half of them."""
        directory, database = self._sides()
        some = messages(ids, count)
        at_ms = START_MS + first
        directory.append(some, at_ms=at_ms)
        directory.act(
            [pulled(first, count // 2, at_ms + 1), acked(first, first + count // 2, at_ms + 2)]
        )
        database.insert(some, created_at_ms=at_ms)
        directory.close()
        database.close()

    def lose(self, ids: MessageIds) -> None:
        """A row of a message that the log does not have."""
        directory, database = self._sides()
        database.insert(messages(ids, 1), created_at_ms=START_MS)
        directory.close()
        database.close()

    def _sides(self) -> tuple[DataDirectory, OutboxDatabase]:
        return DataDirectory(self.folder / "broker"), OutboxDatabase(self.folder / "orders.db")

    @property
    def options(self) -> list[str]:
        return [
            "--path",
            f"{self.folder}/broker",
            "--database",
            f"sqlite:///{self.folder}/orders.db",
        ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parquet is what all other tests have, on the newest Spark."""
    if "table_format" in metafunc.fixturenames:
        is_release = metafunc.config.getoption("--release")
        formats = [one for one in NAMESPACES if is_release or one != "parquet"]
        metafunc.parametrize("table_format", formats)


def test_P4_every_job_runs_on_the_oldest_spark(
    oldest: Commands, tmp_path: Path, table_format: str
) -> None:
    ids, shop, tables = MessageIds(1), Shop(tmp_path), tmp_path / "tables"
    shop.grow(ids, 500, 0)
    shop.lose(ids)
    namespace = NAMESPACES[table_format]
    oldest.rows(f"CREATE NAMESPACE IF NOT EXISTS {namespace}")

    names = ["--table-format", table_format, "--namespace", namespace]
    options = [*names, "--tables", str(tables), "--json", *shop.options]

    def job(name: str, *more: str, code: int = DONE) -> dict[str, Any]:
        ended, told = oldest.run("pipeline", name, *options, *more)
        assert ended == code, told
        made: dict[str, Any] = told
        return made

    first = job("run", "--rows-kept", code=ATTENTION)
    assert first["ingested"]["rows"]["messages"] == 500
    assert first["audit"]["findings"]["lost"] == 1
    if table_format != "parquet":  # whose files of older versions tests/pipeline/test_faults.py has
        for table, column in OLDER:
            name, parted = f"{namespace}.{table.name}", ", ".join(table.partitions)
            if table_format == "delta":
                name = f"delta.`{tables}/{table.layer}/{table.name}`"
            older = f"PARTITIONED BY ({parted}) AS SELECT * EXCEPT ({column}) FROM {name}"
            oldest.rows(f"CREATE OR REPLACE TABLE {name} USING {table_format} {older}")
    shop.grow(ids, 100, 500)
    assert job("ingest")["rows"]["messages"] == 100
    assert job("lifecycle")["parts_made"] == 2
    assert job("marts")["days_made"]
    again = job("audit", "--rows-kept", code=ATTENTION)
    assert again["stored"] == 600
    assert again["findings"] == first["audit"]["findings"]
    counted = "COUNT(*), COUNT(DISTINCT message_id), COUNT_IF(outcome = 'acked')"
    assert oldest.rows(f"SELECT {counted} FROM {namespace}.lifecycle") == [[601, 601, 300]]
    # One transaction for each run, and one for the older table.
    commits = len(list((tables / "silver" / "lifecycle" / "_delta_log").glob("*.json")))
    assert commits == (3 if table_format == "delta" else 0)
