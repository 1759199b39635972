"""What a broker says, as lines for people: columns under each other, times as they are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

#: What a listing for people says when there is nothing to list; for programs the list is empty.
NONE: Final = "none"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """A heading and a line for each row, `none` without rows. Whatever is in it stays in it."""
    if not rows:
        yield NONE
        return
    cells = [tuple(columns), *(tuple(printable(str(cell)) for cell in row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        padded = (f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True))
        yield "  ".join(padded).rstrip()


def printable(text: str) -> str:
    """The text on one line, with what a terminal would obey written as Python writes it."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def time_text(time_ms: int) -> str:
    """A time in UTC; the number itself when no calendar has it."""
    try:
        return (_EPOCH + timedelta(milliseconds=time_ms)).isoformat(timespec="milliseconds")
    except OverflowError:
        return f"{time_ms} ms"
