"""The effects of a frame of the commit log on consume queues and delayed messages.

Shared by the writer, which stages the frames that it appends, and by all code that reads the log
again: a start, a rebuild, a verification. It writes no file.
"""

from __future__ import annotations

from qmq_broker.storage.ids.repeats import StoredFrame
from qmq_broker.storage.ids.runs import is_remembered, subject_ids
from qmq_broker.storage.logs.frame_scan import ScannedFrame
from qmq_broker.storage.logs.kinds import LOG_LIMITS, QUEUED_KINDS, SENT_KINDS, SETTLING_KINDS
from qmq_broker.storage.logs.lost import lost_entries, lost_runs
from qmq_broker.storage.queues.consume_queues import ConsumeQueues
from qmq_broker.storage.queues.packing import pack_entries
from qmq_broker.storage.queues.queue_files import ENTRY_BYTES
from qmq_broker.storage.schedule.cancelled import read_cancelled
from qmq_broker.storage.schedule.schedule import Schedule
from qmq_client.wire.frame import FrameKind, parse_message_frame


def stored_frame(offset: int, data: bytes, *, is_verified: bool = False) -> StoredFrame:
    """A message frame as it is stored in the log; raises `ProtocolError`.

    `is_verified` says that a scan has already checked the body, so its checksum is not computed
    again.
    """
    frame = parse_message_frame(data, LOG_LIMITS, is_verified=is_verified)
    return StoredFrame(
        frame=frame,
        ids=subject_ids(frame),
        first_sequences=tuple(run.first_sequence for run in frame.runs),
        physical_offset=offset,
        stored_at_ms=frame.header.stored_at_ms,
    )


def stage_scanned(queues: ConsumeQueues, frame: ScannedFrame) -> StoredFrame | None:
    """Stage a scanned frame for the queues: its entries, or the places of lost messages.

    Returns the frame if a client sent it. Raises `ProtocolError` or `CorruptionError`.
    """
    if frame.header.kind is FrameKind.LOST:
        for lost in lost_runs(frame):
            entries = lost_entries(frame.offset, lost.count)
            queues.stage(lost.subject, lost.first_sequence, entries, offset=frame.offset)
    if frame.header.kind not in SENT_KINDS | QUEUED_KINDS:
        return None
    stored = stored_frame(frame.offset, frame.data, is_verified=True)
    if frame.header.kind in QUEUED_KINDS:
        stage_frame(queues, stored)
    return stored if is_remembered(frame.header, frame.data) else None


def stage_delayed(schedule: Schedule, frame: ScannedFrame) -> None:
    """Stage a scanned frame for the delayed messages; raises `ProtocolError`."""
    kind = frame.header.kind
    if kind is FrameKind.CANCELLED:
        schedule.stage_cancelled(read_cancelled(frame.data))
    elif kind is FrameKind.DELAYED or kind in SETTLING_KINDS:
        parsed = parse_message_frame(frame.data, LOG_LIMITS, is_verified=True)
        schedule.stage(parsed, frame.offset, frame.header.stored_at_ms)


def stage_frame(queues: ConsumeQueues, stored: StoredFrame) -> None:
    """Give each subject of the frame its entries, not yet visible."""
    entries = pack_entries(stored.frame, stored.physical_offset)
    position = 0
    for run, first_sequence in zip(stored.frame.runs, stored.first_sequences, strict=True):
        next_position = position + run.count * ENTRY_BYTES
        part = (
            entries if run.count * ENTRY_BYTES == len(entries) else entries[position:next_position]
        )
        queues.stage(run.subject, first_sequence, part, offset=stored.physical_offset)
        position = next_position
