"""P4: what is planted is found, and nothing else; what cannot be judged is said."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from qmq_client.group.actions import (
    Acked,
    Action,
    Configured,
    Ended,
    GroupDefined,
    GroupSettings,
    Passed,
    Pulled,
    Skipped,
    Sought,
)
from qmq_client.wire.deliveries import DeliveryRun
from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.answers import audit_text
from qmq_pipeline.jobs.audit import KINDS, audit
from qmq_pipeline.jobs.ingest import ingest
from qmq_pipeline.jobs.lifecycle import lifecycle
from qmq_pipeline.places.config import AuditOptions, PipelineConfig
from qmq_pipeline.places.options import Place
from qmq_pipeline.tables.schemas import AUDIT_FINDINGS, AUDIT_RUN, LIFECYCLE
from tests.pipeline.bronze import write_bronze
from tests.pipeline.rows import rows_of
from tests.pipeline.world import HOUR_MS, START_MS, Corpus, DataDirectory, OutboxDatabase, messages
from tests.pipeline.world import KINDS as PLANTED

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
    corpora += [Corpus(100 + number, (kind,)) for number, kind in enumerate(PLANTED)]
    for number, corpus in enumerate(corpora):
        corpus.plant(database, directory, START_MS + number * HOUR_MS)
    directory.close()
    config = PipelineConfig(
        tables=str(tmp_path / "tables"),
        place=Place(path=str(directory.path)),
        databases=(database.section,),
    )
    ingest(spark, config)
    seeds = [corpus.seed for corpus in corpora]
    truth = {one for corpus in corpora for one in corpus.truth}
    result = audit(spark, config)
    found = rows_of(config.tables, AUDIT_FINDINGS, run=result.run)
    assert {(row["kind"], row["message_id"]) for row in found} == truth, seeds
    assert len(found) == len(truth) == sum(result.findings.values())
    assert all(row["evidence"] for row in found)
    assert result.committed == sum(corpus.committed for corpus in corpora)
    assert result.stored == sum(corpus.stored for corpus in corpora)
    assert not result.is_clean
    database.close()
    _lived(spark, config, corpora, truth)


def _lived(
    spark: SparkSession, config: PipelineConfig, corpora: list[Corpus], truth: set[tuple[str, str]]
) -> None:
    """What `lifecycle` says of what was planted."""
    lived = lifecycle(spark, config)
    assert lifecycle(spark, config).is_unchanged
    rows = rows_of(config.tables, LIFECYCLE)
    assert len(rows) == lived.lifecycle
    kinds = {kind: {one for name, one in truth if name == kind} for kind, _ in truth}
    missing = [row for row in rows if row["stored_at"] is None]
    assert {row["message_id"] for row in missing} == kinds["lost"]
    not_due = [row for row in rows if row["reason"] == "not due"]
    delayed = [one for corpus in corpora for one in corpus.delayed]
    assert {row["message_id"] for row in not_due} == {one.message_id.hex() for one in delayed}
    unknown = [row for row in rows if row["committed_at"] is None]
    assert {row["message_id"] for row in unknown} == kinds["ghost"]
    late = {row["message_id"] for row in rows if (row["store_ms"] or 0) > 60_000}
    assert kinds["late"] <= late


RED = GroupSettings(any_tags=("red",))


def pull(group: str, pull_first: int, first: int, count: int) -> list[Action]:
    here, after = (START_MS + 10, "orders", group), pull_first + count
    runs = (DeliveryRun(first, count, 1),)
    return [
        Pulled(*here, "c", 1, pull_first, runs, START_MS),
        Acked(*here, "c", pull_first, after),
    ]


def begin(group: str, *settings: GroupSettings) -> list[Action]:
    here = (START_MS, "orders", group)
    return [GroupDefined(*here, 0, 5), *(Configured(*here, one) for one in settings)]


def test_P4_what_a_group_skipped_is_found_and_what_is_not_for_it_is_sound(
    spark: SparkSession, directory: DataDirectory, config: PipelineConfig
) -> None:
    records = [
        msgspec.structs.replace(one, tags=("red",) if number % 2 else ("blue",))
        for number, one in enumerate(messages(MessageIds(1), 40))
    ]
    directory.append(records, at_ms=START_MS)

    at = START_MS + 50
    directory.act(
        [
            *begin("gap"),
            *pull("gap", 0, 0, 10),
            *pull("gap", 10, 13, 27),
            *begin("forced"),
            Skipped(at, "orders", "forced", 0, 2),
            *pull("forced", 0, 2, 38),
            *begin("moved"),
            Sought(at, "orders", "moved", 5),
            *pull("moved", 0, 5, 35),
            *begin("filter", RED),
            *pull("filter", 0, 1, 1),
            Passed(at, "orders", "filter", 6),
            *pull("filter", 1, 6, 34),
            *begin("refiltered", RED, GroupSettings()),
            *pull("refiltered", 0, 39, 1),
            *begin("ended"),
            *pull("ended", 0, 0, 3),
            Ended(at, "orders", "ended"),
            *begin("behind"),
        ]
    )
    write_bronze(config)
    assert "long retries and skipped messages are not judged" in " ".join(
        audit(spark, config).coverage
    )
    lifecycle(spark, config)
    result = audit(spark, config)
    found = rows_of(config.tables, AUDIT_FINDINGS, run=result.run)
    assert {row["kind"] for row in found} == {"skipped"}
    skipped: dict[str, set[int]] = {}
    for row in found:
        skipped.setdefault(row["consumer_group"], set()).add(row["sequence"])
    assert skipped == {
        "gap": {10, 11, 12},
        "forced": {0, 1},
        "moved": set(range(5)),
        "filter": {3, 5},
        "refiltered": set(range(39)),
    }
    evidence = {row["consumer_group"]: row["evidence"] for row in found}
    assert "its tags match: red" in evidence["filter"]
    assert "deleted by force" in evidence["forced"]
    assert result.findings["skipped"] == len(found)
    assert f"{len(found)} skipped" in audit_text(result)


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
    write_bronze(config)
    lifecycle(spark, config)
    found = audit(spark, config)
    assert (found.is_clean, found.committed, found.stored, found.foreign_messages) == (
        True,
        0,
        9,
        9,
    )
    (reason,) = found.coverage
    assert "orders does not keep accepted rows" in reason
    assert "keep_sent_s" in reason
    first, judged, of_all, foreign, last = audit_text(found).splitlines()
    assert judged.endswith("0 committed, 9 stored")
    assert of_all.strip().startswith("pairs of a message and a group, in all tables: ")
    assert first.startswith("CLEAN, as far as it could be judged: 0 lost")
    assert "9 are of producers that no outbox here knows" in foreign
    assert last == f"  not judged: {reason}"
    (run,) = rows_of(config.tables, AUDIT_RUN)
    assert run["coverage"].split("; ") == [reason], "the report takes it apart there"
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
    directory.append(messages(ids, 5, subjects=("orders",)), at_ms=START_MS + 3 * HOUR_MS)
    write_bronze(config)
    lifecycle(spark, config)
    every = audit(spark, config)
    assert (every.expected, every.delivered, every.settled) == (25, 20, 20)
    late = replace(config, audit=AuditOptions(since_ms=START_MS + 2 * HOUR_MS))
    never = replace(config, audit=AuditOptions(until_ms=0))
    assert [audit(spark, one).stored for one in (late, never)] == [5, 0]
    assert set(every.findings) == set(KINDS)
