"""RELEASED frames: due, readable messages with the marks that identify them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from qmq_broker.errors import CorruptionError
from qmq_broker.service.delay.counts import DelayCounts
from qmq_broker.service.delay.damage import Damage
from qmq_broker.service.delay.rows import Rows
from qmq_broker.storage.schedule.schedule import Schedule, marked_frame
from qmq_client.wire.frame import FrameKind, MessageFrame
from qmq_client.wire.limits import SUBJECTS_PER_FRAME_MAX
from qmq_client.wire.marks import Marks
from qmq_client.wire.message_id import format_message_id


@dataclass(slots=True, kw_only=True, eq=False)
class Release:
    """One frame and the messages in it."""

    frame: MessageFrame
    #: In the order of their records.
    messages: Rows
    is_overdue: bool


class ReleaseFrames:
    """Makes the release frames of one broker, in the thread that releases."""

    def __init__(self, schedule: Schedule, counts: DelayCounts, damage: Damage) -> None:
        """`counts` and `damage` are told what cannot be read."""
        self._schedule = schedule
        self._counts = counts
        self._damage = damage

    def make(self, taken: Rows, is_overdue: bool) -> list[Release]:
        """Frames of these messages: of one bucket each, and of as many subjects as fit.

        Unreadable messages are recorded and left out. Requires: together they fit a frame.
        """
        releases: list[Release] = []
        for indexes in _indexes_by(taken.buckets).values():
            messages = taken if len(indexes) == len(taken) else taken.picked(indexes)
            for part in _portions(messages):
                release = self._release(part, is_overdue)
                if release is not None:
                    releases.append(release)
        return releases

    def _release(self, messages: Rows, is_overdue: bool) -> Release | None:
        """A frame of the readable ones of these messages of one bucket; None if there are none."""
        bucket = messages.buckets[0]
        records: dict[str, list[bytes]] = {}
        order: list[int] = []
        for number, indexes in _indexes_by(messages.subjects).items():
            subject = self._schedule.subjects.names[number]
            found = self._schedule.records.read_all(bucket, subject, messages, indexes)
            whole: list[bytes] = []
            for index in indexes:
                record = found[index]
                if isinstance(record, CorruptionError):
                    self._note_damaged(bucket, messages.sequences[index], record)
                else:
                    whole.append(record)
                    order.append(index)
            if whole:
                records[subject] = whole
        if not order:
            return None
        in_order = messages if order == list(range(len(messages))) else messages.picked(order)
        marks = Marks(buckets=(bucket,), sequences=in_order.sequences, sources=in_order.sources)
        frame = marked_frame(FrameKind.RELEASED, records, marks)
        return Release(frame=frame, messages=in_order, is_overdue=is_overdue)

    def _note_damaged(self, bucket: int, sequence: int, error: CorruptionError) -> None:
        named = None
        with suppress(CorruptionError):  # its bucket is damaged altogether
            named = self._schedule.message(bucket, sequence)
        self._counts.note_damaged(bucket, named)
        name = "unknown" if named is None else format_message_id(named.message_id)
        self._damage.hold_message(bucket, name, error)


def _indexes_by(column: Sequence[int]) -> dict[int, Sequence[int]]:
    """Which indexes have which value of a column; mostly all have the same."""
    if column.count(column[0]) == len(column):
        return {column[0]: range(len(column))}
    indexes: dict[int, list[int]] = {}
    for index, value in enumerate(column):
        indexes.setdefault(value, []).append(index)
    return dict(indexes)


def _portions(messages: Rows) -> Iterator[Rows]:
    """These messages in parts whose subjects fit a frame; mostly one."""
    first = 0
    subjects: set[int] = set()
    for index, subject in enumerate(messages.subjects):
        subjects.add(subject)
        if len(subjects) > SUBJECTS_PER_FRAME_MAX:
            yield messages.part(first, index)
            first, subjects = index, {subject}
    yield messages.part(first, len(messages))
