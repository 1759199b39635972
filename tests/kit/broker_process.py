"""The broker as a process of its own: started, waited for by its log lines, stopped or killed."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from types import TracebackType
from typing import Self

from tests.kit import warm
from tests.kit.ports import free_port

START_S_MAX = 60.0
END_S_MAX = 60.0
ROOT = Path(__file__).resolve().parents[2]
SERVE = ("-m", "qmq_broker", "serve")
SERVE_WITH_FAULTS = ("-m", "tests.broker.face.faulty_serve")
_URL = re.compile(r" listening url=(https?)://([0-9.]+):([0-9]+)")


class BrokerProcess:
    """One broker on a data directory; may be killed and started again.

    Later lives keep the port, so that whoever knows the address finds the broker again.
    """

    def __init__(
        self,
        data: Path,
        *more: str,
        command: Sequence[str] = SERVE,
        listen: str = "",
        under: Sequence[str] = (),
    ) -> None:
        """`listen`: an address; by default a free one. `under`: a program that runs it, such as a tracer."""
        self._command = [*under, sys.executable, *command, "--data", str(data), *more]
        self._is_under = bool(under)
        self._listen = listen or f"127.0.0.1:{free_port()}"
        self.scheme, self.host, self.port = "http", "127.0.0.1", 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clean_up()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"{self.scheme}://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        """Of its process in this life."""
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until it listens."""
        self.spawn()
        try:
            found = _URL.search(self.wait_for(" listening "))
        except AssertionError:
            self.clean_up()
            raise
        assert found is not None
        self.scheme, self.host, self.port = found[1], found[2], int(found[3])
        self._listen = f"{self.host}:{self.port}"

    def spawn(self) -> None:
        """Start it without waiting."""
        self.lines: list[str] = []
        self._fresh: SimpleQueue[str] = SimpleQueue()
        self._process = self._started([*self._command, "--listen", self._listen])
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _started(self, line: list[str]) -> warm.Process:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'broker'}"}
        if not self._is_under and line[1] == "-m":
            return warm.start(
                line[2:],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        return subprocess.Popen(
            line,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=environment,
        )

    def wait_for(self, text: str) -> str:
        """The next log line that holds `text`; fails when it does not come in time."""
        ends_at = monotonic() + START_S_MAX
        while True:
            try:
                line = self._fresh.get(timeout=max(0.01, ends_at - monotonic()))
            except Empty:
                raise AssertionError(f"no {text!r} in {self.log}") from None
            if text in line:
                return line
            if not line:
                raise AssertionError(f"ended without {text!r}: {self.log}")

    def run_to_end(self) -> int:
        """Start it where it is expected to refuse; returns its exit code."""
        self.spawn()
        try:
            return self.wait()
        finally:
            self.clean_up()

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL: nothing is cleaned up."""
        self._process.kill()
        self.wait()

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Its exit code when it has ended."""
        code = self._process.wait(END_S_MAX)
        self._reader.join(END_S_MAX)
        return code

    @property
    def log(self) -> str:
        """Everything it logged in this life."""
        return "".join(self.lines)

    def clean_up(self) -> None:
        """Nothing of it runs afterwards."""
        if self._process.poll() is None:
            self._process.kill()
        self.wait()

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self.lines.append(line)
                self._fresh.put(line)
        self._fresh.put("")

    @contextmanager
    def connection(self, timeout_s: float = 60.0) -> Iterator[socket.socket]:
        """A bare TCP connection."""
        with socket.create_connection((self.host, self.port), timeout=timeout_s) as connection:
            yield connection

    def talk(self, data: bytes, timeout_s: float = 60.0) -> bytes:
        """Send bytes, say that there is no more, and return all that comes back."""
        with self.connection(timeout_s) as connection:
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # it hung up while we were talking: what it said before is read below
            return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    """Everything until the other side closes or resets."""
    parts: list[bytes] = []
    try:
        while part := connection.recv(65_536):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)
