"""The columns of the bronze tables: what logs and outboxes contain, as it is stored there."""

from __future__ import annotations

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
#: Everything in the commit log, one row for each record and for each loss; `kind` says which columns are set.
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
        Column("consumer_group", "text", "of copy: the group that set the message aside"),
        Column("ticket", "long", "of copy: identifies this time aside; the action has it too"),
        Column("copy_sequence", "long", "of copy, once it is due: its place among the copies"),
        Column("count", "long", "of lost: sequences from `sequence` on; of expired: bytes"),
        Column("kind", "text", "message, scheduled, cancelled, copy, lost or expired"),
        Column("part", "long", "number of the part of the log that it is in"),
    ),
)
#: What each part of the log has of each subject: small enough to be read as a whole.
SPANS: Final = Table(
    name="spans",
    layer="bronze",
    version=1,
    key=("part", "subject"),
    partitions=("part",),
    columns=(
        Column("subject", "text", "the subject"),
        Column("first_sequence", "long", "its first sequence in the part"),
        Column("next_sequence", "long", "one behind the last"),
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
        Column("next_sequence", "long", "one behind the last"),
        Column("first_pull", "long", "first pull sequence of the range"),
        Column("next_pull", "long", "one behind the last"),
        Column("attempt", "int", "which attempt it is, from 1"),
        Column("until", "time", "end of the lease, or time of the next delivery"),
        Column("reason", "text", "why a message became a dead letter"),
        Column("error", "text", "what the consumer said"),
        Column("action_json", "text", "the whole action, for kinds that have more"),
        Column("part", "long", "number of the part of the action log that it is in"),
    ),
)
#: Each scan adds a row for what is new, has changed, or is still open.
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
