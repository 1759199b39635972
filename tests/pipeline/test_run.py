"""`qmq pipeline run`: all jobs in their order by one command, as often as one likes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
from click.testing import CliRunner, Result
from deltalake import DeltaTable

from qmq_client.commands.root import root
from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.tables.columns import TIME
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import AUDIT_FINDINGS, FLOW_MINUTE, TABLES
from tests.pipeline.rows import rows_of
from tests.pipeline.world import START_MS, DataDirectory, OutboxDatabase, messages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run(*arguments: str | Path) -> Result:
    line = ["pipeline", "run", *map(str, arguments)]
    return CliRunner().invoke(root, line, catch_exceptions=False)


def in_order(rows: pa.Table) -> list[str]:
    return sorted(repr(row) for row in rows.to_pylist())


def test_one_command_does_all_in_order_and_says_by_its_exit_code_what_the_audit_found(
    spark: SparkSession, directory: DataDirectory, database: OutboxDatabase, tmp_path: Path
) -> None:
    ids = MessageIds(5)
    sound = messages(ids, 60)
    database.insert(sound, created_at_ms=START_MS)
    directory.append(sound, at_ms=START_MS + 100)
    tables = tmp_path / "tables"
    page = tmp_path / "report.html"
    folders = ("--tables", tables, "--path", directory.path, "--out", page)
    here = (*folders, "--database", database.section.url, "--expose", "delta")

    first = run(*here, "--rows-kept", "--json")
    assert first.exit_code == 0, first.output
    told = json.loads(first.stdout)
    assert (told["audit"]["committed"], told["audit"]["stored"]) == (60, 60)
    assert list(told["seconds"]) == ["ingest", "lifecycle", "marts", "audit", "report", "expose"]
    assert told["report"]["path"] == str(page)
    flow = rows_of(tables, FLOW_MINUTE)
    assert sum(row["stored"] for row in flow) == 60

    (lost,) = messages(ids, 1)
    database.insert([lost], created_at_ms=START_MS + 200)
    second = run(*here, "--rows-kept")
    assert second.exit_code == 1, second.output
    assert "FINDINGS: 1 lost" in second.stdout
    # What the log of a schedule gets: one line of each job that came to its end, and what a slow machine adds.
    told_stages = [line.partition(" ")[2].partition(":")[0] for line in second.stderr.splitlines()]
    stages = [one for one in told_stages if one != "step under way"]
    assert stages == [
        *("ingest outbox", "lifecycle", "marts flow_minute", "audit", "report"),
        "expose delta",
    ]
    assert lost.message_id.hex() in page.read_text()
    found = rows_of(tables, AUDIT_FINDINGS)
    assert [(row["kind"], row["message_id"]) for row in found] == [("lost", lost.message_id.hex())]

    third = json.loads(run(*here, "--rows-kept", "--json").stdout)
    assert (third["audit"]["findings"]["lost"], third["audit"]["stored"]) == (1, 60)
    exposed = third["exposed"]["tables"]
    assert {"messages", "lifecycle", "flow_minute", "audit_run"} <= set(exposed)
    for name, one in exposed.items():
        ours = Lake(str(tables)).read(spark, TABLES[name]).toArrow()
        theirs = DeltaTable(one["where"]).to_pyarrow_table()
        assert in_order(theirs) == in_order(ours), f"Delta tells otherwise of {name}"
        kinds = {
            field.type
            for uri in DeltaTable(one["where"]).file_uris()
            for field in pq.read_schema(uri)
        }
        assert {kind for kind in kinds if pa.types.is_timestamp(kind)} <= {TIME}, "not for Iceberg"
