"""Decodes frames of the action log into rows of `actions`.

An action covers a range of messages, so there are far fewer actions than messages, and a row is
made in plain Python. The range stays a range: one settlement of ten thousand messages is one row. A
pull that delivered several runs of sequences gives one row for each.

Actions with more content than the columns hold are stored whole in `action_json`. Kinds that this
version does not know stop the read: their meaning cannot be guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import pyarrow as pa

from qmq_broker.errors import UnknownFormatError
from qmq_broker.storage.logs.actions import decode_actions
from qmq_broker.storage.logs.frame_scan import ScannedFrame
from qmq_client.group.actions import (
    Acked,
    Action,
    Dead,
    Expired,
    Extended,
    Nacked,
    Pulled,
    kind_name,
)
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import FRAME_HEADER_BYTES, FrameKind
from qmq_client.wire.requests import sized_part
from qmq_pipeline.errors import DamagedRangeError, LaterVersionError
from qmq_pipeline.rows.decode import Selection
from qmq_pipeline.tables.schemas import ACTIONS

BATCH_ROWS: Final = 20_000
#: Fields that have a column of their own.
_IN_COLUMNS: Final = frozenset(
    {"at_ms", "subject", "group", "first_sequence", "sequence", "first", "next"}
)
_ALL: Final = Selection(columns=ACTIONS.names, table=ACTIONS)
_Row = dict[str, Any]


def batches(
    frames: Iterable[ScannedFrame], selection: Selection = _ALL
) -> Iterator[pa.RecordBatch]:
    """Rows of these frames; each batch has the columns of the selection, whose times are those of actions."""
    schema = ACTIONS.arrow(selection.columns)
    rows: list[_Row] = []
    for frame in frames:
        if frame.header.kind is FrameKind.ACTIONS:
            rows += frame_rows(frame, selection)
        if len(rows) >= BATCH_ROWS:
            yield pa.RecordBatch.from_pylist(rows, schema=schema)
            rows = []
    if rows:
        yield pa.RecordBatch.from_pylist(rows, schema=schema)


def frame_rows(frame: ScannedFrame, selection: Selection = _ALL) -> Iterator[_Row]:
    """One row for each range of each selected action of a frame."""
    number = 0
    for action in _decode(frame):
        is_selected = _is_selected(action, selection)
        for row in action_rows(action):
            if is_selected:
                yield {
                    "action_offset": frame.offset,
                    "action_number": number,
                    "part": frame.offset // selection.part_bytes,
                    **row,
                }
            number += 1


def _is_selected(action: Action, selection: Selection) -> bool:
    subjects = selection.subjects
    is_of_subjects = subjects is None or action.subject in subjects
    first_ms, next_ms = selection.first_stored_at_ms, selection.next_stored_at_ms
    return is_of_subjects and first_ms <= action.at_ms < next_ms


def _decode(frame: ScannedFrame) -> list[Action]:
    where = f"action log at offset {frame.offset}"
    try:
        return decode_actions(sized_part(frame.data, FRAME_HEADER_BYTES))
    except UnknownFormatError as error:
        raise LaterVersionError(source=where, reason=str(error)) from error
    except ProtocolError as error:
        raise DamagedRangeError(
            source=where,
            reason=str(error),
            remedy="Run `qmq store verify` on the data directory; restore a copy",
        ) from error


def action_rows(action: Action) -> Iterator[_Row]:
    """The rows of one action, without their place in the log; empty columns are left out."""
    row: _Row = {
        "at": _time(getattr(action, "at_ms", None)),
        "action": kind_name(type(action)),
        "subject": getattr(action, "subject", None),
        "consumer_group": getattr(action, "group", None),
        "consumer": getattr(action, "consumer", None),
    }
    match action:
        case Pulled():
            row["until"] = _time(action.lease_until_ms)
            yield from _pulled_rows(action, row)
        case Acked() | Extended():
            until_ms = action.lease_until_ms if isinstance(action, Extended) else None
            yield row | _pulls(action.first, action.next) | {"until": _time(until_ms)}
        case Nacked() | Expired():
            error = action.error if isinstance(action, Nacked) else None
            until = {"until": _time(action.retry_at_ms), "error": error}
            yield row | _pulls(action.first, action.next) | until
        case Dead():
            more: _Row = {
                "attempt": action.attempts,
                "reason": action.reason,
                "error": action.error,
            }
            yield row | _sequences(action.sequence, action.sequence + 1) | more
        case _:
            yield row | _told_sequences(action) | {"action_json": _json(action)}


def _told_sequences(action: Action) -> _Row:
    """The consume queue sequences of an action, whose names differ by kind."""
    first = getattr(action, "first", getattr(action, "sequence", None))
    first = getattr(action, "first_sequence", first)
    return {"first_sequence": first, "next_sequence": getattr(action, "next", None)}


def _json(action: Action) -> str | None:
    """The whole action as JSON, if it has more content than there are columns."""
    more = set(action.__struct_fields__) - _IN_COLUMNS
    return msgspec.json.encode(action).decode() if more else None


def _pulled_rows(action: Pulled, row: _Row) -> Iterator[_Row]:
    first_pull = action.first_pull_sequence
    for run in action.runs:
        next_pull = first_pull + run.count
        sequences = _sequences(run.first_sequence, run.first_sequence + run.count)
        yield row | sequences | _pulls(first_pull, next_pull) | {"attempt": run.attempt}
        first_pull = next_pull


def _sequences(first: int, after: int) -> _Row:
    return {"first_sequence": first, "next_sequence": after}


def _pulls(first: int, after: int) -> _Row:
    return {"first_pull": first, "next_pull": after}


def _time(time_ms: int | None) -> datetime | None:
    """None for 0 and None: the action log writes 0 for never."""
    return datetime.fromtimestamp(time_ms / 1000, UTC) if time_ms else None
