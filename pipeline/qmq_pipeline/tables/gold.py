"""The columns of the gold tables, from which charts and questions by the minute are answered."""

from __future__ import annotations

from typing import Final

from qmq_pipeline.tables.silver import PART, PRODUCER_COLUMNS
from qmq_pipeline.tables.table import Column, Table

_MINUTE: Final = (
    Column("subject", "text", "the subject"),
    Column("minute", "time", "the minute's beginning"),
)
_DAY: Final = Column("day", "text", "the day of the minute, like 2026-01-31")
_QUANTILE_COLUMNS: Final = (
    Column("p50_ms", "double", "half are below it"),
    Column("p95_ms", "double", "95 of 100 are below it"),
    Column("p99_ms", "double", "99 of 100 are below it"),
    Column("max_ms", "double", "the highest"),
    Column("sketch", "bytes", "KLL sketch, to be merged with others"),
)
FLOW_MINUTE: Final = Table(
    name="flow_minute",
    layer="gold",
    version=2,
    key=("subject", "minute"),
    partitions=("day",),
    columns=(
        *_MINUTE,
        Column("committed", "long", "outbox rows that were inserted"),
        Column("stored", "long", "messages that were stored"),
        Column("delivered", "long", "attempts, of all groups"),
        Column("settled", "long", "acks, of all groups"),
        Column("bytes", "long", "bytes of the bodies stored"),
        Column("copies", "long", "messages stored again under an id that was there already"),
        _DAY,
    ),
)
LATENCY_MINUTE: Final = Table(
    name="latency_minute",
    layer="gold",
    version=2,
    key=("subject", "consumer_group", "stage", "minute"),
    partitions=("day",),
    columns=(
        *_MINUTE,
        Column("consumer_group", "text", "the group; null for the stage store"),
        Column("stage", "text", "store, wait, work or total"),
        Column("count", "long", "messages"),
        *_QUANTILE_COLUMNS,
        _DAY,
    ),
)
GROUP_LAG: Final = Table(
    name="group_lag",
    layer="gold",
    version=1,
    key=("subject", "consumer_group", "minute"),
    columns=(
        *_MINUTE,
        Column("consumer_group", "text", "the group"),
        Column("stored", "long", "messages stored up to the minute's end, from where it began"),
        Column("settled", "long", "of those, acked, dead, skipped or not for the group"),
        Column("lag", "long", "the difference"),
        Column("lag_s", "double", "age of the oldest that is not done"),
        Column("redeliveries", "long", "attempts beyond the first in this minute"),
    ),
)
DEAD_LETTERS: Final = Table(
    name="dead_letters",
    layer="gold",
    version=2,
    key=("subject", "consumer_group", "sequence"),
    partitions=("part",),
    columns=(
        Column("subject", "text", "the subject"),
        Column("consumer_group", "text", "the group"),
        Column("sequence", "long", "its place in the subject"),
        Column("message_id", "text", "32 hex digits"),
        Column("key", "text", "ordering key"),
        Column("stored_at", "time", "stored"),
        Column("dead_at", "time", "became a dead letter"),
        Column("attempts", "int", "attempts before it died"),
        Column("reason", "text", "why"),
        Column("error", "text", "what the last consumer said"),
        PART,
    ),
)
DELAY_LATENESS: Final = Table(
    name="delay_lateness",
    layer="gold",
    version=2,
    key=("subject", "minute"),
    partitions=("day",),
    columns=(
        *_MINUTE,
        Column("count", "long", "delayed messages that were released"),
        Column("early", "long", "of those, before they were due"),
        *_QUANTILE_COLUMNS,
        _DAY,
    ),
)
PRODUCERS: Final = Table(
    name="producers",
    layer="gold",
    version=1,
    key=("producer", "subject"),
    columns=PRODUCER_COLUMNS,
)
