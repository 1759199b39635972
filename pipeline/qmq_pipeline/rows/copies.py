"""Frames of the commit log with copies of messages that groups set aside, as rows of `copies`.

A copy is the broker's own: it is written when a group sets a message aside, and again, with a
sequence, when its time has come. Its rows say whose it is; the message itself is in `messages`.
There are few copies, so rows are made in plain Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.logs.copies import unpack_copy
from qmq_broker.storage.logs.frame_scan import ScannedFrame
from qmq_broker.storage.logs.kinds import LOG_LIMITS
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import parse_message_frame, parse_subjects
from qmq_client.wire.names import COPIES as SUBJECT
from qmq_client.wire.record import decode_record
from qmq_pipeline.errors import DamagedRangeError
from qmq_pipeline.rows.decode import QUEUED_KINDS, SCHEDULED_KINDS
from qmq_pipeline.tables.schemas import COPIES


def has_copies(frame: ScannedFrame) -> bool:
    """Whether there is a copy in this frame."""
    header = frame.header
    if header.kind not in QUEUED_KINDS | SCHEDULED_KINDS:
        return False
    return any(run.subject == SUBJECT for run in parse_subjects(frame.data, header)[0])


def batches(frames: Iterable[ScannedFrame]) -> Iterator[pa.RecordBatch]:
    """The rows of each frame that has copies."""
    for frame in frames:
        rows = list(_rows(frame)) if has_copies(frame) else []
        if rows:
            yield pa.RecordBatch.from_pylist(rows, schema=COPIES.arrow())


def _rows(frame: ScannedFrame) -> Iterator[dict[str, Any]]:
    try:
        whole = parse_message_frame(bytes(frame.data), LOG_LIMITS, is_verified=True)
        number = 0
        for run in whole.runs:
            for index in range(run.count):
                if run.subject == SUBJECT:
                    sequence = run.first_sequence + index
                    yield _row(frame, number, whole.record(number), sequence)
                number += 1
    except (ProtocolError, CorruptionError) as error:
        raise DamagedRangeError(
            source=f"commit log at offset {frame.offset}",
            reason=str(error),
            remedy="Use the version of qmq that wrote it",
        ) from error


def _row(frame: ScannedFrame, number: int, record: bytes, sequence: int) -> dict[str, Any]:
    copy, of_copy = unpack_copy(record), decode_record(SUBJECT, record)
    is_back = frame.header.kind in QUEUED_KINDS
    return {
        "physical_offset": frame.offset,
        "record_number": number,
        "message_id": of_copy.message_id.hex(),
        "subject": copy.subject,
        "consumer_group": copy.group,
        "sequence": copy.sequence,
        "ticket": copy.ticket,
        "stored_at": _time(frame.header.stored_at_ms),
        "due_at": _time(of_copy.due_at_ms),
        "copy_sequence": sequence if is_back else None,
    }


def _time(time_ms: int | None) -> datetime | None:
    return None if time_ms is None else datetime.fromtimestamp(time_ms / 1000, UTC)
