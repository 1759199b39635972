"""Reads the marked tables and JSON of the format pages, to be compared with the code.

A comment before a table or block says what it is: `<!-- fields: record -->` a table of offset, bytes
and field; `<!-- example: record_full -->` the bytes of a golden file; `<!-- json: … -->` a value.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any, Final

PAGES: Final = Path(__file__).resolve().parents[2] / "docs" / "format"
_MARK: Final = re.compile(r"^<!-- ([a-z]+)(?:: (.+))? -->$")
#: One row of a byte box in a module's docstring: offset, bytes, field.
_BOX_ROW: Final = re.compile(r"^\s+(\d+)\s+(\d+)\s{2,}(\S.*)$")


def read_page(name: str) -> str:
    """The text of one format page."""
    return (PAGES / name).read_text(encoding="utf-8")


def marks(page: str, kind: str) -> dict[str, list[str]]:
    """Name → lines of each table or block that is marked as `kind`."""
    lines = read_page(page).splitlines()
    found: dict[str, list[str]] = {}
    for number, line in enumerate(lines):
        mark = _MARK.match(line)
        if mark is not None and mark[1] == kind:
            rest = lines[number + 1 :]
            first = next(place for place, text in enumerate(rest) if text)
            after = next(
                (place for place, text in enumerate(rest[first:], first) if not text), len(rest)
            )
            if rest[first].startswith("```"):
                after = rest.index("```", first + 1)
                first += 1
            found[mark[2] or ""] = rest[first:after]
    return found


def rows(table: list[str]) -> list[list[str]]:
    """The cells of a table's rows, without its head."""
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table]
    assert re.fullmatch(r":?-+:?", cells[1][0]), "a table begins with a head and a rule"
    return cells[2:]


def fields(page: str, name: str) -> list[tuple[int, int]]:
    """Offset and bytes of each row of a table of fields."""
    return [(int(row[0]), int(row[1])) for row in rows(marks(page, "fields")[name])]


def packed(*formats: str) -> list[tuple[int, int]]:
    """Offset and bytes of each field of structs that follow each other."""
    places: list[tuple[int, int]] = []
    offset = 0
    for text in formats:
        assert text[0] == ">"
        for count, code in re.findall(r"(\d*)([a-zA-Z])", text):
            single = code in "sx" or not count
            for _ in range(1 if single else int(count)):
                width = struct.calcsize(f">{count}{code}" if single else f">{code}")
                places.append((offset, width))
                offset += width
    return places


def box(docstring: str | None) -> list[tuple[int, int]]:
    """Offset and bytes of each row of the byte box in a module's docstring."""
    found = [_BOX_ROW.match(line) for line in (docstring or "").splitlines()]
    return [(int(row[1]), int(row[2])) for row in found if row is not None]


def check_array(page: str, name: str, kind: Any) -> None:
    """The table of an array on a page has the fields of the struct, in their order."""
    table = rows(marks(page, "array")[name])
    assert [row[1].strip("`") for row in table] == list(kind.__struct_fields__)
    assert [int(row[0]) for row in table] == list(range(len(table)))
    assert kind.__struct_config__.array_like


def check_example(page: str, name: str, data: bytes) -> None:
    """The rows of a worked example say what stands in these bytes, from the first to the last."""
    next_offset = 0
    for offset, width, text, *_ in rows(marks(page, "example")[name]):
        first, after = int(offset), int(offset) + int(width)
        assert first == next_offset, f"{page}: {name} has a gap before {offset}"
        shown = text.strip("`")
        actual = data[first:after].hex()
        assert len(actual) == 2 * int(width), f"{page}: {name} at {offset} is over the end"
        if shown.endswith("…"):
            assert actual.startswith(shown[:-1]), f"{page}: {name} at {offset}"
        else:
            assert actual == shown, f"{page}: {name} at {offset}"
        next_offset = after
    assert next_offset == len(data), f"{page}: {name} ends at {next_offset} of {len(data)}"
