"""A MariaDB or MySQL, or a PostgreSQL, of a test's own: to kill, to stop, to start again.

Data directories come from a template made once per run. Settings are those of production where a
crash would show the difference (every commit is on disk before its answer) and small elsewhere.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from tests.kit.ports import free_port
from tests.kit.waiting import becomes, wait_for
from tests.services import keeper, launch
from tests.services.run import TestRun

_READY_S_MAX: Final = 60.0
_STOP_S_MAX: Final = 30.0
_PORTS_MAX: Final = 5
_LOG_CHARACTERS: Final = 2000


class NotStartedError(AssertionError):
    """The server is installed and does not start; the text has the end of its log."""


class Recipe(Protocol):
    """How one kind of server is made and started; see `mysql.py` and `postgresql.py`."""

    kind: str

    def user(self) -> str | None:
        """Whom the server runs as; None for ourselves."""

    def make_template(self, data: Path) -> None:
        """Fill an empty data directory."""

    def command(self, data: Path, port: int) -> list[str]:
        """What starts it; speaks TCP on 127.0.0.1 at this port."""

    def url(self, port: int, database: str | None = None) -> str:
        """Where it is, for SQLAlchemy, as somebody who may do everything."""

    def knock(self, port: int) -> None:
        """Connect and ask something; raises while it is not ready."""


class PrivateServer:
    """See the module. Port and data stay the same over restarts.

    `environment` and `options` are the server's alone, beside those of its recipe. Not detached, it
    dies with the thread that started it: start it from the test's own thread.
    """

    def __init__(
        self,
        run: TestRun,
        recipe: Recipe,
        *,
        is_detached: bool = False,
        environment: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self.kind = recipe.kind
        self.folder = run.new_folder(recipe.kind)
        self.process: int | None = None
        self.port = 0
        self._recipe = recipe
        self._is_detached = is_detached
        #: Of the server alone: what launches it may still be another user.
        self._environment = [f"{name}={value}" for name, value in (environment or {}).items()]
        self._options = list(options)
        self._popen: subprocess.Popen[bytes] | None = None
        self._data = self.folder / "data"
        copy_template(run, recipe, self._data)

    def start(self) -> None:
        """Start it and wait until it answers. The first start chooses the port."""
        assert self.process is None, "it runs"
        is_first = self.port == 0
        for _ in range(_PORTS_MAX):
            if is_first:
                self.port = free_port()
            self._launch()
            if self._answers():
                return
            # Somebody may have taken the port meanwhile.
            self._forget()
        raise NotStartedError(f"{self.kind} does not start:\n{self.log()}")

    def kill(self) -> None:
        """SIGKILL to all its processes: memory is lost, what was written to the files is there.

        PostgreSQL's sessions would go on for a moment without the process that began them.
        """
        assert self.process is not None, "it does not run"
        self._signal(signal.SIGSTOP)  # so it begins no more of them
        others = _children(self.process)
        self._signal(signal.SIGKILL)
        for one in others:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        self._wait_until_gone()
        wait_for(lambda: not any(map(_runs, others)), f"{self.kind} does not end")

    def stop(self) -> None:
        """An orderly end; nothing when it does not run."""
        if self.process is None:
            return
        self._signal(signal.SIGCONT)
        self._signal(self._stop_signal())
        self._wait_until_gone()

    def restart(self) -> None:
        """Start it again at the same port with the same data, after `kill` or from running."""
        self.stop()
        self.start()

    def freeze(self) -> None:
        """SIGSTOP: connections stay open and nobody answers. PostgreSQL's backends go on."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def url(self, database: str | None = None) -> str:
        """For SQLAlchemy; of the server's own first database when none is named."""
        return self._recipe.url(self.port, database)

    def log(self) -> str:
        """The end of what the server wrote."""
        return (self.folder / "log").read_text(errors="replace")[-_LOG_CHARACTERS:]

    def close(self) -> None:
        """Stop it and remove its data."""
        if self.process is not None:
            self.kill()
        keeper.free_memory(self._data)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _launch(self) -> None:
        command = [*self._recipe.command(self._data, self.port), *self._options]
        if self._environment:
            command = ["env", *self._environment, *command]
        line = launch.command_line(command, user=self._recipe.user(), is_detached=self._is_detached)
        with (self.folder / "log").open("ab") as log:
            if self._is_detached:
                started = subprocess.run(line, check=True, stdout=subprocess.PIPE, stderr=log)
                self.process = int(started.stdout)
                return
            self._popen = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            self.process = self._popen.pid

    def _answers(self) -> bool:
        if not becomes(lambda: not self._lives() or self._is_ready(), within_s=_READY_S_MAX):
            self.kill()
        return self._lives()

    def _is_ready(self) -> bool:
        try:
            self._recipe.knock(self.port)
        except Exception:  # each driver has errors of its own for «not yet»
            return False
        return True

    def _lives(self) -> bool:
        if self._popen is not None:
            return self._popen.poll() is None
        try:
            os.kill(self.process or 0, 0)
        except ProcessLookupError:
            return False
        # Whoever adopted it may be slow to ask how it ended.
        return _state(self.process or 0)[:1] != ["Z"]

    def _stop_signal(self) -> signal.Signals:
        # PostgreSQL's «smart» shutdown would wait for every client.
        return signal.SIGINT if self.kind == "postgresql" else signal.SIGTERM

    def _signal(self, kind: signal.Signals) -> None:
        assert self.process is not None, "it does not run"
        os.kill(self.process, kind)

    def _wait_until_gone(self) -> None:
        if self._popen is not None:
            self._popen.wait(_STOP_S_MAX)
        wait_for(lambda: not self._lives(), f"{self.kind} does not end", within_s=_STOP_S_MAX)
        self._forget()

    def _forget(self) -> None:
        self.process = self._popen = None


def _children(process: int) -> list[int]:
    found = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [one for one in found if _state(one)[1:2] == [str(process)]]


def _runs(process: int) -> bool:
    return _state(process)[:1] not in ([], ["Z"])


def _state(process: int) -> list[str]:
    """Its state and its parent, and more; nothing when it is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def copy_template(run: TestRun, recipe: Recipe, data: Path) -> None:
    """A data directory like the one that the first caller of this run makes."""
    template = run.folder / f"template-{recipe.kind}"
    with run.alone(f"template-{recipe.kind}"):
        if not template.exists():
            making = template.with_suffix(".new")
            shutil.rmtree(making, ignore_errors=True)
            making.mkdir()
            _give(making, recipe.user())
            recipe.make_template(making)
            making.rename(template)
    shutil.copytree(template, data)
    _give(data, recipe.user())
    data.chmod(0o700)


def as_user(user: str | None, command: list[str]) -> None:
    """Run a tool to its end as this user."""
    line = launch.command_line(command, user=user, is_detached=False)
    done = subprocess.run(line, check=False, capture_output=True, text=True, cwd="/")
    if done.returncode:
        raise AssertionError(f"{command[0]} failed:\n{done.stdout}{done.stderr}"[-_LOG_CHARACTERS:])


def _give(folder: Path, user: str | None) -> None:
    if user is None:
        return
    for path in [folder, *folder.rglob("*")]:
        shutil.chown(path, user)
