"""P4: what is planted is found, all of it, and nothing else is."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy as sa

from qmq_broker.storage.logs.actions import Acked, GroupDefined, Pulled
from qmq_client.outbox.table import DEFAULT_TABLES
from qmq_client.wire.deliveries import DeliveryRun
from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.answers import audit_text
from qmq_pipeline.jobs.audit import audit
from qmq_pipeline.jobs.audit_window import Window, judged_ranges
from qmq_pipeline.jobs.ingest import ingest
from qmq_pipeline.jobs.ingest_outbox import ingest_outbox
from qmq_pipeline.jobs.lifecycle import lifecycle
from qmq_pipeline.places.config import AuditOptions, PipelineConfig
from qmq_pipeline.places.options import Place
from qmq_pipeline.tables.commits import RangeFacts
from qmq_pipeline.tables.schemas import AUDIT_FINDINGS, AUDIT_RUN, LIFECYCLE, OUTBOX
from tests.pipeline.rows import rows_of
from tests.pipeline.world import (
    FAR_MS,
    HOUR_MS,
    KINDS,
    START_MS,
    Corpus,
    DataDirectory,
    OutboxDatabase,
    messages,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: The same ones each time, and one that nobody has seen before.
SEEDS = (1, 2, 3, 4)


def test_P4_ten_corpora_with_planted_findings_all_found_none_invented(
    spark: SparkSession, tmp_path: Path
) -> None:
    database = OutboxDatabase(tmp_path / "orders.db")
    directory = DataDirectory(tmp_path / "broker")
    corpora = [Corpus(seed) for seed in (*SEEDS, secrets.randbits(31))]
    corpora += [Corpus(100 + number, (kind,)) for number, kind in enumerate(KINDS)]
    for number, corpus in enumerate(corpora):
        corpus.plant(database, directory, START_MS + number * HOUR_MS)
    directory.close()
    config = PipelineConfig(
        tables=str(tmp_path / "tables"),
        place=Place(path=str(directory.path)),
        databases=(database.section,),
    )
    ingest_outbox(spark, config)
    ingest(spark, config)
    seeds = [corpus.seed for corpus in corpora]
    truth = {one for corpus in corpora for one in corpus.truth}
    for cross_check in (False, True):
        result = audit(spark, config, cross_check=cross_check)
        found = rows_of(config.tables, AUDIT_FINDINGS, run=result.run)
        assert {(row["kind"], row["message_id"]) for row in found} == truth, (seeds, cross_check)
        assert len(found) == len(truth) == sum(result.findings.values())
        assert all(row["evidence"] for row in found)
        assert result.committed == sum(corpus.committed for corpus in corpora)
        assert result.stored == sum(corpus.stored for corpus in corpora)
        assert not result.is_clean
    database.close()
    lived = lifecycle(spark, config)
    assert lifecycle(spark, config).is_unchanged
    rows = rows_of(config.tables, LIFECYCLE)
    assert len(rows) == lived.lifecycle
    kinds = {kind: {one for name, one in truth if name == kind} for kind, _ in truth}
    missing = [row for row in rows if row["stored_at"] is None]
    assert {row["message_id"] for row in missing} == kinds["lost"]
    assert all(row["committed_at"] is not None for row in missing)
    not_due = [row for row in rows if row["reason"] == "not due"]
    delayed = [one for corpus in corpora for one in corpus.delayed]
    assert {row["message_id"] for row in not_due} == {one.message_id.hex() for one in delayed}
    unknown = [row for row in rows if row["committed_at"] is None]
    assert {row["message_id"] for row in unknown} == kinds["ghost"]
    late = {row["message_id"] for row in rows if (row["store_ms"] or 0) > 60_000}
    assert kinds["late"] <= late


def test_an_audit_starts_spark_only_for_a_doubt_or_a_cross_check(
    spark: SparkSession, tmp_path: Path
) -> None:
    database = OutboxDatabase(tmp_path / "orders.db")
    directory = DataDirectory(tmp_path / "broker")
    config = PipelineConfig(
        tables=str(tmp_path / "tables"),
        place=Place(path=str(directory.path)),
        databases=(database.section,),
    )
    started: list[SparkSession] = []

    def start() -> SparkSession:
        started.append(spark)
        return spark

    some = messages(MessageIds(1), 90)
    database.insert(some, created_at_ms=START_MS)
    directory.append(some, at_ms=START_MS + 500)
    ingest_outbox(spark, config)
    ingest(spark, config)
    sound = audit(start, config)
    assert sound.is_clean
    assert (sound.committed, sound.stored) == (90, 90)
    assert not started
    assert audit(start, config, cross_check=True).is_clean
    assert len(started) == 1
    ghost = messages(MessageIds(1, first_counter=500), 1)
    directory.append(ghost, at_ms=START_MS + 500)
    directory.close()
    ingest_outbox(spark, config)
    ingest(spark, config)
    assert audit(start, config).findings["ghost"] == 1
    assert len(started) == 2
    database.close()


def test_P4_an_audit_without_rows_to_compare_says_so_and_what_was_judged_all_the_same(
    spark: SparkSession, tmp_path: Path
) -> None:
    database = OutboxDatabase(tmp_path / "orders.db", keep_sent_s=0)
    directory = DataDirectory(tmp_path / "broker")
    config = PipelineConfig(
        tables=str(tmp_path / "tables"),
        place=Place(path=str(directory.path)),
        databases=(database.section,),
    )
    directory.append(messages(MessageIds(1), 9), at_ms=START_MS + 500)
    directory.close()
    ingest_outbox(spark, config)
    ingest(spark, config)
    found = audit(spark, config)
    assert (found.is_clean, found.committed, found.stored) == (True, 0, 9)
    (reason,) = found.coverage
    assert "orders does not keep accepted rows" in reason
    assert "`committed` counts only those that a scan has seen" in reason
    assert "judged by the log alone" in reason
    assert "keep_sent_s" in reason
    first, judged, of_all, *_, last = audit_text(found).splitlines()
    assert judged.endswith("0 committed, 9 stored")
    assert of_all.strip().startswith("pairs of a message and a group, of all in the tables: ")
    assert first.startswith("CLEAN, as far as it could be judged: 0 lost")
    assert last == f"  not judged: {reason}"
    assert audit_text(replace(found, coverage=())).startswith("CLEAN: 0 lost")
    (run,) = rows_of(config.tables, AUDIT_RUN)
    assert run["coverage"].split("; ") == [reason], "the report takes it apart there"
    database.close()


def test_P4_rows_whose_numbers_sqlite_gave_out_again_are_in_the_tables_too(
    spark: SparkSession, tmp_path: Path
) -> None:
    database = OutboxDatabase(tmp_path / "orders.db")
    config = PipelineConfig(tables=str(tmp_path / "tables"), databases=(database.section,))
    database.insert(messages(MessageIds(1), 9), created_at_ms=START_MS)
    assert ingest_outbox(spark, config) == {"orders": 9}
    assert ingest_outbox(spark, config) == {"orders": 0}
    database.execute(sa.delete(DEFAULT_TABLES.outbox))
    database.insert(messages(MessageIds(2), 5), created_at_ms=START_MS + HOUR_MS)
    assert ingest_outbox(spark, config) == {"orders": 5}
    rows = rows_of(config.tables, OUTBOX)
    assert len({row["message_id"] for row in rows}) == len(rows) == 14
    database.close()


def test_a_window_limits_what_is_judged_and_not_what_is_counted_of_all_messages(
    spark: SparkSession, directory: DataDirectory, config: PipelineConfig
) -> None:
    ids = MessageIds(6)
    directory.append(messages(ids, 20, subjects=("orders",)), at_ms=START_MS)
    directory.act(
        [
            GroupDefined(START_MS, "orders", "billing", 0, 0),
            Pulled(START_MS, "orders", "billing", "c", 1, 0, (DeliveryRun(0, 20, 1),), START_MS),
            Acked(START_MS + 200, "orders", "billing", "c", 0, 20),
        ]
    )
    ingest(spark, config)
    directory.append(messages(ids, 5, subjects=("orders",)), at_ms=START_MS + 3 * HOUR_MS)
    ingest(spark, config)
    lifecycle(spark, config)
    late = replace(config, audit=AuditOptions(since_ms=START_MS + 2 * HOUR_MS))
    never = replace(config, audit=AuditOptions(until_ms=0))
    for one, stored in ((late, 5), (never, 0)):
        for is_checked in (False, True):
            done = audit(spark, one, cross_check=is_checked)
            assert done.stored == stored
            assert (done.expected, done.delivered, done.settled) == (25, 20, 20)


def test_of_the_log_only_what_may_be_judged_is_read_with_an_hour_for_clocks() -> None:
    ranges = [
        RangeFacts(
            source="one",
            first=hour,
            next=hour + 1,
            rows=1,
            files=(),
            first_at_ms=START_MS + hour * HOUR_MS,
            last_at_ms=START_MS + (hour + 1) * HOUR_MS - 1,
        )
        for hour in range(6)
    ]

    def first_read(first_ms: int) -> list[int]:
        window = Window(
            first_ms=first_ms,
            next_ms=FAR_MS,
            gaps=(),
            is_log_known=True,
            is_folded=True,
            kept=(),
            coverage=(),
        )
        return [one.first for one in judged_ranges(ranges, window)]

    assert first_read(0) == [0, 1, 2, 3, 4, 5]
    assert first_read(START_MS + 4 * HOUR_MS) == [3, 4, 5]
