"""Every link from a page to a page leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

from tests.tidy.house import ROOT, Source, pages
from tests.tidy.markdown import anchors, links

OUTSIDE = re.compile(r"^[a-z][a-z0-9+.-]*:")


def dead_links(page: Source, root: Path) -> list[str]:
    faults = []
    for link in links(page.text):
        if OUTSIDE.match(link):
            continue
        path, _, anchor = link.partition("#")
        target = (root / page.path).parent / path if path else root / page.path
        is_dead = not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors(target.read_text("utf-8"))
        )
        if is_dead:
            faults.append(f"{page.path}: {link}")
    return faults


def test_every_relative_link_resolves() -> None:
    sources = pages()
    assert any(links(page.text) for page in sources)
    assert [fault for page in sources for fault in dead_links(page, ROOT)] == []


def test_planted_dead_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# The `house`, again\n")
    text = (
        "[a](../README.md#the-house-again) [b](missing.md) [c](../README.md#nowhere)\n"
        "[d](https://example.org/x) `[e](code.md)`\n```\n[f](fence.md)\n```\n[g]: gone.md\n"
    )
    (tmp_path / "docs" / "page.md").write_text(text)
    page = Source(path="docs/page.md", text=text)
    assert dead_links(page, tmp_path) == [
        "docs/page.md: missing.md",
        "docs/page.md: ../README.md#nowhere",
        "docs/page.md: gone.md",
    ]
