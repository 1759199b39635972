"""P4 for delayed messages: released, put off and cancelled by the broker's own service; and what is planted."""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from qmq_broker.storage.schedule.cancelled import Cancelled
from qmq_client.wire.frame import FrameKind
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import Record
from qmq_pipeline.jobs.audit import audit
from qmq_pipeline.jobs.lifecycle import lifecycle
from qmq_pipeline.jobs.marts import marts
from qmq_pipeline.places.config import AuditOptions, PipelineConfig
from qmq_pipeline.places.options import Place
from qmq_pipeline.tables.schemas import AUDIT_FINDINGS, DELAY_LATENESS, LIFECYCLE, LOG
from tests.crash.delay_world import Releases
from tests.pipeline.bronze import write_bronze
from tests.pipeline.rows import rows_of
from tests.pipeline.world import (
    FAR_MS,
    START_MS,
    STORE,
    DataDirectory,
    OutboxDatabase,
    messages,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MINUTE_MS = 60_000
DUE_MS = START_MS + 10 * MINUTE_MS
PUT_OFF_MS = START_MS + 70 * MINUTE_MS
NEVER_MS = START_MS + 80 * MINUTE_MS


def test_P4_delayed_messages_that_were_put_off_or_cancelled_are_sound_and_planted_faults_are_found(
    spark: SparkSession, tmp_path: Path
) -> None:
    directory, database = DataDirectory(tmp_path / "broker"), OutboxDatabase(tmp_path / "orders.db")
    ids = MessageIds(9)
    sound, put_off, cancelled, twice = (delayed(ids, DUE_MS) for _ in range(4))
    altered, revived, stuck = delayed(ids, FAR_MS), delayed(ids, FAR_MS), delayed(ids, NEVER_MS)
    every = [*sound, *put_off, *cancelled, *twice, *altered, *revived, *stuck]
    lost = delayed(ids, DUE_MS)
    database.insert([*every, *lost], created_at_ms=START_MS)
    directory.append(every, at_ms=START_MS + 500, kind=FrameKind.DELAYED)
    service = Releases(directory.store, directory.clock)  # type: ignore[arg-type]  # a clock of the tests, which has all that is asked
    for record in [*cancelled, *revived]:
        directory.store.cancel([place_of(service, record)])
    for record in put_off:
        found = service.query.find(record.message_id)[-1].message
        directory.store.append([service.query.rescheduled_frame(found, PUT_OFF_MS)])
        directory.store.commit_and_step()
    directory.settle()
    for at_ms in (DUE_MS, PUT_OFF_MS):
        directory.clock.wall_ms = at_ms + 20
        service.release()
    directory.append(twice, at_ms=PUT_OFF_MS + MINUTE_MS)
    directory.append(revived)
    directory.append([msgspec.structs.replace(one, body=b"other") for one in altered])
    directory.close()

    config = PipelineConfig(
        tables=str(tmp_path / "tables"),
        place=Place(path=str(directory.path)),
        databases=(database.section,),
        audit=AuditOptions(until_ms=NEVER_MS + 5 * MINUTE_MS),
    )
    assert write_bronze(config).rows["cancelled"] == len(cancelled) + len(revived)
    result = audit(spark, config)
    rows = rows_of(config.tables, AUDIT_FINDINGS, run=result.run)
    told = {(row["kind"], row["message_id"]) for row in rows}
    assert told == {
        *named("lost", lost),
        *named("ghost", revived),
        *named("duplicate", twice),
        *named("altered", altered),
        *named("late", stuck),
    }
    _lives(spark, config, cancelled, put_off, stuck)
    lateness = sorted(rows_of(config.tables, DELAY_LATENESS), key=itemgetter("minute"))
    on_time = [row for row in lateness if row["early"] == 0]
    # Those put off are as late as the others, by the time they were put off to.
    assert [row["count"] for row in on_time] == [len(sound) + len(twice), len(put_off)]
    assert max(row["max_ms"] for row in on_time) < 1_000
    database.close()


def test_P4_what_was_withdrawn_from_its_outbox_before_it_came_is_not_lost(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Its key was used again in the broker's window: that was taken for a repeat, and not stored."""
    directory = DataDirectory(tmp_path / "broker", replace(STORE, dedupe_ids=1_000))
    database = OutboxDatabase(tmp_path / "orders.db")
    sound, (withdrawn,) = messages(MessageIds(3), 5), messages(MessageIds(4), 1)
    directory.store.cancel((), {withdrawn.subject: [withdrawn.message_id]})
    directory.append([*sound, withdrawn], at_ms=START_MS + 500)
    directory.close()
    database.insert([*sound, withdrawn], created_at_ms=START_MS)
    config = PipelineConfig(
        tables=str(tmp_path / "tables"),
        place=Place(path=str(directory.path)),
        databases=(database.section,),
    )
    rows = write_bronze(config).rows
    assert (rows["messages"], rows["cancelled"]) == (5, 1)
    (row,) = rows_of(config.tables, LOG, kind="cancelled")
    assert (row["message_id"], row["subject"]) == (withdrawn.message_id.hex(), withdrawn.subject)
    found = audit(spark, config)
    assert found.is_clean
    assert (found.committed, found.stored) == (6, 5)
    database.close()


def _lives(
    spark: SparkSession,
    config: PipelineConfig,
    cancelled: list[Record],
    put_off: list[Record],
    stuck: list[Record],
) -> None:
    """What `lifecycle` says of them."""
    lifecycle(spark, config)
    marts(spark, config)
    rows = rows_of(config.tables, LIFECYCLE)
    found = {row["message_id"]: row for row in rows}
    assert [found[one.message_id.hex()]["outcome"] for one in cancelled] == ["cancelled"] * 2
    assert {found[one.message_id.hex()]["store_ms"] // 1000 for one in put_off} == {4200.0}
    assert [found[one.message_id.hex()]["reason"] for one in stuck] == ["not due"] * 2


def delayed(ids: MessageIds, due_at_ms: int) -> list[Record]:
    """Two messages."""
    return [
        msgspec.structs.replace(one, due_at_ms=due_at_ms)
        for one in messages(ids, 2, born_at_ms=START_MS)
    ]


def place_of(service: Releases, record: Record) -> Cancelled:
    found = service.query.find(record.message_id)[-1].message
    return Cancelled(found.bucket, found.sequence, found.source, found.subject, found.message_id)


def named(kind: str, records: list[Record]) -> set[tuple[str, str]]:
    return {(kind, one.message_id.hex()) for one in records}
