"""Divides the time of the charts into equal parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

#: Possible lengths of a bucket, in seconds.
_BUCKETS_S: Final = (
    1,
    5,
    15,
    60,
    300,
    900,
    3_600,
    10_800,
    21_600,
    86_400,
    604_800,
    2_592_000,
    31_536_000,
)
_BUCKETS_MAX: Final = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """A number of equal parts from a first time on."""

    first_s: int
    length_s: int
    count: int

    @property
    def times(self) -> tuple[datetime, ...]:
        """The beginning of each bucket."""
        first = datetime.fromtimestamp(self.first_s, UTC)
        return tuple(first + timedelta(seconds=i * self.length_s) for i in range(self.count))

    def sql(self, column: str) -> str:
        """SQL for the number of the bucket that a time is in."""
        seconds = f"unix_seconds({column}) - {self.first_s}"
        return f"CAST(floor(({seconds}) / {self.length_s}) AS INT)"

    def spread(
        self, rows: Iterable[Any], column: str, *, nothing: float | None = None
    ) -> tuple[float | None, ...]:
        """A column of rows that have a `bucket`, as one value per bucket; `nothing` for buckets without a row."""
        values: list[float | None] = [nothing] * self.count
        for row in rows:
            if 0 <= row["bucket"] < self.count and row[column] is not None:
                values[row["bucket"]] = float(row[column])
        return tuple(values)


def buckets_of(first: datetime | None, last: datetime | None, *, least_s: int = 60) -> Buckets:
    """The smallest number of buckets with enough detail, of a common length."""
    if first is None or last is None:
        return Buckets(first_s=0, length_s=least_s, count=1)
    first_s, last_s = int(first.timestamp()), int(last.timestamp())
    for length_s in (one for one in _BUCKETS_S if one >= least_s):
        begin_s = first_s - first_s % length_s
        count = (last_s - begin_s) // length_s + 1
        if count <= _BUCKETS_MAX:
            return Buckets(first_s=begin_s, length_s=length_s, count=count)
    return Buckets(first_s=begin_s, length_s=length_s, count=_BUCKETS_MAX)


def held(values: Sequence[float | None]) -> tuple[float | None, ...]:
    """A level that stays until it changes."""
    levels: list[float | None] = []
    for value in values:
        levels.append(value if value is not None else (levels[-1] if levels else None))
    return tuple(levels)


def length_text(bucket_s: int) -> str:
    """A length of time in words."""
    units = ((86_400, "day"), (3_600, "hour"), (60, "minute"), (1, "second"))
    unit_s, name = next(one for one in units if bucket_s % one[0] == 0)
    count = bucket_s // unit_s
    return name if count == 1 else f"{count} {name}s"
