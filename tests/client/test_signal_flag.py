"""A flag that a signal handler sets in the thread that waits for it."""

from __future__ import annotations

import subprocess
import sys
import threading

from qmq_client.signal_flag import SignalFlag
from tests.client.consumer.kit import WAIT_S

#: One signal each round, a little later each time: before, at each step of, and during the wait.
ROUNDS = """
import signal
from qmq_client.signal_flag import SignalFlag

flag = SignalFlag()
signal.signal(signal.SIGALRM, lambda *_: flag.set())
for round in range(1_000):
    signal.setitimer(signal.ITIMER_REAL, 0.000001 * (1 + round % 100))
    flag.wait()
    flag.clear()
print("done")
"""


def test_a_handler_that_interrupts_a_wait_sets_it() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ROUNDS], capture_output=True, text=True, timeout=WAIT_S
    )
    assert (ended.stdout, ended.stderr) == ("done\n", "")


def test_another_thread_wakes_the_one_that_waits() -> None:
    flag = SignalFlag()
    woken = []
    waiting = threading.Thread(target=lambda: woken.append(flag.wait()))
    waiting.start()
    flag.set()
    waiting.join(WAIT_S)
    assert woken == [True]
    assert flag.wait(0), "and stays set"


def test_cleared_it_is_waited_for_again() -> None:
    flag = SignalFlag()
    assert not flag.wait(0.001)
    for _ in range(3):
        flag.set()
        assert flag.is_set()
        flag.clear()
        assert (flag.is_set(), flag.wait(0.001)) == (False, False)
