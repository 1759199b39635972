"""The columns of the bronze tables: what logs and outboxes contain, as it is stored there."""

from __future__ import annotations

from typing import Final

from qmq_pipeline.tables.table import Column, Table

_ID_COLUMNS: Final = (
    Column("message_id", "text", "32 hex digits", is_distinct=True),
    Column("producer", "long", "first half of the id: the producer's instance, as a signed number"),
    Column(
        "counter",
        "long",
        "second half of the id: the producer's counter, as a signed number",
        is_distinct=True,
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
        is_distinct=True,
    ),
    *_FRAME_COLUMNS,
    *_ID_COLUMNS,
    Column(
        "record_crc",
        "long",
        "checksum that the producer made of subject and record",
        is_distinct=True,
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
    Column("body", "bytes", "the body as the producer gave it", is_distinct=True),
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
#: Messages that were cancelled: delayed ones, and those withdrawn from their outbox before they came.
CANCELLED: Final = Table(
    name="cancelled",
    layer="bronze",
    version=1,
    key=("physical_offset", "record_number"),
    columns=(
        *_FRAME_COLUMNS,
        *_ID_COLUMNS,
        Column(
            "subject",
            "text",
            "the subject it will not enter; null if an earlier version of the broker wrote that it was withdrawn",
        ),
        Column("cancelled_at", "time", "when, by the broker's clock"),
    ),
)
#: Copies of messages that groups set aside: when each was made, and when it came back.
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
        Column("ticket", "long", "identifies this time aside; the action has it too"),
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
    ),
)
#: Each scan adds a row for what is new, has changed, or is still open.
OUTBOX: Final = Table(
    name="outbox",
    layer="bronze",
    version=1,
    key=("database", "message_id", "scanned_at"),
    columns=(
        Column("database", "text", "name of the database"),
        Column("row_id", "long", "the row's number", is_distinct=True),
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
            is_distinct=True,
        ),
        Column("record_bytes", "int", "length of the record"),
        Column("last_error", "text", "why the last try failed"),
        Column("scanned_at", "time", "when this row was read, by the database's clock"),
    ),
)
