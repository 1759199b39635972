"""The oldest series of Spark that has every job, with and without Iceberg's connector."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qmq_client.commands.exit_codes import ATTENTION
from qmq_client.wire.message_id import MessageIds
from tests.conftest import give_up
from tests.pipeline.quick import QUICK
from tests.pipeline.world import START_MS, DataDirectory, OutboxDatabase, messages
from tests.services.drivers import environment_apart
from tests.services.rungs import RungError

SPARK = "pyspark>=4.1.2,<4.2"
#: As docs/pipeline-tables.md says, for this series of Spark.
ICEBERG = {
    "spark.jars.packages": "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.11.0",
    "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
    "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
    "spark.sql.catalog.lake.type": "hadoop",
}

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("spark")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """With Iceberg; for a release with Parquet too, by the same jobs on the same Spark."""
    more = ["parquet"] if metafunc.config.getoption("--release") else []
    metafunc.parametrize("table_format", ["iceberg", *more])


def test_P4_every_job_runs_on_the_oldest_spark(
    request: pytest.FixtureRequest, tmp_path: Path, table_format: str
) -> None:
    try:
        environment = environment_apart([SPARK])
    except RungError as error:
        give_up(f"the oldest Spark for the tests. {error}", os.environ)
    log, outbox = tmp_path / "broker", tmp_path / "orders.db"
    *every, lost = messages(MessageIds(1), 501)
    directory, database = DataDirectory(log), OutboxDatabase(outbox)
    directory.append(every)
    directory.close()
    database.insert([*every, lost], created_at_ms=START_MS)
    database.close()
    settings = dict(QUICK)
    options = ["--path", str(log), "--database", f"sqlite:///{outbox}"]
    if table_format == "iceberg":
        settings |= {**ICEBERG, "spark.sql.catalog.lake.warehouse": str(tmp_path / "lake")}
        options += ["--table-format", "iceberg", "--namespace", "lake.qmq"]
    words = [word for name, value in settings.items() for word in ("--conf", f"'{name}={value}'")]
    environment["PYSPARK_SUBMIT_ARGS"] = " ".join([*words, "pyspark-shell"])

    def run() -> dict[str, Any]:
        tables = ["--tables", str(tmp_path / "tables"), "--rows-kept", "--json"]
        line = [sys.executable, "-m", "qmq_client", "pipeline", "run", *tables, *options]
        done = subprocess.run(line, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == ATTENTION, done.stdout + done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    first = run()
    assert first["ingested"]["rows"]["messages"] == 500
    assert first["audit"]["findings"]["lost"] == 1
    if request.config.getoption("--release"):
        again = run()
        assert not again["ingested"]["rows"].get("messages")
        assert again["audit"]["findings"] == first["audit"]["findings"]
