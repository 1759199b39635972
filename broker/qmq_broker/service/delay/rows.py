"""Delayed messages that wait in memory, as sorted columns: 48 bytes each."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import compress, count, islice
from operator import eq
from typing import Final, NamedTuple

from qmq_broker.storage.schedule.columns import Columns, picker

_HIGHEST: Final = 1 << 64
#: Column types: due time, bucket, sequence, source, place; record length, number of the subject.
_CODES: Final = "QQQQQII"


class Key(NamedTuple):
    """A place in the order of release."""

    due_at_ms: int
    bucket: int
    sequence: int


class Pending(NamedTuple):
    """One message that waits for its time, in the order of `Key`."""

    due_at_ms: int
    bucket: int
    sequence: int
    source: int
    place: int
    record_bytes: int
    #: Number of its subject.
    subject: int


def end_of(due_at_ms: int) -> Key:
    """The place after all messages due at that time."""
    return Key(due_at_ms, _HIGHEST, _HIGHEST)


class Rows:
    """Messages as columns in the order of the fields of `Pending`: 48 bytes each."""

    __slots__ = ("columns",)

    def __init__(self, messages: Sequence[Pending] = ()) -> None:
        values: Iterable[Iterable[int]] = zip(*messages, strict=True) if messages else [()] * 7
        self.columns = [array(code, each) for code, each in zip(_CODES, values, strict=True)]

    def __len__(self) -> int:
        return len(self.columns[0])

    @property
    def due_at_ms(self) -> array[int]:
        """The due time of each."""
        return self.columns[0]

    @property
    def buckets(self) -> array[int]:
        """The bucket of each."""
        return self.columns[1]

    @property
    def sequences(self) -> array[int]:
        """The sequence of each within its bucket."""
        return self.columns[2]

    @property
    def sources(self) -> array[int]:
        """The commit log offset of each record in the schedule."""
        return self.columns[3]

    @property
    def places(self) -> array[int]:
        """The place of each record, as in `DelayedMessage`."""
        return self.columns[4]

    @property
    def record_bytes(self) -> array[int]:
        """The length of each record."""
        return self.columns[5]

    @property
    def subjects(self) -> array[int]:
        """The subject of each, as a number."""
        return self.columns[6]

    def key(self, index: int) -> Key:
        """The place of one message in the order of release."""
        due_at_ms, bucket, sequence, *_ = self.columns
        return Key(due_at_ms[index], bucket[index], sequence[index])

    def add(self, other: Rows) -> None:
        """Append other rows."""
        for column, more in zip(self.columns, other.columns, strict=True):
            column.extend(more)

    def extend(self, columns: Columns, indexes: Sequence[int]) -> None:
        """Append some messages of a bucket."""
        sources: tuple[array[int] | None, ...] = (
            columns.due_at_ms,
            None,
            columns.sequences,
            columns.sources,
            columns.places,
            columns.record_bytes,
            columns.subjects,
        )
        is_all = len(indexes) == len(columns)
        pick = picker(indexes)
        for column, source in zip(self.columns, sources, strict=True):
            if source is None:
                column.extend(array(column.typecode, [columns.bucket]) * len(indexes))
            else:
                column.extend(source if is_all else pick(source))

    def sort(self) -> None:
        """Sort into the order of release."""
        first_ms = min(self.due_at_ms, default=0)
        # Small numbers sort faster. Messages of one time are mostly in order already and stay so.
        after_ms = [due_ms - first_ms for due_ms in self.due_at_ms]
        self._put_in_order(sorted(range(len(self)), key=after_ms.__getitem__))
        due_at_ms = self.due_at_ms
        ties = compress(count(), map(eq, due_at_ms, islice(due_at_ms, 1, None)))
        if any(self.key(index) > self.key(index + 1) for index in ties):
            self._put_in_order(sorted(range(len(self)), key=self.key))

    def part(self, first: int, after: int) -> Rows:
        """A copy of a range."""
        rows = Rows()
        rows.columns = [column[first:after] for column in self.columns]
        return rows

    def _put_in_order(self, order: Sequence[int]) -> None:
        self.columns = self.picked(order).columns

    def due_until(self, until_ms: int) -> Rows:
        """A copy of the messages due by then, in the same order."""
        is_due = list(map(until_ms.__ge__, self.due_at_ms))
        rows = Rows()
        rows.columns = [array(column.typecode, compress(column, is_due)) for column in self.columns]
        return rows

    def picked(self, indexes: Sequence[int]) -> Rows:
        """The rows with these indexes, in this order."""
        rows = Rows()
        rows.columns = list(map(picker(indexes), self.columns))
        return rows
