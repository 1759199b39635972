"""A run before a release goes on where it was interrupted, unless the code has changed since."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash import campaign as module
from tests.crash.campaign import JUDGED, SEEDS_PER_TASK, Campaign, Tally, code_mark
from tests.kit.processes import is_running
from tests.kit.waiting import wait_for

FIRST = 2 * 10**9


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "crash.jsonl"


def begun(journal: Path) -> Campaign:
    return Campaign(journal, first_seed=FIRST, workers=1)


def test_what_was_judged_before_an_interruption_counts_and_is_not_judged_again(
    journal: Path,
) -> None:
    first = begun(journal)
    tasks = first._tasks()
    assert [next(tasks), next(tasks)] == [FIRST, FIRST + SEEDS_PER_TASK]
    first._finish(FIRST + SEEDS_PER_TASK, Tally(states=30, reached=40), 1.0)  # in any order
    again = begun(journal)
    assert again.tally == Tally(states=30, reached=40)
    assert again.seeds == SEEDS_PER_TASK
    tasks = again._tasks()
    assert [next(tasks), next(tasks)] == [FIRST, FIRST + 2 * SEEDS_PER_TASK]
    again._finish(FIRST, Tally(states=1, reached=2), 1.0)
    assert begun(journal).tally == Tally(states=31, reached=42)
    again.run(31)  # nothing is left to do, and nothing is done


@pytest.mark.skipif(sys.platform != "linux", reason="reads the children of a process from /proc")
def test_a_campaign_that_is_killed_leaves_no_process_behind(journal: Path) -> None:
    command = [sys.executable, "-m", module.__name__, "--workers", "2"]
    journaled = ["--states", "1000000", "--first-seed", str(FIRST), "--journal", str(journal)]
    with subprocess.Popen([*command, *journaled], cwd=module.ROOT) as run:
        try:
            wait_for(lambda: len(_children(run.pid)) >= 3, "two workers do not come")
            left = _children(run.pid)
        finally:
            run.kill()
    wait_for(lambda: not any(map(is_running, left)), "its workers are there still")


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_what_was_judged_of_another_version_says_nothing_of_this_one(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(module, "code_mark", lambda root: "of another version")
        begun(journal)._finish(FIRST, Tally(states=30, reached=40), 1.0)
        assert begun(journal).tally.states == 30
    assert begun(journal).tally == Tally()
    begun(journal)._finish(FIRST, Tally(states=5, reached=5), 1.0)
    assert begun(journal).tally.states == 5
    assert len(journal.read_text().splitlines()) == 2


def test_each_file_that_is_judged_or_judges_counts_for_the_version(tmp_path: Path) -> None:
    marks = {code_mark(tmp_path)}
    for folder in JUDGED:
        path = tmp_path / folder / "below" / "one.py"
        path.parent.mkdir(parents=True)
        for content in ("", "1", "2"):
            path.write_text(content)
            marks.add(code_mark(tmp_path))
    assert len(marks) == 1 + 3 * len(JUDGED)


def test_the_code_that_is_judged_is_there() -> None:
    assert all(any((module.ROOT / folder).rglob("*.py")) for folder in JUDGED)
