"""Nothing that a process of the tests started outlives it, but for what was started to do so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.processes import is_running
from tests.kit.waiting import wait_for
from tests.services import launch
from tests.services.orphans import end_with_this_process, marked

ROOT = Path(__file__).resolve().parents[2]
SLEEP = ["sleep", "600"]
#: A test that starts what sleeps, in a session of its own, says which process it is, and is killed.
KILLED = """
import os, pathlib, signal, subprocess
def test_leaves_an_orphan():
    sleeper = subprocess.Popen(["sleep", "600"], start_new_session=True)
    pathlib.Path("sleeper").write_text(str(sleeper.pid))
    os.kill(os.getpid(), signal.SIGKILL)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_killed_process_started_ends_and_what_it_detached_continues(
    ending: signal.Signals,
) -> None:
    command = [sys.executable, "-m", "tests.services.test_orphans"]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child, grandchild, detached = map(int, parent.stdout.readline().split())
    assert all(map(is_running, (child, grandchild, detached)))
    parent.send_signal(ending)
    parent.communicate()
    wait_for(lambda: not is_running(child) and not is_running(grandchild))
    assert is_running(detached)
    os.kill(detached, signal.SIGKILL)


def test_what_is_detached_has_no_mark_when_it_is_told_of() -> None:
    """Else it would be killed with whoever started it, were that to end at this moment."""
    line = launch.command_line(SLEEP, user=None, is_detached=True)
    started = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True)
    environment = Path(f"/proc/{int(started.stdout)}/environ").read_bytes()
    os.kill(int(started.stdout), signal.SIGKILL)
    assert launch.MARK.encode() not in environment


def test_a_killed_run_of_the_tests_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "test_killed.py").write_text(KILLED)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    ran = subprocess.run(
        [*command, "-p", "tests.conftest", f"--rootdir={tmp_path}", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
    )
    assert ran.returncode == -signal.SIGKILL, ran.stdout
    sleeper = int((tmp_path / "sleeper").read_text())
    wait_for(lambda: not is_running(sleeper))


def test_only_what_a_process_started_has_its_mark() -> None:
    mark = f"{launch.MARK}={os.environ[launch.MARK]}"
    sleeper = subprocess.Popen(SLEEP)
    try:
        wait_for(lambda: sleeper.pid in marked(mark))
        assert os.getpid() not in marked(mark)
        assert list(marked(f"{launch.MARK}=nobody")) == []
    finally:
        sleeper.kill()
        sleeper.wait()


def be_a_parent() -> None:
    """Say whom it started: a child, the child's child, one that is detached; and stay."""
    end_with_this_process()
    shell = ["sh", "-c", "sleep 600 & echo $!; wait"]
    child = subprocess.Popen(shell, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert child.stdout is not None
    line = launch.command_line(SLEEP, user=None, is_detached=True)
    detached = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True)
    print(child.pid, child.stdout.readline().strip(), detached.stdout.strip(), flush=True)
    signal.pause()


if __name__ == "__main__":
    be_a_parent()
