"""The pages of faults and of hostile callers name tests for each row, and each of these tests is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    name: (ROOT / "docs" / name).read_text(encoding="utf-8")
    for name in ("faults.md", "hostile-callers.md")
}
FAULTS = [f"F{number}" for number in range(1, 42)]
ATTACKS = [f"X-{number}" for number in range(1, 31)]


def named_tests(row: str) -> list[tuple[str, str]]:
    """Name and path of each test of a row."""
    return re.findall(r"\[`(test_\w+)`\]\(\.\./(\S+?)\)", row)


def rows(page: str) -> dict[str, str]:
    found = re.findall(r"^\| (?:F|X-)\d+ .*", page, re.MULTILINE)
    return {row.split("|")[1].strip(): row for row in found}


def missing(page: str) -> list[str]:
    """Faults without a test, and tests that are not there."""
    found = [fault for fault, row in rows(page).items() if not named_tests(row)]
    for row in rows(page).values():
        for name, path in named_tests(row):
            file = ROOT / path
            if not file.is_file() or f"def {name}(" not in file.read_text(encoding="utf-8"):
                found.append(f"{path}: {name}")
    return found


def test_every_fault_and_every_attack_has_a_row() -> None:
    assert list(rows(PAGES["faults.md"])) == FAULTS
    assert list(rows(PAGES["hostile-callers.md"])) == ATTACKS


def test_every_named_test_is_there() -> None:
    assert [one for page in PAGES.values() for one in missing(page)] == []


def test_a_planted_name_and_an_empty_row_are_found() -> None:
    page = "| F1 | a | b | [`test_nobody`](../tests/tidy/test_names.py) |\n| F2 | a | b | |\n"
    assert missing(page) == ["F2", "tests/tidy/test_names.py: test_nobody"]
