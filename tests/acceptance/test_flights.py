"""The main job end to end, on real input and through crashes; and that its judge would have seen."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from examples.flights.data import data_file
from examples.flights.database import open_databases
from examples.flights.expected import Expected, count_by_hand
from examples.flights.judge import judge
from examples.flights.plan import FAULTS, SUBJECTS, TALLIES, Plan
from tests.kit.verdict import Oracle

ROOT = Path(__file__).resolve().parents[2]
MONTH = 2
DAYS = 3

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run of a few days left behind."""
    folder = tmp_path_factory.mktemp("flights") / "run"
    figures = folder.parent / "figures.json"
    command = [sys.executable, "-m", "examples.flights"]
    command += ["--month", str(MONTH), "--days", str(DAYS)]
    command += ["--keep", str(folder), "--json", str(figures)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures.rename(folder / "figures.json")
    return folder


@pytest.fixture(scope="module")
def figures(folder: Path) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    return figures


@pytest.fixture(scope="module")
def expected() -> Expected:
    return count_by_hand(data_file(), frozenset({MONTH}), DAYS)


def test_a_demo_that_is_told_to_stop_leaves_no_process_behind(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "examples.flights", "--days", "3", "--no-spark"]
    demo = subprocess.Popen(
        [*command, "--keep", str(folder)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    assert demo.stderr is not None
    try:
        assert "departures" in demo.stderr.readline()
        assert alive(folder)
    finally:
        demo.terminate()
        demo.communicate(timeout=60)
    assert demo.returncode == 128 + signal.SIGTERM
    assert alive(folder) == []


def alive(folder: Path) -> list[str]:
    """Processes with this folder in their command line or environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            said = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
            if str(folder).encode() in said and process.name != str(os.getpid()):
                found.append(process.name)
    return found


def the_plan(folder: Path) -> Plan:
    with open_databases("sqlite", folder) as databases:
        return Plan(directory=str(folder), databases=databases, port=1, months=(MONTH,), days=DAYS)


def test_nothing_is_lost_no_ghost_is_sent_and_no_effect_is_doubled(figures: dict[str, Any]) -> None:
    assert figures["ok"]
    assert (figures["lost"], figures["ghosts"], figures["effects_doubled"]) == (0, 0, 0)
    assert figures["tally_differences"] == 0
    assert figures["stored"] == figures["sent"] == sum(figures["expected"]["messages"].values())
    assert figures["verdict"]["counts"]["faults"]


def test_P4_the_pipeline_finds_every_commit_of_the_run_stored_and_delivered(
    figures: dict[str, Any], folder: Path
) -> None:
    audit = figures["audit"]
    assert "flight.boarding_closes" in (folder / "report.html").read_text()
    assert audit["findings"] == dict.fromkeys(audit["findings"], 0)
    assert audit["committed"] == audit["stored"] == figures["sent"]
    assert audit["delivered"] == audit["settled"] == audit["expected"] == 2 * figures["sent"]


def test_D3_each_delayed_flight_closed_its_boarding_once(
    figures: dict[str, Any], expected: Expected
) -> None:
    delayed = figures["delayed"]
    assert delayed["counted"] == delayed["by_hand"] == expected.messages["boarding_closes"] > 0
    assert delayed["pending"] == 0


def test_every_planned_fault_happened(figures: dict[str, Any]) -> None:
    assert [fault["fault"] for fault in figures["faults"]] == [fault.kind for fault in FAULTS]


def test_flights_without_a_tail_number_and_arrivals_without_air_time_left_nothing(
    figures: dict[str, Any],
) -> None:
    counts = figures["verdict"]["counts"]
    assert figures["expected"]["rolled_back"] + figures["expected"]["savepoints_rolled_back"] > 0
    assert counts["rolled_back"] >= figures["expected"]["savepoints_rolled_back"]


def test_the_watchdog_brought_rows_back(figures: dict[str, Any]) -> None:
    assert figures["recovered_by_watchdog"] > 0


def test_the_judge_sees_a_changed_tally(folder: Path, expected: Expected) -> None:
    with altered(folder, "UPDATE tallies SET count = count + 1 WHERE rowid = 1"):
        judgement = judge(the_plan(folder), expected)
    assert len(judgement.differences) == 1
    assert not judgement.ok


def test_the_judge_sees_a_missing_and_a_doubled_effect(folder: Path, expected: Expected) -> None:
    double = (
        "UPDATE effects SET message_id = (SELECT message_id FROM effects WHERE id = 2) WHERE id = 1"
    )
    with altered(folder, double):
        judgement = judge(the_plan(folder), expected)
    assert judgement.verdict.totals[Oracle.EFFECT] == 2


def test_the_judge_sees_a_commit_that_did_not_stay(folder: Path, expected: Expected) -> None:
    database = folder / "departures.sqlite"
    before = database.read_bytes()
    change(database, "DELETE FROM board WHERE flight_index = (SELECT max(flight_index) FROM board)")
    try:
        judgement = judge(the_plan(folder), expected)
    finally:
        database.write_bytes(before)
    assert judgement.verdict.totals[Oracle.LOST] >= 1
    assert judgement.board[1] == judgement.board[0] - 1


class altered:  # noqa: N801  # reads as a sentence in `with`
    """The tallies database with one statement applied, put back afterwards."""

    def __init__(self, folder: Path, statement: str) -> None:
        self._database = folder / f"{TALLIES}.sqlite"
        self._statement = statement

    def __enter__(self) -> None:
        self._before = self._database.read_bytes()
        change(self._database, self._statement)

    def __exit__(self, *_: object) -> None:
        self._database.write_bytes(self._before)


def change(database: Path, statement: str) -> None:
    connection = sqlite3.connect(database)
    with connection:
        assert connection.execute(statement).rowcount == 1
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def test_the_subjects_are_those_of_the_plan(figures: dict[str, Any]) -> None:
    names = {name.split()[0] for name in figures["expected"]["messages"]}
    assert names == {subject.removeprefix("flight.") for subject in SUBJECTS}
