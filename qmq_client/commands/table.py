"""The broker's answers as lines for people: aligned columns, readable times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from qmq_client.wire.shown import printable

#: Printed for an empty listing; programs get an empty list.
NONE: Final = "none"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """A heading and a line for each row, or `none`. No cell can break out of its line."""
    if not rows:
        yield NONE
        return
    cells = [tuple(columns), *(tuple(printable(str(cell)) for cell in row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        padded = (f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True))
        yield "  ".join(padded).rstrip()


def time_text(time_ms: int) -> str:
    """A time in UTC; the plain number if no calendar has it."""
    try:
        return (_EPOCH + timedelta(milliseconds=time_ms)).isoformat(timespec="milliseconds")
    except OverflowError:
        return f"{time_ms} ms"
