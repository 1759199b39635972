"""Formats the broker's answers for people, with aligned columns and readable times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from qmq_client.wire.shown import printable

#: The text for an empty listing; with `--json` a command prints an empty list instead.
NONE: Final = "none"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """A heading and one line for each row, or `none`. Control characters in a cell are escaped."""
    if not rows:
        yield NONE
        return
    cells = [tuple(columns), *(tuple(printable(str(cell)) for cell in row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        padded = (f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True))
        yield "  ".join(padded).rstrip()


def time_text(time_ms: int) -> str:
    """A time in UTC; the plain number if a `datetime` cannot hold it."""
    try:
        return (_EPOCH + timedelta(milliseconds=time_ms)).isoformat(timespec="milliseconds")
    except OverflowError:
        return f"{time_ms} ms"
