"""A promise is printed only when a test attacks it."""

from __future__ import annotations

import ast
import re

from tests.tidy.house import ROOT, Source, python, read

#: The ids at the head of a test's name: faults, experiments and promises.
TEST = re.compile(r"^test_((?:[A-Z]\d{1,2}_)+)")
OF_PROMISE = re.compile(r"[SOWBDCPX]\d{1,2}(?=_)")


def printed(page: str) -> set[str]:
    """Return the promise ids that have a row of their own on this page."""
    return set(re.findall(r"^\| ([SOWBDCPX]\d{1,2}) \|", page, re.MULTILINE))


def attacked(sources: list[Source]) -> set[str]:
    """Return the promise ids that test functions carry in their names."""
    ids: set[str] = set()
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for head in TEST.findall(node.name):
                    ids.update(OF_PROMISE.findall(head))
    return ids


def test_every_promise_has_a_test() -> None:
    tests = [source for source in python() if source.path.startswith("tests/")]
    promises = printed(read(ROOT / "docs" / "guarantees.md").text)
    assert len(promises) > 50
    assert sorted(promises - attacked(tests)) == []


def test_a_planted_promise_without_a_test_is_found() -> None:
    page = "## Broker\n\n| Id | Promise |\n|---|---|\n| B1 | durable, see B2 |\n| O13 | seen |\n"
    assert printed(page) == {"B1", "O13"}
    tests = Source(
        path="tests/a.py", text="class T:\n    def test_B1_durable(self): pass\n# test_B2_x"
    )
    assert attacked([tests]) == {"B1"}
