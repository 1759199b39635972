"""Delayed messages as columns: the fields of each without its record.

A few dozen bytes per message instead of a few hundred for an object; millions may wait.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from threading import Lock
from typing import Final, NamedTuple

from qmq_client.wire.message_id import MESSAGE_ID_BYTES

#: In a `place`: the record is in the schedule log of its bucket, not in the commit log.
IN_SCHEDULE: Final = 1 << 63
#: Up to this many ids are searched one by one; for more, each message is looked up among them.
FEW_IDS: Final = 8


class DelayedMessage(NamedTuple):
    """One message of a schedule; bucket and sequence identify it, the source confirms it."""

    bucket: int
    sequence: int
    #: Commit log offset of the record in the schedule.
    source: int
    due_at_ms: int
    #: Where the record is: a commit log offset, or a position in its schedule log.
    place: int
    record_bytes: int
    subject: str
    message_id: bytes


class Subjects:
    """Subjects as small numbers, for columns. Only grows; a broker has a bounded number."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._adding = Lock()

    def number(self, subject: str) -> int:
        """The number of a subject."""
        found = self._numbers.get(subject)
        return self._add(subject) if found is None else found

    def _add(self, subject: str) -> int:
        # The writer and readers of the files may meet new subjects at once: each needs a number of its own.
        with self._adding:
            found = self._numbers.get(subject)
            if found is None:
                found = len(self.names)
                self.names.append(
                    subject
                )  # first, so that a thread that finds the number also finds the name
                self._numbers[subject] = found
            return found


@dataclass(slots=True, kw_only=True)
class Columns:
    """Messages of one bucket, or some of them, in order of arrival."""

    bucket: int
    sequences: array[int] = field(default_factory=lambda: array("Q"))
    sources: array[int] = field(default_factory=lambda: array("Q"))
    due_at_ms: array[int] = field(default_factory=lambda: array("Q"))
    places: array[int] = field(default_factory=lambda: array("Q"))
    record_bytes: array[int] = field(default_factory=lambda: array("I"))
    #: Numbers of `Subjects`.
    subjects: array[int] = field(default_factory=lambda: array("I"))
    message_ids: bytearray = field(default_factory=bytearray)

    def __len__(self) -> int:
        return len(self.sequences)

    def message(self, index: int, subjects: Subjects) -> DelayedMessage:
        """One message as a value."""
        return DelayedMessage(
            bucket=self.bucket,
            sequence=self.sequences[index],
            source=self.sources[index],
            due_at_ms=self.due_at_ms[index],
            place=self.places[index],
            record_bytes=self.record_bytes[index],
            subject=subjects.names[self.subjects[index]],
            message_id=self.message_id(index),
        )

    def message_id(self, index: int) -> bytes:
        """The id of one message."""
        first = index * MESSAGE_ID_BYTES
        return bytes(self.message_ids[first : first + MESSAGE_ID_BYTES])

    def find_id(self, message_id: bytes) -> list[int]:
        """The indexes of the messages with this id."""
        found = []
        position = self.message_ids.find(message_id)
        while position >= 0:
            if position % MESSAGE_ID_BYTES == 0:
                found.append(position // MESSAGE_ID_BYTES)
            position = self.message_ids.find(message_id, position + 1)
        return found

    def find_ids(self, message_ids: Collection[bytes]) -> Iterator[tuple[bytes, int]]:
        """The ids of `message_ids` that are here, with their indexes. Requires: `message_ids` has
        fast membership tests.
        """
        if len(message_ids) <= FEW_IDS:
            for message_id in message_ids:
                for index in self.find_id(message_id):
                    yield message_id, index
            return
        here = bytes(self.message_ids)
        for index in range(len(self)):
            message_id = here[index * MESSAGE_ID_BYTES : (index + 1) * MESSAGE_ID_BYTES]
            if message_id in message_ids:
                yield message_id, index

    def find_source(self, source: int) -> int | None:
        """The index of the message with this source.

        Requires: the columns are ordered by source.
        """
        index = bisect_left(self.sources, source)
        is_there = index < len(self) and self.sources[index] == source
        return index if is_there else None

    def part(self, first: int, after: int) -> Columns:
        """A copy of some of the messages."""
        return Columns(
            bucket=self.bucket,
            sequences=self.sequences[first:after],
            sources=self.sources[first:after],
            due_at_ms=self.due_at_ms[first:after],
            places=self.places[first:after],
            record_bytes=self.record_bytes[first:after],
            subjects=self.subjects[first:after],
            message_ids=self.message_ids[first * MESSAGE_ID_BYTES : after * MESSAGE_ID_BYTES],
        )

    def add(self, other: Columns) -> None:
        """Append other messages."""
        self.sequences += other.sequences
        self.sources += other.sources
        self.due_at_ms += other.due_at_ms
        self.places += other.places
        self.record_bytes += other.record_bytes
        self.subjects += other.subjects
        self.message_ids += other.message_ids


def picker(indexes: Sequence[int]) -> Callable[[array[int]], array[int]]:
    """A function that picks these indexes, in this order, from any column."""
    if len(indexes) > 1:  # an itemgetter picks all in one step, but returns a single one unwrapped
        pick = itemgetter(*indexes)
        return lambda column: array(column.typecode, pick(column))
    return lambda column: array(column.typecode, [column[index] for index in indexes])
