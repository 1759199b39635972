"""A few minutes of a shop whose gold tables anybody can count."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import msgspec

from qmq_client.group.actions import Acked, Action, Dead, Pulled
from qmq_client.wire.deliveries import DeliveryRun
from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.options import Place
from tests.pipeline.world import START_MS, DataDirectory, OutboxDatabase, messages

MINUTE_MS = 60_000
FIRST_MS = START_MS - START_MS % MINUTE_MS
GROUP = "billing"


def minute(number: int) -> datetime:
    return datetime.fromtimestamp((FIRST_MS + number * MINUTE_MS) / 1000, UTC)


def pulled(first: int, count: int, at_ms: int) -> Pulled:
    return Pulled(
        at_ms=at_ms,
        subject="orders",
        group=GROUP,
        consumer="one",
        token=1,
        first_pull_sequence=first,
        runs=(DeliveryRun(first_sequence=first, count=count, attempt=1),),
        lease_until_ms=at_ms + 30_000,
    )


def acked(first: int, after: int, at_ms: int) -> Acked:
    return Acked(
        at_ms=at_ms, subject="orders", group=GROUP, consumer="one", first=first, next=after
    )


def shop(tmp_path: Path) -> PipelineConfig:
    """163 messages in four minutes, one group behind, one dead letter, ten delayed ones."""
    database = OutboxDatabase(tmp_path / "orders.db")
    directory = DataDirectory(tmp_path / "broker")
    ids = MessageIds(77)
    first = messages(ids, 100, born_at_ms=FIRST_MS)
    second = messages(ids, 50, born_at_ms=FIRST_MS + 2 * MINUTE_MS)
    late = [
        msgspec.structs.replace(one, due_at_ms=FIRST_MS + 3 * MINUTE_MS)
        for one in messages(ids, 10, born_at_ms=FIRST_MS)
    ]
    database.insert(first, created_at_ms=FIRST_MS)
    database.insert(second, created_at_ms=FIRST_MS + 2 * MINUTE_MS)
    directory.append(first, at_ms=FIRST_MS + 1_000)
    directory.append(first[:3], at_ms=FIRST_MS + 4_000)
    directory.append(second, at_ms=FIRST_MS + 2 * MINUTE_MS + 500)
    directory.append(late, at_ms=FIRST_MS + 3 * MINUTE_MS + 40)
    actions: list[Action] = [
        pulled(0, 60, FIRST_MS + 5_000),
        acked(0, 59, FIRST_MS + 6_000),
        Dead(
            at_ms=FIRST_MS + 7_000,
            subject="orders",
            group=GROUP,
            sequence=59,
            attempts=1,
            reason="rejected",
            error="no such customer",
        ),
        pulled(60, 43, FIRST_MS + 2 * MINUTE_MS + 1_000),
        acked(60, 103, FIRST_MS + 2 * MINUTE_MS + 2_000),
    ]
    directory.act(actions)
    directory.close()
    database.close()
    return PipelineConfig(
        tables=str(tmp_path / "tables"),
        place=Place(path=str(directory.path)),
        databases=(database.section,),
    )
