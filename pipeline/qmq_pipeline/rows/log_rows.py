"""Decodes frames of the commit log into rows of `log`: messages, and their cancellations, copies and losses.

One pass over the frames gives all kinds of rows, so that a writer of tables reads the log once.
Messages are decoded a column at a time (`decode.py`); the other kinds are few, and their rows are
made in plain Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.logs.copies import unpack_copy
from qmq_broker.storage.logs.frame_scan import ScannedFrame
from qmq_broker.storage.logs.kinds import LOG_LIMITS
from qmq_broker.storage.logs.lost import lost_runs
from qmq_broker.storage.schedule.cancelled import read_cancelled, read_withdrawn
from qmq_client.wire.checksum import crc32c
from qmq_client.wire.columns import checksums, first_broken
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import FrameKind, parse_message_frame, parse_subjects
from qmq_client.wire.names import COPIES, OWN_PREFIX
from qmq_client.wire.record import decode_record
from qmq_pipeline.errors import DamagedRangeError
from qmq_pipeline.rows.decode import (
    QUEUED_KINDS,
    SCHEDULED_KINDS,
    Piece,
    Selection,
    batches,
    pieces,
)
from qmq_pipeline.tables.schemas import LOG, MESSAGES, SCHEDULED

MESSAGE, DELAYED, CANCELLED, COPY, LOST, EXPIRED = (
    "message",
    "scheduled",
    "cancelled",
    "copy",
    "lost",
    "expired",
)
_Row = dict[str, Any]
#: Offset of a frame and number of a record in it → the checksum of its bytes.
_Altered = dict[tuple[int, int], int]


def log_batches(frames: Iterable[ScannedFrame], selection: Selection) -> Iterator[pa.RecordBatch]:
    """Rows of these frames; each batch has the columns of the selection. Rows of rare kinds come last."""
    seen = _Seen()
    messages = _narrowed(selection, MESSAGES.names)
    for rows in batches(seen.passing(frames), replace(messages, table=MESSAGES)):
        yield _as_log(rows, MESSAGE, selection, seen.altered)
    delayed = replace(_narrowed(selection, SCHEDULED.names), table=SCHEDULED)
    for rows in batches(seen.delayed, delayed):
        yield _as_log(rows, DELAYED, selection, seen.altered)
    others = [row for frame in seen.others for row in _rows(frame)]
    if others:
        yield from rows_batch(others, selection)


def rows_batch(rows: Iterable[_Row], selection: Selection) -> Iterator[pa.RecordBatch]:
    """Rows made in Python, as a batch with the columns of the selection."""
    with_part = [row | {"part": row["physical_offset"] // selection.part_bytes} for row in rows]
    yield pa.RecordBatch.from_pylist(with_part, schema=LOG.arrow(selection.columns))


def expired_row(first_offset: int, next_offset: int) -> _Row:
    """The row for a range that retention had deleted before it was read."""
    return {"kind": EXPIRED, "physical_offset": first_offset, "count": next_offset - first_offset}


class _Seen:
    """Frames of other kinds, kept while messages are decoded."""

    def __init__(self) -> None:
        self.altered: _Altered = {}
        self.delayed: list[ScannedFrame] = []
        self.others: list[ScannedFrame] = []

    def passing(self, frames: Iterable[ScannedFrame]) -> Iterator[ScannedFrame]:
        """The frames of messages; all others are kept."""
        for frame in frames:
            kind = frame.header.kind
            if kind in QUEUED_KINDS | SCHEDULED_KINDS:
                for piece in pieces(frame):
                    self.altered.update(_altered_records(piece))
                if kind is not FrameKind.MESSAGES and _has_copies(frame):
                    self.others.append(frame)
            if kind in SCHEDULED_KINDS:
                self.delayed.append(frame)
            elif kind in (FrameKind.CANCELLED, FrameKind.LOST):
                self.others.append(frame)
            else:
                yield frame


def _narrowed(selection: Selection, names: tuple[str, ...]) -> Selection:
    """The selection limited to the columns of a table, plus the columns that identify a record."""
    wanted = ("physical_offset", "record_number", *selection.columns)
    return replace(selection, columns=tuple(name for name in names if name in wanted))


def _as_log(
    rows: pa.RecordBatch, kind: str, selection: Selection, altered: Mapping[tuple[int, int], int]
) -> pa.RecordBatch:
    offsets = rows["physical_offset"].to_numpy()
    made: dict[str, Callable[[], pa.Array]] = {
        "kind": lambda: pa.repeat(pa.scalar(kind), len(offsets)),
        "part": lambda: pa.array(offsets // selection.part_bytes),
        "found_crc": lambda: _found_crc(rows, altered),
    }
    known = set(rows.schema.names)
    schema = LOG.arrow(selection.columns)
    arrays = [
        rows[one.name]
        if one.name in known
        else made.get(one.name, lambda: pa.nulls(len(offsets), one.type))()  # noqa: B023  # called at once
        for one in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _found_crc(rows: pa.RecordBatch, altered: Mapping[tuple[int, int], int]) -> pa.Array:
    if not altered:
        return pa.nulls(rows.num_rows, pa.int64())
    keys = zip(rows["physical_offset"].to_pylist(), rows["record_number"].to_pylist(), strict=True)
    return pa.array([altered.get(key) for key in keys], pa.int64())


def _rows(frame: ScannedFrame) -> Iterator[_Row]:
    kind, at = frame.header.kind, _time(frame.header.stored_at_ms)
    if kind is FrameKind.LOST:
        make = _lost_rows
    else:
        make = _cancelled_rows if kind is FrameKind.CANCELLED else _copy_rows
    for number, row in enumerate(make(frame)):
        yield {"physical_offset": frame.offset, "record_number": number, "stored_at": at, **row}


def _lost_rows(frame: ScannedFrame) -> Iterator[_Row]:
    """Rows of quarantined ranges."""
    for one in lost_runs(frame):
        if not one.subject.startswith(OWN_PREFIX):
            yield {
                "kind": LOST,
                "subject": one.subject,
                "sequence": one.first_sequence,
                "count": one.count,
            }


def _cancelled_rows(frame: ScannedFrame) -> Iterator[_Row]:
    """Messages that were cancelled, or withdrawn from their outbox before they arrived."""
    found: list[tuple[bytes, str | None]] = [
        (one.message_id, one.subject)
        for one in read_cancelled(frame.data)
        if not one.subject.startswith(OWN_PREFIX)
    ]
    found += [
        (message_id, subject or None)
        for subject, ids in read_withdrawn(frame.data).items()
        for message_id in ids
    ]
    for message_id, subject in found:
        halves = np.frombuffer(message_id, ">u8").astype(np.uint64).view(np.int64)
        yield {
            "kind": CANCELLED,
            "message_id": message_id.hex(),
            "producer": int(halves[0]),
            "counter": int(halves[1]),
            "subject": subject,
        }


def _has_copies(frame: ScannedFrame) -> bool:
    return any(run.subject == COPIES for run in parse_subjects(frame.data, frame.header)[0])


def _copy_rows(frame: ScannedFrame) -> Iterator[_Row]:
    """Copies for long retries: written once when a retry begins, and once more when it is due."""
    is_back = frame.header.kind in QUEUED_KINDS
    try:
        whole = parse_message_frame(bytes(frame.data), LOG_LIMITS, is_verified=True)
        number = 0
        for run in whole.runs:
            for index in range(run.count):
                if run.subject == COPIES:
                    record = whole.record(number)
                    sequence = run.first_sequence + index if is_back else None
                    yield {"record_number": number, "copy_sequence": sequence, **_copy(record)}
                number += 1
    except (ProtocolError, CorruptionError) as error:
        raise DamagedRangeError(
            source=f"commit log at offset {frame.offset}",
            reason=str(error),
            remedy="Use the version of qmq that wrote it",
        ) from error


def _copy(record: bytes) -> _Row:
    copy, of_copy = unpack_copy(record), decode_record(COPIES, record)
    return {
        "kind": COPY,
        "message_id": of_copy.message_id.hex(),
        "subject": copy.subject,
        "consumer_group": copy.group,
        "sequence": copy.sequence,
        "ticket": copy.retry_id,
        "due_at": None if of_copy.due_at_ms is None else _time(of_copy.due_at_ms),
    }


def _time(time_ms: int) -> datetime:
    return datetime.fromtimestamp(time_ms / 1000, UTC)


def _altered_records(piece: Piece) -> Iterator[tuple[tuple[int, int], int]]:
    """Altered records of one subject in one frame: offset of the frame, number of the record, and
    checksum of its bytes.
    """
    seed, lengths = crc32c(piece.subject.encode()), piece.lengths.tolist()
    if first_broken(checksums(piece.data, lengths), seed) is None:
        return
    for number, (record_crc, content) in enumerate(checksums(piece.data, lengths)):
        found_crc = crc32c(content, seed)
        if found_crc != record_crc:
            yield (piece.offset, piece.first_number + number), found_crc
