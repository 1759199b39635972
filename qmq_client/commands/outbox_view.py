"""Outbox rows for people and programs: one line of a table, or everything about one row.

Bodies are shown up to a bound, and control characters in a message cannot move the terminal's
cursor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from qmq_client.commands.table import table_lines
from qmq_client.outbox.row import StoredRow
from qmq_client.outbox.table import LIVE, PARKED, SENT
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.message_id import format_message_id
from qmq_client.wire.record import BodyKind, Record, decode_record
from qmq_client.wire.shown import printable

STATE_NAMES: Final = {LIVE: "live", PARKED: "parked", SENT: "sent"}
_COLUMNS: Final = ("message_id", "state", "subject", "attempts", "due_at", "last_error")
_ERROR_SHOWN_CHARACTERS: Final = 60
#: Enough to know a message again; a text is cut here, of bytes a part of it is shown as digits.
BODY_SHOWN_BYTES: Final = 4_096
_HEX_SHOWN_BYTES: Final = 64


def row_values(row: StoredRow) -> dict[str, Any]:
    """The values of a row's columns."""
    return {
        "message_id": format_message_id(row.message_id),
        "state": STATE_NAMES.get(row.state, str(row.state)),
        "subject": row.subject,
        "ordering_key": row.ordering_key,
        "attempts": row.attempts,
        "due_at": _iso(row.due_at_ms),
        "created_at": _iso(row.created_at_ms),
        "is_owned": row.is_owned,
        "record_bytes": row.record_bytes,
        "last_error": row.last_error,
    }


def record_values(row: StoredRow, data: bytes) -> dict[str, Any]:
    """The contents of a row's record, or why it cannot be read."""
    try:
        record = decode_record(row.subject, data)
    except ProtocolError as error:
        return {"damage": str(error), "record_hex": data[:_HEX_SHOWN_BYTES].hex()}
    values: dict[str, Any] = {
        "key": record.key,
        "tags": list(record.tags),
        "headers": dict(record.headers),
        "born_at": _iso(record.born_at_ms),
        "deliver_at": None if record.due_at_ms is None else _iso(record.due_at_ms),
        "body_kind": record.body_kind.name.lower(),
        "body_bytes": len(record.body),
        **_body(record),
    }
    if record.message_id != row.message_id:
        said = format_message_id(record.message_id)
        values["damage"] = f"the record is that of message {said}"
    return values


def _body(record: Record) -> dict[str, Any]:
    """The beginning, as text if it is one; JSON too, as it was written."""
    shown = record.body[:BODY_SHOWN_BYTES]
    is_whole = len(shown) == len(record.body)
    if record.body_kind is not BodyKind.BYTES:
        # A character that the bound cuts in two is left out.
        text = shown.decode("utf-8", errors="replace" if is_whole else "ignore")
        return {"body": text, "is_body_whole": is_whole}
    digits = record.body[:_HEX_SHOWN_BYTES].hex()
    return {"body_hex": digits, "is_body_whole": len(record.body) <= _HEX_SHOWN_BYTES}


def row_lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The rows as a table, with the beginning of each error."""
    return table_lines(_COLUMNS, [[_cell(row, column) for column in _COLUMNS] for row in rows])


def _cell(row: dict[str, Any], column: str) -> object:
    if column == "last_error":
        text = printable(row[column] or "")
        is_whole = len(text) <= _ERROR_SHOWN_CHARACTERS
        return text if is_whole else f"{text[: _ERROR_SHOWN_CHARACTERS - 1]}…"
    return row[column]


def detail_lines(values: dict[str, Any]) -> Iterator[str]:
    """One line for each known fact about a row."""
    for name, value in values.items():
        if name == "headers":
            yield from (
                f"{'header':<13} {printable(f'{header}: {text}')}" for header, text in value.items()
            )
            continue
        text = ", ".join(value) if isinstance(value, list) else value
        is_empty = text is None or text == ""
        yield f"{name:<13} {'-' if is_empty else printable(str(text))}"


def _iso(time_ms: int) -> str:
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError, OSError):  # nobody's clock, so somebody's hand
        return f"{time_ms} ms"
