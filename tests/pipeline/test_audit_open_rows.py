"""P4 for rows that are not sent: waiting, gone, accepted and not yet noted; and what stands at the edge of what is judged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import sqlalchemy as sa

from qmq_client.outbox.table import DEFAULT_TABLES, LIVE, PARKED
from qmq_client.wire.frame import FrameKind
from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.jobs.audit import audit
from qmq_pipeline.places.config import AuditOptions, PipelineConfig
from qmq_pipeline.places.options import Place
from qmq_pipeline.tables.schemas import AUDIT_FINDINGS
from tests.pipeline.bronze import write_bronze
from tests.pipeline.rows import rows_of
from tests.pipeline.world import (
    FAR_MS,
    HOUR_MS,
    START_MS,
    DataDirectory,
    OutboxDatabase,
    messages,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from qmq_client.wire.record import Record


def test_P4_rows_that_wait_are_late_those_that_are_gone_unstored_are_lost_and_edges_are_sound(
    spark: SparkSession, tmp_path: Path
) -> None:
    directory, database = DataDirectory(tmp_path / "broker"), OutboxDatabase(tmp_path / "orders.db")
    ids = MessageIds(7)  # of one producer: what is planted makes the sound ones beside it suspect
    sound, waiting, parked, gone, gone_stored, stored_later, made_later, twice, accepted = (
        messages(ids, 2, born_at_ms=START_MS) for _ in range(9)
    )
    accepted = [msgspec.structs.replace(one, due_at_ms=FAR_MS) for one in accepted]
    database.insert([*sound, *stored_later, *twice], created_at_ms=START_MS)
    database.insert(parked, created_at_ms=START_MS, state=PARKED)
    for some in (waiting, gone, gone_stored, accepted):
        database.insert(some, created_at_ms=START_MS, state=LIVE)
    # Behind what is judged by the database's clock, in front of it by the broker's.
    database.insert(made_later, created_at_ms=START_MS + 2 * HOUR_MS)
    directory.append([*sound, *gone_stored, *made_later, *twice], at_ms=START_MS + 500)
    directory.append(accepted, kind=FrameKind.DELAYED)
    directory.append(twice, at_ms=START_MS + HOUR_MS // 2)
    directory.append(stored_later, at_ms=START_MS + 3 * HOUR_MS)
    directory.close()
    config = PipelineConfig(
        tables=str(tmp_path / "tables"),
        place=Place(path=str(directory.path)),
        databases=(database.section,),
        audit=AuditOptions(until_ms=START_MS + HOUR_MS),
    )
    write_bronze(replace(config, place=None))
    went = [one.message_id for one in (*gone, *gone_stored)]
    outbox = DEFAULT_TABLES.outbox
    database.execute(sa.delete(outbox).where(outbox.c.message_id.in_(went)))
    write_bronze(config)
    result = audit(spark, config)
    rows = rows_of(config.tables, AUDIT_FINDINGS, run=result.run)
    told = {(row["kind"], row["message_id"]): row["evidence"] for row in rows}
    assert told.keys() == {
        *named("lost", gone),
        *named("late", waiting),
        *named("late", parked),
        *named("late", stored_later),
        *named("duplicate", twice),
    }
    assert all("was live and is gone" in told[one] for one in named("lost", gone))
    assert all(" is parked since " in told[one] for one in named("late", parked))
    database.close()


def named(kind: str, records: list[Record]) -> set[tuple[str, str]]:
    return {(kind, one.message_id.hex()) for one in records}
