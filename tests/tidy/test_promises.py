"""A promise is printed in the README only when a test attacks it."""

from __future__ import annotations

import ast
import re

from tests.tidy.house import ROOT, Source, python, read

PROMISE = re.compile(r"\b[SOWBDCPX]\d{1,2}\b")
#: The ids at the head of a test's name: faults, experiments and promises.
TEST = re.compile(r"^test_((?:[A-Z]\d{1,2}_)+)")
OF_PROMISE = re.compile(r"[SOWBDCPX]\d{1,2}(?=_)")


def printed(page: str) -> set[str]:
    """Return the promise ids in the table under the heading about guarantees."""
    ids: set[str] = set()
    is_inside = False
    for line in page.splitlines():
        if line.startswith("#"):
            is_inside = "guarantee" in line.lower()
        elif is_inside and line.startswith("|"):
            ids.update(PROMISE.findall(line))
    return ids


def attacked(sources: list[Source]) -> set[str]:
    """Return the promise ids that test functions carry in their names."""
    ids: set[str] = set()
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for head in TEST.findall(node.name):
                    ids.update(OF_PROMISE.findall(head))
    return ids


def test_every_promise_of_the_readme_has_a_test() -> None:
    tests = [source for source in python() if source.path.startswith("tests/")]
    assert sorted(printed(read(ROOT / "README.md").text) - attacked(tests)) == []


def test_the_page_of_promises_has_those_of_the_readme_and_no_others() -> None:
    page = read(ROOT / "docs" / "guarantees.md").text
    explained = re.findall(r"^\| ([SOWBDCPX]\d{1,2}) \|", page, re.MULTILINE)
    assert sorted(explained) == sorted(printed(read(ROOT / "README.md").text))


def test_a_planted_promise_without_a_test_is_found() -> None:
    page = "## Guarantees\n\n| B1 | durable |\n| B2, O13 | seen |\n\n## Limits\n\n| D1 | x |\n"
    assert printed(page) == {"B1", "B2", "O13"}
    tests = Source(
        path="tests/a.py", text="class T:\n    def test_B1_durable(self): pass\n# test_B2_x"
    )
    assert attacked([tests]) == {"B1"}
