"""`qmq outbox show`: enough of a message for a person to decide about its row, on every database."""

from __future__ import annotations

import json
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from qmq_client.commands.outbox import BODY_SHOWN_BYTES
from qmq_client.commands.root import root
from qmq_client.ids import MESSAGE_IDS
from qmq_client.outbox.database.dialect import dialect_of
from qmq_client.outbox.table import DEFAULT_TABLES, PARKED, create_tables
from qmq_client.wire.message_id import format_message_id
from qmq_client.wire.record import BodyKind, Record, encode_record
from tests.services.databases import Database

SUBJECT = "orders.created"


def a_record(body: bytes, kind: BodyKind = BodyKind.JSON, **more: Any) -> Record:
    return Record(
        message_id=MESSAGE_IDS.next_id(),
        subject=SUBJECT,
        body=body,
        body_kind=kind,
        born_at_ms=1_700_000_000_000,
        **more,
    )


def put(database: Database, record: Record, data: bytes | None = None) -> str:
    """Park it, perhaps with other bytes than its own; its id as people see it."""
    engine = database.engine()
    create_tables(engine)
    row = sa.insert(DEFAULT_TABLES.outbox).values(
        message_id=record.message_id,
        subject=SUBJECT,
        record=encode_record(record) if data is None else data,
        state=PARKED,
        due_at_ms=sa.literal_column(dialect_of(engine).now_ms),
        created_at_ms=sa.literal_column(dialect_of(engine).now_ms),
        attempts=7,
    )
    with engine.begin() as connection:
        connection.execute(row)
    return format_message_id(record.message_id)


def show(database: Database, message_id: str, *more: str) -> str:
    call = ["outbox", "show", message_id, "--database", database.url, *more]
    result = CliRunner().invoke(root, call)
    assert result.exit_code == 0, result.output
    return result.output


def test_O7_show_tells_what_the_message_says(a_database: Database) -> None:
    record = a_record(
        b'{"order":7,"note":"\xc3\xa9"}',
        key="order-7",
        tags=("eu", "vip"),
        headers=(("traceparent", "00-ab"), ("user", "anna")),
    )
    message_id = put(a_database, record)
    found = json.loads(show(a_database, message_id, "--json"))
    assert (found["key"], found["tags"]) == ("order-7", ["eu", "vip"])
    assert found["headers"] == {"traceparent": "00-ab", "user": "anna"}
    assert json.loads(found["body"]) == {"order": 7, "note": "é"}
    assert (found["body_kind"], found["body_bytes"]) == ("json", len(record.body))
    assert (found["is_body_whole"], found["deliver_at"]) == (True, None)
    assert "damage" not in found
    lines = show(a_database, message_id).splitlines()
    assert "header        user: anna" in lines
    assert "tags          eu, vip" in lines
    assert 'body          {"order":7,"note":"é"}' in lines


def test_of_a_long_text_the_beginning_is_shown_and_of_bytes_their_digits(
    sqlite_database: Database,
) -> None:
    text = "é" * BODY_SHOWN_BYTES
    found = json.loads(
        show(
            sqlite_database,
            put(sqlite_database, a_record(f"x{text}".encode(), BodyKind.TEXT)),
            "--json",
        )
    )
    assert found["body"] == "x" + "é" * (BODY_SHOWN_BYTES // 2 - 1), "no half of a character"
    assert (found["is_body_whole"], found["body_bytes"]) == (False, 2 * len(text) + 1)
    message_id = put(sqlite_database, a_record(b"\xff" * 65, BodyKind.BYTES))
    found = json.loads(show(sqlite_database, message_id, "--json"))
    assert (found["body_hex"], found["is_body_whole"]) == ("ff" * 64, False)


def test_a_message_cannot_give_orders_to_the_terminal(sqlite_database: Database) -> None:
    record = a_record(
        "\x1b[2J\r\n\x9b31mgone".encode(), BodyKind.TEXT, headers=(("a", "\x1b]0;x"),)
    )
    shown = show(sqlite_database, put(sqlite_database, record))
    assert "body          \\x1b[2J\\r\\n\\x9b31mgone\n" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("damage", ["flipped", "short", "empty"])
def test_O7_a_damaged_record_is_shown_as_such(sqlite_database: Database, damage: str) -> None:
    record = a_record(b"1")
    data = encode_record(record)
    bad = {"flipped": data[:-1] + b"2", "short": data[:9], "empty": b""}[damage]
    message_id = put(sqlite_database, record, bad)
    found = json.loads(show(sqlite_database, message_id, "--json"))
    assert found["record_hex"] == bad.hex()
    assert "record" in found["damage"]
    assert "body" not in found
    assert "damage        record" in show(sqlite_database, message_id)


def test_O7_a_record_in_the_row_of_another_message_is_shown_as_such(
    sqlite_database: Database,
) -> None:
    record, other = a_record(b"1"), a_record(b"2")
    message_id = put(sqlite_database, record, encode_record(other))
    found = json.loads(show(sqlite_database, message_id, "--json"))
    said = format_message_id(other.message_id)
    assert found["damage"] == f"the record is that of message {said}"
