"""P4: an audit by tallies and one by joins of everything find the same, and count the same, in generated histories."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from qmq_client.settings.sections import DatabaseSection
from qmq_pipeline.jobs.audit import AuditResult, audit
from qmq_pipeline.places.config import AuditOptions, PipelineConfig
from qmq_pipeline.tables.commits import RangeFacts
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import AUDIT_FINDINGS, CANCELLED, MESSAGES, OUTBOX, SCHEDULED
from qmq_pipeline.tables.table import Table
from tests.pipeline.rows import rows_of
from tests.pipeline.test_audit_words import GAP, NEXT_MS, Id, World, planted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DATABASE = "orders"


def test_P4_audits_by_tallies_and_by_joins_of_generated_histories_agree_in_every_finding_and_total(
    spark: SparkSession, tmp_path: Path
) -> None:
    seeds = [*range(200, 208), random.SystemRandom().getrandbits(40)]
    lake = Lake(str(tmp_path))
    lake.prepare()
    with_foreign = [planted(seed) for seed in seeds]
    write(lake, with_foreign)
    section = DatabaseSection(name=DATABASE, url="sqlite://", keep_sent_s=86_400.0)
    options = [
        AuditOptions(grace_s=0.0, since_ms=2_000_000),
        AuditOptions(grace_s=0.0, until_ms=8_000_000, is_closed_world=True),
    ]
    for one in options:
        config = PipelineConfig(tables=lake.root, databases=(section,), audit=one)
        tallied, joined = (audit(spark, config, cross_check=check) for check in (False, True))
        assert found(lake, tallied) == found(lake, joined), seeds
        assert totals(tallied) == totals(joined), seeds
        assert all(count > 0 for count in tallied.findings.values()), "all kinds are planted"
        assert min(tallied.committed, tallied.stored) > 100


def found(lake: Lake, result: AuditResult) -> set[tuple[object, ...]]:
    rows = rows_of(lake.root, AUDIT_FINDINGS, run=result.run)
    return {tuple(value for name, value in row.items() if name != "run") for row in rows}


def totals(result: AuditResult) -> tuple[object, ...]:
    return (
        result.committed,
        result.stored,
        result.foreign_messages,
        result.expected,
        result.findings,
        result.coverage,
    )


def write(lake: Lake, worlds: list[World]) -> None:
    """Worlds of producers of their own as bronze tables: scans one after another, and a log with a gap."""
    scans: list[list[dict[str, object]]] = [[], [], []]
    stored: list[dict[str, object]] = []
    scheduled: list[dict[str, object]] = []
    cancelled: list[dict[str, object]] = []
    for number, world in enumerate(worlds):
        for scan, rows in enumerate(world.scans):
            scanned_at = (NEXT_MS + scan) * 1000
            scans[scan] += [
                {**named(one, number), "database": DATABASE, "row_id": 1, "record_crc": crc}
                | {"state": state, "created_at": at_ms * 1000, "scanned_at": scanned_at}
                for one, crc, state, at_ms in rows
            ]
        stored += [
            {**named(one, number), "record_crc": crc, "stored_at": at_ms * 1000}
            | {"due_at": None if due_ms is None else due_ms * 1000}
            for one, crc, at_ms, due_ms in world.stored
        ]
        scheduled += [
            {**named(one, number), "record_crc": crc, "due_at": due_ms * 1000}
            | {"now_due_at": now_ms * 1000, "physical_offset": place, "stored_at": 0}
            for place, (one, crc, due_ms, now_ms) in enumerate(world.scheduled)
        ]
        cancelled += [
            {**named(one, number), "cancelled_at": 0, "physical_offset": 0}
            for one in world.cancelled
        ]
    for scan, seen in enumerate(scans):
        notes: dict[str, object] = {"scanned_at_ms": NEXT_MS + scan}
        told = facts(0, notes=notes)
        lake.commit(OUTBOX, [*files(lake, OUTBOX, seen), told], name=f"scan-{scan}")
    for sequence, row in enumerate(stored):
        row["sequence"] = sequence
    # The gap is where nothing is judged: between the last row before it and the first behind.
    before = [row for row in stored if int(str(row["stored_at"])) < GAP[0] * 1000]
    behind = [row for row in stored if int(str(row["stored_at"])) >= GAP[0] * 1000]
    ranges = [
        *files(lake, MESSAGES, before, number=1, last_at_ms=GAP[0]),
        facts(2, notes={"is_expired": True}),
        *files(lake, MESSAGES, behind, number=3, first_at_ms=GAP[1], last_at_ms=NEXT_MS),
    ]
    lake.commit(MESSAGES, ranges)
    lake.write_state(MESSAGES, {"read_at_ms": NEXT_MS})
    lake.commit(SCHEDULED, files(lake, SCHEDULED, scheduled))
    lake.commit(CANCELLED, files(lake, CANCELLED, cancelled))


def named(one: Id, world: int) -> dict[str, object]:
    """The columns of an id, of a producer that no other world has."""
    producer = one[0] ^ (world << 8)
    name = f"{producer % 2**64:016x}{one[1] % 2**64:016x}"
    return {"producer": producer, "counter": one[1], "message_id": name, "subject": "orders"}


def facts(number: int, *, notes: dict[str, object] | None = None) -> RangeFacts:
    return RangeFacts(
        source=DATABASE, first=number, next=number + 1, rows=0, files=(), notes=notes or {}
    )


def files(
    lake: Lake,
    table: Table,
    rows: list[dict[str, object]],
    *,
    number: int = 0,
    first_at_ms: int = 0,
    last_at_ms: int = 0,
) -> list[RangeFacts]:
    """The rows in two files, so that words stand in both."""
    found = []
    for part, some in enumerate((rows[::2], rows[1::2])):
        batches = [pa.RecordBatch.from_pylist(some, schema=table.arrow())]
        path = f"day=1/{len(lake.commits(table))}-{number}-{part}.parquet"
        file = lake.write_tallied(table, path, batches)
        one = replace(facts(number), rows=file.rows, files=(file,))
        found.append(replace(one, first_at_ms=first_at_ms, last_at_ms=last_at_ms))
    return found
