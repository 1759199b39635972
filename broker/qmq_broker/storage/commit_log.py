"""The commit log: all messages of all subjects in arrival order, in the frames in which they were sent.

A thin layer over `SegmentedLog`. It assigns sequences, leaves out repeats and makes the entries of
the consume queues; `reading.py` reads records back. No record is decoded: apart from copying two
columns and looking up the ids, the work for a frame is per subject.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.ids.repeats import RepeatFinder, StoredFrame, Verdict, Withdrawn
from qmq_broker.storage.ids.runs import is_remembered, runs_of_each
from qmq_broker.storage.ids.window import DedupeWindow
from qmq_broker.storage.logs.kinds import QUEUED_KINDS, SENT_KINDS, SETTLING_KINDS
from qmq_broker.storage.logs.segmented_log import SegmentedLog
from qmq_broker.storage.queues.consume_queues import ConsumeQueues
from qmq_broker.storage.reading import RecordReader
from qmq_broker.storage.schedule.cancelled import (
    NOTHING_WITHDRAWN,
    Cancelled,
    WithdrawnIds,
    cancelled_frame,
)
from qmq_broker.storage.schedule.schedule import Mark, Schedule
from qmq_broker.storage.schedule.states import DelayedState
from qmq_broker.storage.staging import stage_frame, stored_frame
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import (
    FRAME_HEADER_BYTES,
    FrameKind,
    MessageFrame,
    read_header,
)
from qmq_client.wire.requests import SubjectPlace


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one frame of an append; its sender gets the answer after the next sync."""

    physical_offset: int
    stored_at_ms: int
    #: Records that were already stored; they are not stored again.
    duplicates: int
    #: The places of the records, in the order of the request.
    places: tuple[SubjectPlace, ...]
    #: Id of a record that was already stored with other content: then nothing of the frame is
    #: stored.
    conflict: bytes | None = None


class CommitLog:
    """Messages on disk.

    `append` and `cancel` belong to the writer thread; reads may come from any thread.
    """

    def __init__(
        self,
        log: SegmentedLog,
        queues: ConsumeQueues,
        window: DedupeWindow,
        schedule: Schedule,
    ) -> None:
        self.log = log
        self.reader = RecordReader(log)
        self._queues = queues
        self._window = window
        self._schedule = schedule

    def append(self, frames: Sequence[MessageFrame]) -> list[Placed]:
        """Write the new messages of these frames; neither durable nor visible on return.

        Raises `NoRoomError` with nothing written, or `PoisonedError`.
        """
        verdicts = self._judge(frames)
        stored = [verdict.stored for verdict in verdicts if verdict.stored is not None]
        self._give_sequences(stored)
        drafts = [(one.frame.data, one.first_sequences) for one in stored]
        for one, offset in zip(stored, self.log.append(drafts), strict=True):
            one.physical_offset = offset
            one.stored_at_ms = self.log.last_stored_at_ms
            kind = one.frame.header.kind
            if kind in QUEUED_KINDS:
                stage_frame(self._queues, one)
            if kind is not FrameKind.MESSAGES:
                self._schedule.stage(one.frame, offset, one.stored_at_ms)
            if one.ids:
                self._window.add(one.ids, offset=offset, stored_at_ms=one.stored_at_ms)
        return [_placed(verdict) for verdict in verdicts]

    def cancel(
        self, wanted: Sequence[Cancelled], withdrawn: WithdrawnIds = NOTHING_WITHDRAWN
    ) -> list[DelayedState | None]:
        """Write cancellations for the pending messages of `wanted`; not durable on return.

        Returns the state of each: `CANCELLED` if it is cancelled now or was before, another state if
        it is too late, None if the message is unknown. Messages with the ids `withdrawn`, by
        subject, count as stored from now on.
        """
        marks = [Mark(one.bucket, one.sequence, one.source) for one in wanted]
        before = [self._schedule.state(mark) for mark in marks]
        new = {
            mark: one
            for mark, one, state in zip(marks, wanted, before, strict=True)
            if state is DelayedState.PENDING
        }
        unknown = {
            subject: left
            for subject, ids in withdrawn.items()
            if (left := [one for one in dict.fromkeys(ids) if not self._knows(subject, one)])
        }
        if new or unknown:
            frame = cancelled_frame(list(new.values()), unknown)
            (offset,) = self.log.append([(frame, ())])
            self._schedule.stage_cancelled(new.values())
            if unknown:
                at_ms = self.log.last_stored_at_ms
                self._window.add(runs_of_each(unknown), offset=offset, stored_at_ms=at_ms)
        return [
            DelayedState.CANCELLED if state is DelayedState.PENDING else state for state in before
        ]

    def note_time(self) -> None:
        """Write a frame that carries only its time; not durable on return."""
        self.log.append([(cancelled_frame([]), ())])

    def _judge(self, frames: Sequence[MessageFrame]) -> list[Verdict]:
        """Decide what to store of each frame: no repeats, and no second state for a delayed message."""
        finder = RepeatFinder(self._window, self._read_frame)
        taken: dict[int, set[int]] = {}
        verdicts = []
        for frame in frames:
            if is_remembered(frame.header, frame.data):
                verdicts.append(finder.judge(frame))
            elif frame.header.kind in SENT_KINDS:
                verdicts.append(Verdict(stored=StoredFrame(frame=frame, ids={})))
            elif frame.header.kind in SETTLING_KINDS:
                left = self._schedule.unsettled(frame, taken)
                stored = None if left is None else StoredFrame(frame=left, ids={})
                verdicts.append(Verdict(stored=stored))
            else:
                raise ValueError(f"a frame of kind {frame.header.kind.name} is not for this log")
        return verdicts

    def _give_sequences(self, stored: Sequence[StoredFrame]) -> None:
        next_sequences: dict[str, int] = {}
        for one in stored:
            if one.frame.header.kind not in QUEUED_KINDS:
                one.first_sequences = (0,) * len(one.frame.runs)
                continue
            first_sequences = []
            for run in one.frame.runs:
                first = next_sequences.get(run.subject)
                if first is None:
                    first = self._queues.staged_sequence(run.subject)
                first_sequences.append(first)
                next_sequences[run.subject] = first + run.count
            one.first_sequences = tuple(first_sequences)

    def _knows(self, subject: str, message_id: bytes) -> bool:
        """Whether a message with this id would not be stored again under this subject."""
        wanted = runs_of_each({subject: [message_id]})
        return self._window.is_empty_for_good or bool(self._window.find(wanted))

    def _read_frame(self, offset: int) -> StoredFrame | Withdrawn:
        """Read a stored frame, to compare a repeat with it."""
        try:
            header = read_header(self.log.read(offset, FRAME_HEADER_BYTES))
            if header.kind is FrameKind.CANCELLED:
                return Withdrawn()
            return stored_frame(offset, self.log.read(offset, header.frame_bytes))
        except ProtocolError as error:
            raise CorruptionError(
                segment=self.log.path(offset), offset=offset, reason=str(error)
            ) from error


def _placed(verdict: Verdict) -> Placed:
    stored = verdict.stored
    if stored is None and verdict.origins:
        stored = verdict.origins[0][0]
    return Placed(
        physical_offset=stored.physical_offset if stored is not None else 0,
        stored_at_ms=stored.stored_at_ms if stored is not None else 0,
        duplicates=verdict.repeats,
        places=verdict.places(),
        conflict=verdict.conflict,
    )
