"""The columns of every table: names, types and what they mean. The one place that says so.

A table's version goes up when a column is added, at the end only; files of an older version are read
with nulls in what they lack. All times are UTC with microseconds. `docs/pipeline.md` prints what is
here, and a test holds it equal. No Spark: workers and plain programs use it too.
"""

from __future__ import annotations

import copyreg
from typing import Final

from qmq_pipeline.tables.table import Column, Table

_ID_COLUMNS: Final = (
    Column("message_id", "text", "32 hex digits"),
    Column("producer", "long", "first half of the id: the producer's instance, as a signed number"),
    Column("counter", "long", "second half of the id: the producer's counter, as a signed number"),
)
#: Where in the commit log something stands.
_FRAME_COLUMNS: Final = (
    Column("physical_offset", "long", "bytes from the start of the commit log to its frame"),
    Column("record_number", "int", "its place in the frame, from 0"),
)
_MESSAGE_COLUMNS: Final = (
    Column("subject", "text", "the stream it was sent to"),
    Column("sequence", "long", "its place in the subject, from 0; null while it is delayed"),
    *_FRAME_COLUMNS,
    *_ID_COLUMNS,
    Column("record_crc", "long", "checksum that the producer made of subject and record"),
    Column("key", "text", "ordering key, null for none"),
    Column("tags", "texts", "tags, empty for none"),
    Column("headers", "pairs", "headers, empty for none"),
    Column("body_kind", "int", "0 bytes, 1 text, 2 JSON; -1: not a record, see the page"),
    Column("born_at", "time", "made, by the producer's clock"),
    Column("stored_at", "time", "stored, by the broker's clock"),
    Column("due_at", "time", "not to be delivered before; null for at once"),
    Column("expires_at", "time", "of no use any more from then on; null for never"),
    Column("body_bytes", "int", "length of the body"),
    Column("body", "bytes", "the body as the producer gave it"),
)

MESSAGES: Final = Table(
    name="messages",
    layer="bronze",
    version=1,
    key=("subject", "sequence"),
    columns=_MESSAGE_COLUMNS,
)
#: Delayed messages as they were accepted or put off; their release is a row of `messages`.
SCHEDULED: Final = Table(
    name="scheduled",
    layer="bronze",
    version=2,
    key=("physical_offset", "record_number"),
    columns=(
        *_MESSAGE_COLUMNS,
        Column("now_due_at", "time", "due from here on: not `due_at` when it was put off"),
    ),
)
#: Delayed messages that will not be delivered.
CANCELLED: Final = Table(
    name="cancelled",
    layer="bronze",
    version=1,
    key=("physical_offset", "record_number"),
    columns=(
        *_FRAME_COLUMNS,
        *_ID_COLUMNS,
        Column("subject", "text", "the subject it will not come to"),
        Column("cancelled_at", "time", "when, by the broker's clock"),
    ),
)
#: Copies of messages that groups set aside: when they were made, and when their time had come.
COPIES: Final = Table(
    name="copies",
    layer="bronze",
    version=1,
    key=("physical_offset", "record_number"),
    columns=(
        *_FRAME_COLUMNS,
        Column("message_id", "text", "that of the copy, 32 hex digits"),
        Column("subject", "text", "the subject of the message that was set aside"),
        Column("consumer_group", "text", "the group that set it aside"),
        Column("sequence", "long", "the message's place in its subject"),
        Column("ticket", "long", "names this going away; stands in the action too"),
        Column("stored_at", "time", "the copy was stored, by the broker's clock"),
        Column("due_at", "time", "when the message is to come back"),
        Column("copy_sequence", "long", "once it is due: the copy's place among the copies"),
    ),
)
ACTIONS: Final = Table(
    name="actions",
    layer="bronze",
    version=1,
    key=("action_offset", "action_number"),
    columns=(
        Column("action_offset", "long", "bytes from the start of the action log to its frame"),
        Column("action_number", "int", "its place in the frame, from 0"),
        Column("at", "time", "when, by the broker's clock"),
        Column("action", "text", "pulled, acked, nacked, expired, dead and so on"),
        Column("subject", "text", "the subject"),
        Column("consumer_group", "text", "the group"),
        Column("consumer", "text", "the member; null where the group as a whole is meant"),
        Column("first_sequence", "long", "of a pull, dead letter or skip: first message"),
        Column("next_sequence", "long", "one behind the last"),
        Column("first_pull", "long", "first pull sequence of the range"),
        Column("next_pull", "long", "one behind the last"),
        Column("attempt", "int", "which delivery it is, from 1"),
        Column("until", "time", "end of the lease, or time of the next delivery"),
        Column("reason", "text", "why a message became a dead letter"),
        Column("error", "text", "what the consumer said"),
        Column("action_json", "text", "the whole action, for kinds that have more"),
    ),
)
OUTBOX: Final = Table(
    name="outbox",
    layer="bronze",
    version=1,
    key=("database", "message_id"),
    columns=(
        Column("database", "text", "name of the database"),
        Column("row_id", "long", "the row's number"),
        *_ID_COLUMNS,
        Column("subject", "text", "the subject"),
        Column("state", "text", "live, parked or sent"),
        Column("attempts", "int", "tries to publish it"),
        Column("created_at", "time", "inserted, by the database's clock"),
        Column("due_at", "time", "next try; of a row that is sent: kept until"),
        Column("sent_at", "time", "accepted; known only of rows that are kept, see the page"),
        Column("deliver_at", "time", "the message's own due time; null for at once"),
        Column("record_crc", "long", "checksum that the producer made of subject and record"),
        Column("record_bytes", "int", "length of the record"),
        Column("last_error", "text", "why the last try failed"),
        Column("scanned_at", "time", "when this row was read, by the database's clock"),
    ),
)
_OUTCOMES: Final = (
    "waiting, in flight, given back, set aside, acked, dead, skipped, filtered, cancelled"
)
#: What became of one message at one group.
_FATE_COLUMNS: Final = (
    Column("first_delivered_at", "time", "first handed to a consumer of the group"),
    Column("last_delivered_at", "time", "last handed to one"),
    Column("attempts", "int", "deliveries to this group"),
    Column("settled_at", "time", "done, dead, skipped or filtered for this group"),
    Column("outcome", "text", _OUTCOMES),
    Column("reason", "text", "why it is dead or was skipped"),
    Column("error", "text", "what the last consumer said"),
)
_ASIDE_COLUMNS: Final = (
    Column("set_aside_at", "time", "last set aside, to come back much later"),
    Column("brought_back_at", "time", "… and since then brought back; null while it is away"),
)
DELIVERIES: Final = Table(
    name="deliveries",
    layer="silver",
    version=2,
    key=("subject", "consumer_group", "sequence"),
    columns=(
        Column("subject", "text", "the subject"),
        Column("consumer_group", "text", "the group"),
        Column("sequence", "long", "its place in the subject"),
        *_FATE_COLUMNS,
        *_ASIDE_COLUMNS,
    ),
)
LIFECYCLE: Final = Table(
    name="lifecycle",
    layer="silver",
    version=3,
    key=("message_id", "subject", "sequence", "consumer_group"),
    columns=(
        Column("message_id", "text", "32 hex digits"),
        Column("subject", "text", "the subject"),
        Column("sequence", "long", "its place in the subject; null when it has none"),
        Column("consumer_group", "text", "the group; null when no group was given it"),
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
    ),
)
#: What a window of the log adds to the lag of its groups: pairs of a message and a group, counted.
GROUP_SPANS: Final = Table(
    name="group_spans",
    layer="silver",
    version=1,
    key=("subject", "consumer_group", "stored_minute", "settled_minute", "delivered_minute"),
    columns=(
        Column("subject", "text", "the subject"),
        Column("consumer_group", "text", "the group"),
        Column("stored_minute", "time", "minute in which they were stored"),
        Column("settled_minute", "time", "minute in which they were done; null for not yet"),
        Column("delivered_minute", "time", "minute of the first delivery, of those redelivered"),
        Column("pairs", "long", "pairs of a message and the group"),
        Column("redeliveries", "long", "deliveries beyond the first"),
        Column("oldest_at", "time", "when the first of them could be delivered"),
    ),
)
_PRODUCER_COLUMNS: Final = (
    Column("producer", "long", "first half of the id"),
    Column("subject", "text", "the subject"),
    Column("first_at", "time", "its first message was stored"),
    Column("last_at", "time", "its last message was stored"),
    Column("messages", "long", "messages"),
    Column("bytes", "long", "bytes of their bodies"),
    Column("copies", "long", "stored once more under an id that was there"),
)
#: What a window of the log adds to its producers.
PRODUCER_PARTS: Final = Table(
    name="producer_parts",
    layer="silver",
    version=1,
    key=("producer", "subject", "first_at"),
    columns=_PRODUCER_COLUMNS,
)

_MINUTE: Final = (
    Column("subject", "text", "the subject"),
    Column("minute", "time", "the minute's beginning"),
)
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
    version=1,
    key=("subject", "minute"),
    columns=(
        *_MINUTE,
        Column("committed", "long", "outbox rows that were inserted"),
        Column("stored", "long", "messages that were stored"),
        Column("delivered", "long", "deliveries, of all groups"),
        Column("settled", "long", "acks, of all groups"),
        Column("bytes", "long", "bytes of the bodies stored"),
        Column("copies", "long", "messages stored once more under an id that was there"),
    ),
)
LATENCY_MINUTE: Final = Table(
    name="latency_minute",
    layer="gold",
    version=1,
    key=("subject", "consumer_group", "stage", "minute"),
    columns=(
        *_MINUTE,
        Column("consumer_group", "text", "the group; null for the stage store"),
        Column("stage", "text", "store, wait, work or total"),
        Column("count", "long", "messages"),
        *_QUANTILE_COLUMNS,
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
        Column("redeliveries", "long", "deliveries beyond the first in this minute"),
    ),
)
DEAD_LETTERS: Final = Table(
    name="dead_letters",
    layer="gold",
    version=1,
    key=("subject", "consumer_group", "sequence"),
    columns=(
        Column("subject", "text", "the subject"),
        Column("consumer_group", "text", "the group"),
        Column("sequence", "long", "its place in the subject"),
        Column("message_id", "text", "32 hex digits"),
        Column("key", "text", "ordering key"),
        Column("stored_at", "time", "stored"),
        Column("dead_at", "time", "became a dead letter"),
        Column("attempts", "int", "deliveries"),
        Column("reason", "text", "why"),
        Column("error", "text", "what the last consumer said"),
    ),
)
DELAY_LATENESS: Final = Table(
    name="delay_lateness",
    layer="gold",
    version=1,
    key=("subject", "minute"),
    columns=(
        *_MINUTE,
        Column("count", "long", "delayed messages that were released"),
        Column("early", "long", "of those, before they were due"),
        *_QUANTILE_COLUMNS,
    ),
)
PRODUCERS: Final = Table(
    name="producers",
    layer="gold",
    version=1,
    key=("producer", "subject"),
    columns=_PRODUCER_COLUMNS,
)
AUDIT_RUN: Final = Table(
    name="audit_run",
    layer="audit",
    version=1,
    key=("run",),
    columns=(
        Column("run", "text", "name of the run: its time"),
        Column("as_of", "time", "judged is what was committed before"),
        Column("first_at", "time", "… and after this: from here on both sides are known"),
        Column("grace_s", "double", "how long a message may be under way"),
        Column("committed", "long", "outbox rows judged"),
        Column("stored", "long", "messages judged"),
        Column("foreign_messages", "long", "stored messages of producers that no outbox knows"),
        Column("expected", "long", "pairs of a message and a group that it is for"),
        Column("delivered", "long", "of those, handed out at least once"),
        Column("settled", "long", "of those, done: acked, dead, skipped or filtered"),
        Column("lost", "long", "findings"),
        Column("ghost", "long", "findings"),
        Column("duplicate", "long", "findings"),
        Column("late", "long", "findings"),
        Column("altered", "long", "findings"),
        Column("quarantined", "long", "sequences that stand in quarantine"),
        Column("verdict", "text", "clean or findings"),
        Column("coverage", "text", "what could not be judged, and why"),
    ),
)
AUDIT_FINDINGS: Final = Table(
    name="audit_findings",
    layer="audit",
    version=1,
    key=("run", "kind", "message_id", "subject", "consumer_group"),
    columns=(
        Column("run", "text", "name of the run"),
        Column("kind", "text", "lost, ghost, duplicate, late or altered"),
        Column("message_id", "text", "32 hex digits"),
        Column("subject", "text", "the subject"),
        Column("consumer_group", "text", "the group, where only one is concerned"),
        Column("database", "text", "where its outbox row is or was"),
        Column("sequence", "long", "its place in the subject, when it is stored"),
        Column("at", "time", "committed, or stored when no row is known"),
        Column("evidence", "text", "what was seen, in one sentence"),
    ),
)

TABLES: Final = {
    table.name: table
    for table in (
        MESSAGES,
        SCHEDULED,
        CANCELLED,
        COPIES,
        ACTIONS,
        OUTBOX,
        DELIVERIES,
        LIFECYCLE,
        GROUP_SPANS,
        PRODUCER_PARTS,
        FLOW_MINUTE,
        LATENCY_MINUTE,
        GROUP_LAG,
        DEAD_LETTERS,
        DELAY_LATENESS,
        PRODUCERS,
        AUDIT_RUN,
        AUDIT_FINDINGS,
    )
}


def table_named(name: str) -> Table:
    """The table of this name. Raises `KeyError`."""
    return TABLES[name]


# Tables travel to workers by name, so that the same table is the same object there.
copyreg.pickle(Table, lambda table: (table_named, (table.name,)))
