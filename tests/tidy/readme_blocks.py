"""Runs what a README shows, as a reader would: one fresh folder per block.

A console block is the script of its lines that start with `$ `; a python block is a program. Lines that
would start the whole test run again, or a server that never ends, are only checked: the command must
exist and know every flag that is shown.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import httpx

from dev import COMMANDS, checks
from tests.kit.ports import free_port
from tests.kit.waiting import wait_for
from tests.tidy.house import ROOT
from tests.tidy.markdown import Block

DOCUMENTED_ADDRESS = "127.0.0.1:9470"
CONSOLE = {"console", "sh"}
#: A block that takes longer is not what somebody wants to wait for on a first visit.
BLOCK_S_MAX = 60
STOP_S_MAX = 10

PYTHON = [sys.executable, "-m"]
QMQ = [sys.executable, "-c", "from qmq_client.cli import main; main()"]
#: Start of a command line that is not run → the command that knows its flags.
CHECKED_ONLY = {
    "python3 dev.py demo": [*PYTHON, "examples.flights", "--help"],
    "python3 dev.py test": [*PYTHON, "pytest", "--help"],
    "python3 dev.py bench": [*PYTHON, "benchmarks", "--help"],
    "qmq broker serve": [*QMQ, "broker", "serve", "--help"],
    "qmq watchdog run": [*QMQ, "watchdog", "run", "--help"],
    "qmq consume": [*QMQ, "consume", "--help"],
    "qmq up": [*QMQ, "up", "--help"],
}


def command_lines(block: Block) -> list[str]:
    """Return the commands of a console block; a line ending in a backslash goes on in the next."""
    joined = block.text.replace("\\\n", " ")
    return [line[2:].strip() for line in joined.splitlines() if line.startswith("$ ")]


def is_checked_only(line: str) -> bool:
    """Tell whether the command line is looked at, not run."""
    return line.startswith(("python3 dev.py", *CHECKED_ONLY))


def flag_faults(line: str) -> list[str]:
    """Return what a command line that is not run shows and the command does not know."""
    words = shlex.split(line, comments=True)
    if words[:2] == ["python3", "dev.py"]:
        if len(words) < 3 or words[2] not in COMMANDS:
            return [f"{line}: no such command of dev.py"]
        if words[2] in {"check", "clean"}:
            known = checks() if words[2] == "check" else {}
            return [f"{line}: no check {word}" for word in words[3:] if word not in known]
    flags = [word.partition("=")[0] for word in words if word.startswith("-")]
    known_text = help_of(next(start for start in CHECKED_ONLY if line.startswith(start)))
    return [f"{line}: no flag {flag}" for flag in flags if not knows(known_text, flag)]


@cache
def help_of(start: str) -> str:
    """Return the help text of one of the commands that are only checked; it must exist."""
    outcome = subprocess.run(
        CHECKED_ONLY[start], cwd=ROOT, capture_output=True, text=True, timeout=BLOCK_S_MAX
    )
    assert outcome.returncode == 0, f"{start}: {outcome.stderr}"
    return outcome.stdout


def knows(help_text: str, flag: str) -> bool:
    """Tell whether a help text lists the flag as a word of its own."""
    return re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", help_text) is not None


def run_block(block: Block, folder: Path) -> list[str]:
    """Run one block in an empty folder and return its faults."""
    if block.runs_with is None:
        return run_text(block, block.text, folder)
    assert block.runs_with == "up", f"line {block.line}: runs with {block.runs_with}?"
    with up(folder) as address:
        return run_text(block, block.text.replace(DOCUMENTED_ADDRESS, address), folder)


def run_text(block: Block, text: str, folder: Path) -> list[str]:
    if block.language == "python":
        (folder / "block.py").write_text(text, encoding="utf-8")
        return run([sys.executable, "block.py"], folder)
    lines = command_lines(Block(line=0, language="", text=text, runs_with=None))
    faults = [fault for line in lines if is_checked_only(line) for fault in flag_faults(line)]
    script = [line for line in lines if not is_checked_only(line)]
    if script:
        faults += run(["sh", "-e", "-c", "\n".join(script)], folder)
    return faults


def run(line: list[str], folder: Path) -> list[str]:
    """Run a program in the folder; a fault is an exit code other than 0, with what it printed."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    outcome = subprocess.run(
        line,
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=BLOCK_S_MAX,
    )
    if outcome.returncode == 0:
        return []
    return [f"exit code {outcome.returncode}\n{outcome.stdout}{outcome.stderr}"]


@contextmanager
def up(folder: Path) -> Iterator[str]:
    """Run `qmq up` on a free port as the README does; yield the broker's address once it is ready."""
    address = f"127.0.0.1:{free_port()}"
    line = [*QMQ, "up", "--database", "sqlite:///shop.db", "--migrate", "--listen", address]
    log = folder / "up.log"
    with log.open("wb") as output:
        process = subprocess.Popen(line, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: is_ready(address), "the broker does not answer", look_s=0.1)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(STOP_S_MAX)
        finally:
            process.kill()
            print(log.read_text(errors="replace"))  # pytest shows it when the block failed


def is_ready(address: str) -> bool:
    """Tell whether a broker that is ready answers there."""
    try:
        answer = httpx.get(f"http://{address}/readyz", trust_env=False, timeout=STOP_S_MAX)
        return answer.is_success
    except httpx.TransportError:
        return False
