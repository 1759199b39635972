"""Every table by its name; the columns of each are in the module of its layer.

All code takes tables from here, so that a table that travels to a worker is the same object there. A table's version
goes up when a column is added; what files of an older version lack is read as null. `MESSAGES` and `SCHEDULED` are
what the source gives under these names; stored, they are rows of `LOG`. All times are UTC with microseconds.
`docs/pipeline-tables.md` prints these tables, and a test holds both equal. No Spark: workers and plain programs use
this module too.
"""

from __future__ import annotations

import copyreg
from typing import Final

from qmq_pipeline.tables.table import Column, Table

_ID_COLUMNS: Final = (
    Column("message_id", "text", "32 hex digits"),
    Column("producer", "long", "first half of the id: the producer's instance, as a signed number"),
    Column(
        "counter",
        "long",
        "second half of the id: the producer's counter, as a signed number",
    ),
)
#: The place of a row in the commit log.
_FRAME_COLUMNS: Final = (
    Column("physical_offset", "long", "bytes from the start of the commit log to its frame"),
    Column("record_number", "int", "its place in the frame, from 0"),
)
_MESSAGE_COLUMNS: Final = (
    Column("subject", "text", "the stream it was sent to"),
    Column(
        "sequence",
        "long",
        "its place in the subject, from 0; null while it is delayed",
    ),
    *_FRAME_COLUMNS,
    *_ID_COLUMNS,
    Column(
        "record_crc",
        "long",
        "checksum that the producer made of subject and record",
    ),
    Column("key", "text", "ordering key, null for none"),
    Column("tags", "texts", "tags, empty for none"),
    Column("headers", "pairs", "headers, empty for none"),
    Column("body_kind", "int", "0 bytes, 1 text, 2 JSON; -1: not a record, see the page"),
    Column("born_at", "time", "made, by the producer's clock"),
    Column("stored_at", "time", "stored, by the broker's clock"),
    Column("due_at", "time", "not to be delivered before; null for at once"),
    Column("expires_at", "time", "expires then; null for never"),
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
#: Delayed messages as they were accepted or rescheduled; a released one is a row of `messages`.
SCHEDULED: Final = Table(
    name="scheduled",
    layer="bronze",
    version=2,
    key=("physical_offset", "record_number"),
    columns=(
        *_MESSAGE_COLUMNS,
        Column("now_due_at", "time", "its current due time: not `due_at` if it was rescheduled"),
    ),
)
#: The whole commit log, one row for each record and for each loss; `kind` says which columns are set.
LOG: Final = Table(
    name="log",
    layer="bronze",
    version=1,
    key=("physical_offset", "record_number"),
    partitions=("kind", "part"),
    columns=(
        *_MESSAGE_COLUMNS,
        Column("now_due_at", "time", "of scheduled: its current due time, if it was rescheduled"),
        Column("found_crc", "long", "checksum of the bytes, if it is not `record_crc`"),
        Column("consumer_group", "text", "of copy: the group whose long retry it is"),
        Column("ticket", "long", "of copy: identifies the long retry; the action has it too"),
        Column("copy_sequence", "long", "of copy, once it is due: its place among the copies"),
        Column("count", "long", "of lost: sequences from `sequence` on; of expired: bytes"),
        Column("kind", "text", "message, scheduled, cancelled, copy, lost or expired"),
        Column("part", "long", "number of the part of the log that it is in"),
    ),
)
#: The range of each subject in each part of the log; the table is small enough to be read as a whole.
SPANS: Final = Table(
    name="spans",
    layer="bronze",
    version=1,
    key=("part", "subject"),
    partitions=("part",),
    columns=(
        Column("subject", "text", "the subject"),
        Column("first_sequence", "long", "its first sequence in the part"),
        Column("next_sequence", "long", "one after the last"),
        Column("messages", "long", "messages"),
        Column("lost", "long", "sequences in quarantine"),
        Column("first_at", "time", "its first message was stored"),
        Column("last_at", "time", "its last message was stored"),
        Column("part", "long", "number of the part of the log"),
    ),
)
ACTIONS: Final = Table(
    name="actions",
    layer="bronze",
    version=2,
    key=("action_offset", "action_number"),
    partitions=("part",),
    columns=(
        Column("action_offset", "long", "bytes from the start of the action log to its frame"),
        Column("action_number", "int", "its place in the frame, from 0"),
        Column("at", "time", "when, by the broker's clock"),
        Column("action", "text", "pulled, acked, nacked, expired, dead and so on"),
        Column("subject", "text", "the subject"),
        Column("consumer_group", "text", "the group"),
        Column("consumer", "text", "the member; null if the whole group is meant"),
        Column("first_sequence", "long", "of a pull, dead letter or skip: first message"),
        Column("next_sequence", "long", "one after the last"),
        Column("first_pull", "long", "first pull sequence of the range"),
        Column("next_pull", "long", "one after the last"),
        Column("attempt", "int", "which attempt it is, from 1"),
        Column("until", "time", "end of the lease, or time of the next delivery"),
        Column("reason", "text", "why a message became a dead letter"),
        Column("error", "text", "what the consumer said"),
        Column("action_json", "text", "the whole action, for kinds that have more"),
        Column("part", "long", "number of the part of the action log that it is in"),
    ),
)
#: Each scan adds a row for each outbox row that is new, has changed, or is still open.
OUTBOX: Final = Table(
    name="outbox",
    layer="bronze",
    version=2,
    key=("database", "message_id", "scanned_at"),
    partitions=("day",),
    columns=(
        Column("database", "text", "name of the database"),
        Column("row_id", "long", "the row's number"),
        *_ID_COLUMNS,
        Column("subject", "text", "the subject"),
        Column("state", "text", "live, parked or sent"),
        Column("attempts", "int", "tries to publish it"),
        Column("created_at", "time", "inserted, by the database's clock"),
        Column("due_at", "time", "next try; for a sent row: kept until"),
        Column("sent_at", "time", "accepted; known only for kept rows, see the page"),
        Column("deliver_at", "time", "the message's own due time; null for at once"),
        Column(
            "record_crc",
            "long",
            "checksum that the producer made of subject and record",
        ),
        Column("record_bytes", "int", "length of the record"),
        Column("last_error", "text", "why the last try failed"),
        Column("scanned_at", "time", "when this row was read, by the database's clock"),
        Column("day", "day", "the day of `scanned_at`"),
    ),
)


_OUTCOMES: Final = (
    "waiting, in flight, returned, long retry, acked, dead, skipped, filtered, cancelled"
)
#: The outcome of one message at one group.
_OUTCOME_COLUMNS: Final = (
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
_LONG_RETRY_COLUMNS: Final = (
    Column("long_retry_at", "time", "when its last long retry began"),
    Column("redelivered_at", "time", "… and its copy was released; null until then"),
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
        *_OUTCOME_COLUMNS,
        *_LONG_RETRY_COLUMNS,
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
        *_OUTCOME_COLUMNS,
        Column("store_ms", "double", "committed (else born) to stored"),
        Column("wait_ms", "double", "stored (or due) to first delivered"),
        Column("work_ms", "double", "first delivered to settled"),
        Column("total_ms", "double", "committed (else born, or due) to settled"),
        Column("body_bytes", "int", "length of the body"),
        Column("copy", "int", "how many of its id were stored before it; 0 for the first"),
        *_LONG_RETRY_COLUMNS,
        PART,
    ),
)
#: The contribution of a part of the log to the lag of its groups: counts of pairs of a message and a group.
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
#: The contribution of a part of the log to the figures of its producers.
PRODUCER_PARTS: Final = Table(
    name="producer_parts",
    layer="silver",
    version=2,
    key=("producer", "subject", "first_at"),
    partitions=("part",),
    columns=(*PRODUCER_COLUMNS, PART),
)
#: The days on which something happened to messages of a part; the part counts in the gold tables of these days.
PART_DAYS: Final = Table(
    name="part_days",
    layer="silver",
    version=1,
    key=("part", "day"),
    partitions=("part",),
    columns=(Column("day", "text", "the day, like 2026-01-31"), PART),
)


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


AUDIT_RUN: Final = Table(
    name="audit_run",
    layer="audit",
    version=2,
    key=("run",),
    columns=(
        Column("run", "text", "name of the run: its time"),
        Column("as_of", "time", "commits before this time are judged"),
        Column("first_at", "time", "… and after this one, from which on both sides are known"),
        Column("grace_s", "double", "how long a message may be on its way"),
        Column("committed", "long", "judged outbox rows"),
        Column("stored", "long", "judged messages"),
        Column("foreign_messages", "long", "stored messages of producers that no outbox knows"),
        Column(
            "expected",
            "long",
            "pairs of a message and a group it is for, for all messages",
        ),
        Column("delivered", "long", "of those, delivered at least once"),
        Column("settled", "long", "of those, done: acked, dead, skipped or filtered"),
        Column("lost", "long", "findings"),
        Column("ghost", "long", "findings"),
        Column("duplicate", "long", "findings"),
        Column("late", "long", "findings"),
        Column("altered", "long", "findings"),
        Column("skipped", "long", "findings"),
        Column("quarantined", "long", "quarantined sequences"),
        Column("verdict", "text", "clean, findings or not judged"),
        Column("coverage", "text", "what could not be judged, and why"),
    ),
)
AUDIT_FINDINGS: Final = Table(
    name="audit_findings",
    layer="audit",
    version=1,
    key=("run", "kind", "message_id", "subject", "consumer_group"),
    partitions=("run",),
    columns=(
        Column("kind", "text", "lost, ghost, duplicate, late, altered or skipped"),
        Column("message_id", "text", "32 hex digits"),
        Column("subject", "text", "the subject"),
        Column("consumer_group", "text", "the group, if only one is concerned"),
        Column("database", "text", "where its outbox row is or was"),
        Column("sequence", "long", "its place in the subject, if it is stored"),
        Column("at", "time", "time of the commit, or of the storing if no row is known"),
        Column("evidence", "text", "what was seen, in one sentence"),
        Column("run", "text", "name of the run"),
    ),
)
#: The progress of each job, as it stored it at the end of its last run.
PROGRESS: Final = Table(
    name="progress",
    layer="jobs",
    version=1,
    key=("job",),
    partitions=("job",),
    columns=(
        Column("at", "time", "when it noted that"),
        Column("notes", "text", "JSON, for the job itself"),
        Column("job", "text", "ingest, archive, lifecycle or marts"),
    ),
)


__all__ = [
    "ACTIONS",
    "AUDIT_FINDINGS",
    "AUDIT_RUN",
    "DEAD_LETTERS",
    "DELAY_LATENESS",
    "DELIVERIES",
    "FLOW_MINUTE",
    "GROUP_LAG",
    "GROUP_SPANS",
    "LATENCY_MINUTE",
    "LIFECYCLE",
    "LOG",
    "MESSAGES",
    "OUTBOX",
    "PART_DAYS",
    "PRODUCERS",
    "PRODUCER_PARTS",
    "PROGRESS",
    "SCHEDULED",
    "SPANS",
    "TABLES",
    "table_named",
]

TABLES: Final = {
    table.name: table
    for table in (
        MESSAGES,
        SCHEDULED,
        LOG,
        SPANS,
        ACTIONS,
        OUTBOX,
        DELIVERIES,
        LIFECYCLE,
        GROUP_SPANS,
        PRODUCER_PARTS,
        PART_DAYS,
        FLOW_MINUTE,
        LATENCY_MINUTE,
        GROUP_LAG,
        DEAD_LETTERS,
        DELAY_LATENESS,
        PRODUCERS,
        AUDIT_RUN,
        AUDIT_FINDINGS,
        PROGRESS,
    )
}


def table_named(name: str) -> Table:
    """The table of this name. Raises `KeyError`."""
    return TABLES[name]


# Tables travel to workers by name, so that the same table is the same object there.
copyreg.pickle(Table, lambda table: (table_named, (table.name,)))
