"""The main job end to end on MariaDB and PostgreSQL: the same crashes, the same judge."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.flights.options import KINDS
from examples.flights.plan import FAULTS
from tests.conftest import give_up
from tests.services.databases import Databases
from tests.services.ladder import ServiceMissingError

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("database", ["mariadb", "postgresql"])
def test_nothing_is_lost_no_ghost_is_sent_and_no_effect_is_doubled(
    database: str, databases: Databases, tmp_path: Path
) -> None:
    try:
        databases.service(KINDS[database])
    except ServiceMissingError as error:
        give_up(str(error), os.environ)
    figures = run_demo(database, tmp_path / "figures.json")
    assert figures["ok"]
    assert (figures["lost"], figures["ghosts"], figures["effects_doubled"]) == (0, 0, 0)
    assert figures["tally_differences"] == 0
    assert figures["stored"] == figures["sent"] == sum(figures["expected"]["messages"].values())
    assert [fault["fault"] for fault in figures["faults"]] == [fault.kind for fault in FAULTS]
    assert figures["recovered_by_watchdog"] > 0
    assert "SQLite" not in figures["database"]


def run_demo(database: str, file: Path) -> dict[str, Any]:
    """The figures of three days."""
    command = [sys.executable, "-m", "examples.flights", "--database", database]
    command += ["--month", "2", "--days", "3", "--json", str(file), "--no-spark"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    figures: dict[str, Any] = json.loads(file.read_text())
    return figures
