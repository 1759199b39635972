"""From the name of a message system to a server: an address in the environment, else a process of ours.

The rungs and their rules are those of the databases (`tests/services/ladder.py`): who names an address wants
that server, and where no rung holds the reasons are shown with what to install. A server that was started
here dies with the thread that started it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.kit.ports import free_port
from tests.kit.waiting import becomes
from tests.services import launch
from tests.services.engines.recipes import RECIPES, Mode, Recipe
from tests.services.ladder import climb
from tests.services.rungs import RungError, is_allowed

_READY_S_MAX: Final = 120.0
_STOP_S_MAX: Final = 5.0
_LOG_CHARACTERS: Final = 1_000


class Engine:
    """One running message system; `close` ends what was started here."""

    def __init__(self, recipe: Recipe, mode: Mode, folder: Path) -> None:
        self.recipe = recipe
        self.mode = mode
        #: Host and port.
        self.address = ""
        #: Which rung found it.
        self.rung = ""
        self._folder = folder
        self._started: list[subprocess.Popen[bytes]] = []

    @property
    def port(self) -> int:
        """Of its address."""
        return int(self.address.rpartition(":")[2])

    @property
    def processes(self) -> list[int]:
        """The numbers of its processes, the one that serves clients last; none of a server of others."""
        return [one.pid for one in self._started]

    def start(self) -> str:
        """Start its processes one after the other, and return its address. Raises `RungError`."""
        self.recipe.get()
        self._folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        for command in self.recipe.commands(self._folder, self.mode, port):
            line = launch.command_line(command.line, user=None, is_detached=False)
            with self._log.open("ab") as log:
                started = subprocess.Popen(
                    line,
                    env={**os.environ, **command.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self._started.append(started)
            self._wait_for(command.port, started)
        return f"127.0.0.1:{port}"

    def kill(self) -> None:
        """SIGKILL to all its processes."""
        for one in reversed(self._started):
            one.kill()
            one.wait()
        self._started.clear()

    def close(self) -> None:
        """An orderly end, and a hard one for what does not heed it. May be called twice."""
        for one in reversed(self._started):
            one.send_signal(signal.SIGTERM)
            try:
                one.wait(_STOP_S_MAX)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()
        self._started.clear()

    @property
    def _log(self) -> Path:
        return self._folder.with_suffix(".log")

    def _wait_for(self, port: int, started: subprocess.Popen[bytes]) -> None:
        becomes(
            lambda: started.poll() is not None or listens(("127.0.0.1", port)),
            within_s=_READY_S_MAX,
        )
        if started.poll() is None and listens(("127.0.0.1", port)):
            return
        self.kill()
        said = " ".join(self._log.read_text(errors="replace").split())[-_LOG_CHARACTERS:]
        raise RungError(f"{self.recipe.name} is installed and does not start: {said}")


def start_engine(
    name: str,
    folder: Path,
    *,
    mode: Mode = "durable",
    environment: Mapping[str, str] = os.environ,
) -> Engine:
    """A server of this system in this mode; its data go into `folder`.

    Raises `ServiceMissingError` where no rung holds.
    """
    engine = Engine(RECIPES[name](), mode, folder)

    def private() -> str:
        if not is_allowed("private", environment):
            raise RungError("not among the rungs that were chosen")
        try:
            return engine.start()
        except RungError as error:
            raise RungError(f"{error} (to have one: {engine.recipe.remedy})") from error

    variable = f"QMQ_TEST_{name.upper()}_ADDRESS"
    rungs = [("environment", lambda: _named(variable, environment)), ("private", private)]
    service = climb(name, rungs)
    engine.address, engine.rung = service.url, service.rung
    return engine


def _named(variable: str, environment: Mapping[str, str]) -> str:
    """Whoever names a server wants that one: one that does not answer is an error, not a reason."""
    address = environment.get(variable, "")
    if not address:
        raise RungError(f"{variable} is not set")
    host, _, port = address.rpartition(":")
    if not (port.isdigit() and listens((host, int(port)))):
        raise AssertionError(f"{variable} names {address}, where nobody listens; give host:port")
    return address


def listens(address: tuple[str, int]) -> bool:
    """Whether somebody accepts connections there."""
    try:
        socket.create_connection(address, timeout=1.0).close()
    except OSError:
        return False
    return True
