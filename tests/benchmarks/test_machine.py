"""What the benchmarks say of the machine they ran on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import machine
from benchmarks.machine import ROOT, our_processor_seconds
from tests.kit.waiting import DEADLINE_S

#: Works for a fifth of a second, says so, and waits to be ended.
_WORK = """
import sys, time
while time.process_time() < 0.2:
    pass
print("done", flush=True)
sys.stdin.read()
"""


def test_a_process_of_ours_is_no_neighbour_while_it_runs_nor_when_it_has_ended() -> None:
    before_s = our_processor_seconds()
    with subprocess.Popen(
        [sys.executable, "-c", _WORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        running_s = our_processor_seconds()
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    assert running_s - before_s >= 0.15
    assert our_processor_seconds() >= running_s - 0.05, "it was lost when it ended"


def test_what_was_counted_of_a_process_stays_counted_when_its_time_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = iter((10.0, 18.0, 4.0, 6.0))
    everything = iter(((100.0, 200.0), (120.0, 220.0)))
    monkeypatch.setattr(machine, "our_processor_seconds", lambda: next(ours))
    monkeypatch.setattr(machine, "processor_seconds", lambda: next(everything))
    neighbours = machine.Neighbours()
    for _ in range(3):
        neighbours._look()
    assert neighbours.share() == (120 - 100 - 8 - 2) / 20


#: Starts work in a process of its own, and ends before that does.
_FOSTER = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
"""
_ADOPTING = """
import subprocess, sys, time
from benchmarks.machine import adopt_orphans, our_processor_seconds
from tests.kit.waiting import becomes

def others_s():
    return our_processor_seconds() - time.process_time()

if sys.argv[1] == "adopting":
    adopt_orphans()
before_s = others_s()
subprocess.run([sys.executable, "-c", *sys.argv[2:]], check=True)
print(becomes(lambda: others_s() - before_s >= 0.4, within_s=float(sys.stdin.read())))
"""
_BUSY = "import time\nwhile time.process_time() < 0.5: pass"


@pytest.mark.parametrize(
    ("how", "within_s", "told"), [("adopting", DEADLINE_S, "True"), ("as usual", 2.0, "False")]
)
def test_a_process_whose_parent_has_ended_is_still_ours(
    how: str, within_s: float, told: str
) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", _ADOPTING, how, _FOSTER, _BUSY],
        cwd=ROOT,
        input=str(within_s),
        check=True,
        capture_output=True,
        text=True,
    )
    assert answer.stdout.strip() == told
