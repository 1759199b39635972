"""Pages are no wider than a screen: text in lines that a diff shows whole, code without a scroll bar."""

from __future__ import annotations

from tests.tidy.house import Source, pages
from tests.tidy.markdown import blocks

#: What GitHub and a terminal of ordinary width show without a scroll bar.
BLOCK_COLUMNS_MAX = 115
#: Tables and headings are one line each, and a link has no space to break at.
TEXT_COLUMNS_MAX = 120
#: Before a block of bytes that a program wrote: they have no line breaks to give.
WRITTEN = "<!-- text:"


def wide_lines(page: Source) -> list[str]:
    lines = page.text.splitlines()
    return [
        f"{page.path}:{number}: {len(line)} columns"
        for block in blocks(page.text)
        if not any(line.startswith(WRITTEN) for line in lines[max(0, block.line - 3) : block.line])
        for number, line in enumerate(block.text.splitlines(), block.line + 1)
        if len(line) > BLOCK_COLUMNS_MAX
    ]


def long_lines(page: Source) -> list[str]:
    return [
        f"{page.path}:{number}: {len(line)} columns"
        for number, line in enumerate(page.text.splitlines(), 1)
        if len(line) > TEXT_COLUMNS_MAX
        and not line.startswith(("|", "#"))
        and " " in line.strip()[:TEXT_COLUMNS_MAX]
    ]


def test_no_text_is_wider_than_a_page() -> None:
    assert [fault for page in pages() for fault in long_lines(page)] == []


def test_no_block_is_wider_than_a_page() -> None:
    assert [fault for page in pages() for fault in wide_lines(page)] == []


def test_a_planted_wide_line_is_found() -> None:
    wide, fits = "x" * (BLOCK_COLUMNS_MAX + 1), "x" * BLOCK_COLUMNS_MAX
    text = f"{wide}\n\n```\n{fits}\n{wide}\n```\n\n{WRITTEN} format_file -->\n\n```\n{wide}\n```\n"
    page = Source(path="docs/page.md", text=text)
    assert wide_lines(page) == [f"docs/page.md:5: {len(wide)} columns"]
    assert long_lines(Source(path="a.md", text="x " * 60 + "yz")) == ["a.md:1: 122 columns"]
    assert long_lines(Source(path="a.md", text="| x " * 60)) == []
