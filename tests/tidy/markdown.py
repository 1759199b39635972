"""Reads the few things of a Markdown page that tests need: links, headings, fenced blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})\s*([\w+-]*)")
LINK = re.compile(r"\[[^\]]*\]\(<?([^)\s>]+)>?[^)]*\)")
DEFINITION = re.compile(r"^\[[^\]]+\]:\s+(\S+)")
MARK = re.compile(r"^<!--\s*runs with:\s*([\w-]+)\s*-->$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block of a page."""

    #: Number of the line with the opening fence, from 1.
    line: int
    language: str
    text: str
    #: What the comment before the fence says the block runs with, such as `broker`.
    runs_with: str | None


def blocks(page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page in order."""
    lines = page.splitlines()
    number = 0
    while number < len(lines):
        start = number
        number += 1
        if not (fence := FENCE.match(lines[start])):
            continue
        while number < len(lines) and lines[number].strip() != fence[1]:
            number += 1
        mark = MARK.match(lines[start - 1].strip()) if start else None
        yield Block(
            line=start + 1,
            language=fence[2],
            text="\n".join(lines[start + 1 : number]) + "\n",
            runs_with=mark[1] if mark else None,
        )
        number += 1


def prose(page: str) -> str:
    """Return the page without its fenced blocks and without inline code."""
    inside = {
        number
        for block in blocks(page)
        for number in range(block.line - 1, block.line + block.text.count("\n") + 1)
    }
    lines = [line for number, line in enumerate(page.splitlines()) if number not in inside]
    return re.sub(r"`[^`\n]*`", "`code`", "\n".join(lines))


def links(page: str) -> list[str]:
    """Return the targets of all links outside code."""
    text = prose(page)
    definitions = [found[1] for line in text.splitlines() if (found := DEFINITION.match(line))]
    return LINK.findall(text) + definitions


def anchors(page: str) -> set[str]:
    """Return the names under which the headings of a page are linked."""
    names: set[str] = set()
    for line in page.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("#").strip().lower()
            names.add(re.sub(r"[^\w\- ]", "", heading).replace(" ", "-"))
    return names
