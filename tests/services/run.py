"""One run of the tests: a folder that all its workers share, and the keeper who clears it away.

Each worker holds a shared lock on the folder's `holders` file for as long as it lives; the kernel
drops the lock of a worker that was killed. The keeper, a process of its own, waits for the exclusive
lock: it has it when the last worker is gone, then ends the servers noted in the folder and removes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.services import keeper, launch

#: What xdist gives each of its workers, the same for all of one run.
RUN_VARIABLE: Final = "PYTEST_XDIST_TESTRUNUID"
_TRIES_MAX: Final = 100
#: Memory that looks like a disk: servers sync every commit as on any other, and wait for none.
_FAST_FOLDER: Final = Path("/dev/shm")
_FAST_BYTES_MIN: Final = 4 * 2**30


class TestRun:
    """The folder of this run; `close` when this worker needs nothing of it any more."""

    __test__ = False  # pytest would collect it by its name

    def __init__(self, name: str | None = None, *, where: Path | None = None) -> None:
        chosen = name or os.environ.get(RUN_VARIABLE) or secrets.token_hex(6)
        self.name = chosen[:12]
        self.folder = (where or _where()) / f"qmq-test-{os.geteuid()}-{self.name}"
        self._holding = self._hold()
        with self.alone():
            self._start_keeper()

    @contextmanager
    def alone(self, purpose: str = "notes") -> Iterator[None]:
        """The other workers of this run wait meanwhile, when they come for the same purpose."""
        with (self.folder / f"alone-{purpose}").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def note(self, name: str, facts: dict[str, Any]) -> None:
        """Tell the other workers, and the keeper. Requires: `alone()`."""
        path = self.folder / f"{name}.json"
        path.with_suffix(".new").write_text(json.dumps(facts))
        path.with_suffix(".new").replace(path)

    def noted(self, name: str) -> dict[str, Any] | None:
        """What a worker told under this name. Requires: `alone()`."""
        try:
            facts: dict[str, Any] = json.loads((self.folder / f"{name}.json").read_text())
        except FileNotFoundError:
            return None
        return facts

    def new_folder(self, name: str) -> Path:
        """An empty folder that any user may enter; goes with the run."""
        path = self.folder / f"{name}-{secrets.token_hex(4)}"
        path.mkdir()
        path.chmod(0o711)
        return path

    def close(self) -> None:
        """Let go. May be called twice."""
        if self._holding >= 0:
            os.close(self._holding)
        self._holding = -1

    def _hold(self) -> int:
        path = self.folder / "holders"
        for _ in range(_TRIES_MAX):
            self.folder.mkdir(exist_ok=True)
            self.folder.chmod(0o711)  # PostgreSQL's user must pass through
            try:
                file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            except FileNotFoundError:
                continue  # the keeper of the workers before us removed it just now
            fcntl.flock(file, fcntl.LOCK_SH)
            try:
                if os.fstat(file).st_ino == path.stat().st_ino:
                    return file
            except FileNotFoundError:
                pass
            os.close(file)
        raise AssertionError(f"{self.folder} goes away again and again")

    def _start_keeper(self) -> None:
        if self.noted("keeper") is not None:
            return
        command = [str(keeper.PYTHON), "-I", "-S", str(keeper.__file__), str(self.folder)]
        line = launch.command_line(command, user=None, is_detached=True)
        started = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True)
        self.note("keeper", {"keeper": int(started.stdout)})


def _where() -> Path:
    """A folder for data that only this run needs. All workers must choose the same: see `TestRun`."""
    try:
        found = os.statvfs(_FAST_FOLDER)
    except OSError:
        return Path(tempfile.gettempdir())
    is_large = found.f_blocks * found.f_frsize >= _FAST_BYTES_MIN
    return _FAST_FOLDER if is_large else Path(tempfile.gettempdir())
