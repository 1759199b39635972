from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit import warm
from tests.kit.waiting import DEADLINE_S, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are made so on Linux alone")
PROGRAM = """\
import os, signal, sys, threading
if __name__ == "__main__":
    what, *more = sys.argv[1:]
    if what == "told":
        print(more, os.getcwd(), os.environ.get("TOLD"), len(os.environ), sys.stdin.read())
        print(os.getpid(), file=sys.stderr)
        print(max(map(int, os.listdir("/proc/self/fd"))), threading.active_count())
    elif what == "end":
        sys.exit(int(more[0]))
    elif what == "raise":
        raise ValueError("this")
    elif what == "wait":
        print("waits", flush=True)
        signal.pause()
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "asked.py").write_text(PROGRAM)
    return "asked"


def test_a_process_has_its_arguments_its_environment_its_place_and_no_file_of_another(
    program: str, tmp_path: Path
) -> None:
    told = {"TOLD": "this", "PATH": os.environ["PATH"]}
    done = warm.run([program, "told", "a", "b c"], cwd=tmp_path, env=told, timeout=DEADLINE_S)
    first, second = done.stdout.splitlines()
    assert first == f"['a', 'b c'] {tmp_path} this 2 "
    assert second == "3 1"  # that of the folder just listed; one thread
    assert int(done.stderr) not in {os.getpid(), 0}
    assert done.returncode == 0


def test_it_ends_with_the_code_and_the_last_words_of_the_interpreter(
    program: str, tmp_path: Path
) -> None:
    assert warm.run([program, "end", "7"], cwd=tmp_path).returncode == 7
    both = warm.start(
        [program, "raise"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert both.communicate(timeout=DEADLINE_S)[0].endswith("ValueError: this\n")
    done = warm.run([program, "raise"], cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: this"
    assert warm.run(["nothing_of_this_name"], cwd=tmp_path).returncode == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_is_signalled_like_any_other(program: str, tmp_path: Path, number: int) -> None:
    process = warm.start([program, "wait"], cwd=tmp_path, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as lines:
        assert lines.readline() == "waits\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        assert isinstance(process, warm.WarmProcess)
        assert not process.is_stopped()
        os.kill(process.pid, signal.SIGSTOP)
        wait_for(process.is_stopped)
        process.send_signal(number)
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(DEADLINE_S) == -number
        assert lines.read() == ""
    process.kill()  # does nothing: it has ended
    assert process.poll() == -number


def test_what_does_not_end_in_time_is_killed(program: str, tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run([program, "wait"], cwd=tmp_path, timeout=0.1)


def test_several_at_once_end_each_with_its_own_code(program: str, tmp_path: Path) -> None:
    processes = [warm.start([program, "end", f"{n}"], cwd=tmp_path) for n in range(8)]
    assert [process.wait(DEADLINE_S) for process in processes] == list(range(8))


def test_the_commands_run_so(tmp_path: Path) -> None:
    line = ["qmq_client", "--version"]
    done = warm.run(line, cwd=tmp_path, timeout=DEADLINE_S)
    same = subprocess.run([sys.executable, "-m", *line], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, same.stdout, "")
