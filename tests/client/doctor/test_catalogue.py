"""Catalogue, documentation and tests name the same checks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sqlalchemy.orm import sessionmaker

from qmq_client.doctor import CHECKS
from tests.client.doctor.ward import sound_sqlite
from tests.tidy.house import ROOT

PAGE = ROOT / "docs" / "doctor.md"
HERE = Path(__file__).parent
NAMES = {"mysql": "MySQL, MariaDB", "postgresql": "PostgreSQL", "sqlite": "SQLite"}


def documented() -> list[tuple[str, ...]]:
    """The rows of the page's table of checks."""
    lines = PAGE.read_text().splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("| `")]
    return [tuple(cell.strip() for cell in row) for row in rows]


def test_X1_the_page_shows_the_catalogue() -> None:
    expected = [
        (
            f"`{check.id}`",
            check.severity.value,
            check.promise,
            ", ".join(NAMES.get(where, where) for where in check.where),
            check.meaning,
        )
        for check in CHECKS
    ]
    assert documented() == expected


def test_the_program_of_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = sound_sqlite(tmp_path / "shop.db")
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    program = program.replace("127.0.0.1:9470", "127.0.0.1:1")  # nobody, on any machine
    exec(program, {"engine": engine, "Session": sessionmaker(engine)})
    printed = [line.split()[2] for line in capsys.readouterr().out.splitlines()]
    assert printed == ["sqlite.explicit_begin", "broker.unreachable"]


def test_X1_every_check_is_planted_by_a_test() -> None:
    tests = "".join(
        path.read_text() for path in HERE.glob("test_*.py") if path.name != Path(__file__).name
    )
    assert [check.id for check in CHECKS if f'"{check.id}"' not in tests] == []


def test_ids_are_there_once() -> None:
    assert len({check.id for check in CHECKS}) == len(CHECKS)
