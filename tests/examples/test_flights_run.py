"""The demo's supervisor, where a service does not come up."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.flights.plan import BOARD, COUNTER, TALLIES, Plan
from examples.flights.process import Child, ProcessError
from examples.flights.run import DEPARTURES, Run
from tests.kit.ports import free_port


def test_a_service_that_ends_before_it_is_ready_is_reported_with_its_log(tmp_path: Path) -> None:
    database = {BOARD: f"sqlite:///{tmp_path}/board.db"}
    plan = Plan(directory=str(tmp_path), databases=database, port=free_port(), months=(1,), days=1)
    programs = dict.fromkeys((TALLIES, COUNTER), "import signal; signal.pause()")
    programs[DEPARTURES] = "raise SystemExit('no room for a database')"
    with Run(plan, 1, lambda *_: None) as run:
        for name, program in programs.items():
            run.children[name] = Child(name, ["-c", program], tmp_path)
        with pytest.raises(ProcessError, match="departures ended with code 1:\nno room"):
            run.go()
