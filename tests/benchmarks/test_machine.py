"""What the benchmarks say of the machine they ran on."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.machine import our_processor_seconds

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
