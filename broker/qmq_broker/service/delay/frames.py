"""RELEASED frames: what is due and can be read, with the marks that say which delayed messages it was."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from qmq_broker.errors import CorruptionError
from qmq_broker.service.delay.counts import DelayCounts
from qmq_broker.service.delay.wheel import Pending
from qmq_broker.storage.schedule.schedule import Schedule, marked_frame
from qmq_client.wire.frame import FrameKind, MessageFrame
from qmq_client.wire.limits import SUBJECTS_PER_FRAME_MAX
from qmq_client.wire.marks import Marks

_log = logging.getLogger(__name__)
#: Bytes of one RELEASED frame; one longer message is a frame alone.
RELEASE_BYTES_MAX: Final = 1024 * 1024


@dataclass(slots=True, kw_only=True, eq=False)
class Release:
    """One frame and the messages in it."""

    frame: MessageFrame
    messages: list[Pending]
    is_overdue: bool
    #: When the first of them was due.
    first_due_ms: int


class ReleaseFrames:
    """Makes the frames of one broker's releases, in the thread that releases."""

    def __init__(self, schedule: Schedule, counts: DelayCounts) -> None:
        """`counts` are told what cannot be read."""
        self._schedule = schedule
        self._counts = counts

    def make(self, taken: list[Pending], is_overdue: bool) -> list[Release]:
        """Frames of these messages: one bucket each, bounded. What cannot be read is noted and left out."""
        releases: list[Release] = []
        by_bucket: dict[int, list[Pending]] = {}
        for message in taken:
            by_bucket.setdefault(message.bucket, []).append(message)
        for messages in by_bucket.values():
            for part in self._portions(messages):
                release = self._release(part, is_overdue)
                if release is not None:
                    releases.append(release)
        return releases

    def _portions(self, messages: list[Pending]) -> list[list[Pending]]:
        portions: list[list[Pending]] = [[]]
        room_bytes, subjects = RELEASE_BYTES_MAX, {0}
        for message in messages:
            subjects.add(message.subject)
            is_full = message.record_bytes > room_bytes or len(subjects) > SUBJECTS_PER_FRAME_MAX
            if portions[-1] and is_full:
                portions.append([])
                room_bytes, subjects = RELEASE_BYTES_MAX, {message.subject}
            portions[-1].append(message)
            room_bytes -= message.record_bytes
        return portions

    def _release(self, messages: list[Pending], is_overdue: bool) -> Release | None:
        """A frame of what can be read of these messages of one bucket; None for nothing."""
        bucket = messages[0].bucket
        by_subject: dict[int, list[Pending]] = {}
        for message in messages:
            by_subject.setdefault(message.subject, []).append(message)
        records: dict[str, list[bytes]] = {}
        in_order: list[Pending] = []
        for number, wanted in by_subject.items():
            subject = self._schedule.subjects.names[number]
            whole: list[bytes] = []
            found = self._schedule.records.read_all(bucket, subject, wanted)
            for message, record in zip(wanted, found, strict=True):
                if isinstance(record, CorruptionError):
                    self._note_damaged(message, record)
                else:
                    whole.append(record)
                    in_order.append(message)
            if whole:
                records[subject] = whole
        if not in_order:
            return None
        marks = Marks(
            buckets=(bucket,),
            sequences=[message.sequence for message in in_order],
            sources=[message.source for message in in_order],
        )
        frame = marked_frame(FrameKind.RELEASED, records, marks)
        return Release(
            frame=frame,
            messages=in_order,
            is_overdue=is_overdue,
            first_due_ms=messages[0].due_at_ms,
        )

    def _note_damaged(self, message: Pending, error: CorruptionError) -> None:
        named = None
        with suppress(CorruptionError):  # its bucket is damaged altogether
            named = self._schedule.message(message.bucket, message.sequence)
        self._counts.note_damaged(message.bucket, named)
        _log.error("delayed message not released: reason=%s", error)
