"""The columns of the silver tables: what became of each message, and the counts from which gold is made."""

from __future__ import annotations

from typing import Final

from qmq_pipeline.tables.table import Column, Table

_OUTCOMES: Final = (
    "waiting, in flight, given back, set aside, acked, dead, skipped, filtered, cancelled"
)
#: What became of one message at one group.
_FATE_COLUMNS: Final = (
    Column("first_delivered_at", "time", "first handed to a consumer of the group"),
    Column("last_delivered_at", "time", "last handed to one"),
    Column("attempts", "int", "which attempt the last delivery to this group was"),
    Column("settled_at", "time", "done, dead, skipped or filtered for this group"),
    Column("outcome", "text", _OUTCOMES),
    Column("reason", "text", "why it is dead or was skipped"),
    Column("error", "text", "what the last consumer said"),
)
#: The part of the log that the message is in; derived tables are stored by it, too.
PART: Final = Column("part", "long", "number of the part of the log; -1 without a place in it")
_ASIDE_COLUMNS: Final = (
    Column("set_aside_at", "time", "last set aside, to come back much later"),
    Column("brought_back_at", "time", "… and since then brought back; null while it is away"),
)
DELIVERIES: Final = Table(
    name="deliveries",
    layer="silver",
    version=3,
    key=("subject", "consumer_group", "sequence"),
    partitions=("part",),
    columns=(
        Column("subject", "text", "the subject"),
        Column("consumer_group", "text", "the group"),
        Column("sequence", "long", "its place in the subject"),
        *_FATE_COLUMNS,
        *_ASIDE_COLUMNS,
        Column("folded_to", "long", "offset of the action log up to which this is known"),
        PART,
    ),
)
LIFECYCLE: Final = Table(
    name="lifecycle",
    layer="silver",
    version=4,
    key=("message_id", "subject", "sequence", "consumer_group"),
    partitions=("part",),
    columns=(
        Column("message_id", "text", "32 hex digits"),
        Column("subject", "text", "the subject"),
        Column("sequence", "long", "its place in the subject; null if it has none"),
        Column("consumer_group", "text", "the group; null if it was given to no group"),
        Column("database", "text", "where its outbox row is or was; null for none"),
        Column("producer", "long", "first half of the id"),
        Column("counter", "long", "second half of the id"),
        Column("key", "text", "ordering key"),
        Column("committed_at", "time", "the outbox row was inserted, by the database's clock"),
        Column("born_at", "time", "made, by the producer's clock"),
        Column("stored_at", "time", "stored, by the broker's clock; of one that waits: accepted"),
        Column("due_at", "time", "not to be delivered before, as it was last put off"),
        *_FATE_COLUMNS,
        Column("store_ms", "double", "committed (else born) to stored"),
        Column("wait_ms", "double", "stored (or due) to first delivered"),
        Column("work_ms", "double", "first delivered to settled"),
        Column("total_ms", "double", "committed (else born, or due) to settled"),
        Column("body_bytes", "int", "length of the body"),
        Column("copy", "int", "how many of its id were stored before it; 0 for the first"),
        *_ASIDE_COLUMNS,
        PART,
    ),
)
#: What a part of the log adds to the lag of its groups: counts of pairs of a message and a group.
GROUP_SPANS: Final = Table(
    name="group_spans",
    layer="silver",
    version=2,
    key=("subject", "consumer_group", "stored_minute", "settled_minute", "delivered_minute"),
    partitions=("part",),
    columns=(
        Column("subject", "text", "the subject"),
        Column("consumer_group", "text", "the group"),
        Column("stored_minute", "time", "minute in which they were stored"),
        Column("settled_minute", "time", "minute in which they were done; null for not yet"),
        Column("delivered_minute", "time", "minute of the first delivery, of those redelivered"),
        Column("pairs", "long", "pairs of a message and the group"),
        Column("redeliveries", "long", "attempts beyond the first"),
        Column("oldest_at", "time", "when the first of them could be delivered"),
        PART,
    ),
)
PRODUCER_COLUMNS: Final = (
    Column("producer", "long", "first half of the id"),
    Column("subject", "text", "the subject"),
    Column("first_at", "time", "its first message was stored"),
    Column("last_at", "time", "its last message was stored"),
    Column("messages", "long", "messages"),
    Column("bytes", "long", "bytes of their bodies"),
    Column("copies", "long", "stored again under an id that was there already"),
)
#: What a part of the log adds to its producers.
PRODUCER_PARTS: Final = Table(
    name="producer_parts",
    layer="silver",
    version=2,
    key=("producer", "subject", "first_at"),
    partitions=("part",),
    columns=(*PRODUCER_COLUMNS, PART),
)
#: The days on which something happened to messages of a part, whose gold tables it counts in.
PART_DAYS: Final = Table(
    name="part_days",
    layer="silver",
    version=1,
    key=("part", "day"),
    partitions=("part",),
    columns=(Column("day", "text", "the day, like 2026-01-31"), PART),
)
