"""Processes of Python that begin with their modules imported.

Most of what a `python -m` takes until it works, half a second of a processor and more with SQLAlchemy, are
imports, and the tests start a thousand of them. Here one process has imported what most need, and forks when
it is asked: each is a process of its own, with its number, its environment, its files and its exit code, to be
signalled, frozen and killed like any other. Only its command line is that of the process that forked it.

Run as `python -m tests.kit.warm DESCRIPTOR` that process serves the socket: one request is one packet, a
JSON object with the descriptors of its standard files and of a pipe, on which the number of the process
comes back and, when it has ended, how. Needs Linux, or any system with descriptors of processes.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TextIO, TypeAlias

ROOT: Final = Path(__file__).resolve().parents[2]
#: Whether processes can be had so; otherwise they are started in the ordinary way.
IS_POSSIBLE: Final = hasattr(os, "pidfd_open")
#: Tells the system to load a library before all others, which it does where a program starts.
_LOADED_FIRST: Final = "LD_PRELOAD"
#: What the commands and the programs of the tests import. What is missing, they miss themselves.
_IMPORTED: Final = (
    "qmq_broker.face.commands.broker",
    "qmq_broker.face.commands.store",
    "qmq_broker.face.server",
    "qmq_client.commands.message",
    "qmq_client.commands.root",
    "qmq_client.consumer",
    "qmq_client.inbox.sqlite",
    "qmq_client.outbox.database.sqlite",
    "qmq_client.testing",
    "qmq_client.transport.http",
    "qmq_watchdog.cli",
    "sqlalchemy.dialects.mysql.pymysql",
    "sqlalchemy.dialects.postgresql.psycopg",
    "sqlalchemy.ext.asyncio",
    "aiosqlite",
    "asyncmy",
    "httpx",
    "psycopg",
    "pymysql",
)
#: An environment with thousands of variables.
_PACKET_BYTES_MAX: Final = 200_000
_STANDARD: Final = 3
_NUMBER: Final = struct.Struct("=i")


def start(
    line: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | str = ROOT,
    stdout: int | None = None,
    stderr: int | None = None,
    imports: Sequence[str] = (),
) -> Process:
    """What runs a module, as `python -m` would; `line` is its name and its arguments.

    `stdout` and `stderr` are descriptors, or what `subprocess` has for them; `imports` are modules that
    it shall find imported, like all that come after it.
    """
    environment = dict(os.environ if env is None else env)
    if IS_POSSIBLE and _LOADED_FIRST not in environment:
        return WarmProcess(line, environment, cwd, stdout, stderr, imports)
    return subprocess.Popen(
        [sys.executable, "-m", *line],
        env=environment,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
    )


class WarmProcess:
    """One that was forked; the calls are those of `subprocess.Popen`."""

    def __init__(
        self,
        line: Sequence[str],
        env: Mapping[str, str],
        cwd: Path | str,
        stdout: int | None,
        stderr: int | None,
        imports: Sequence[str],
    ) -> None:
        self.returncode: int | None = None
        self.stdout: TextIO | None = None
        self.stderr: TextIO | None = None
        nothing = os.open(os.devnull, os.O_RDWR)
        self._status, status = os.pipe()
        closing = [nothing, status]
        files = [nothing]
        if stdout == subprocess.PIPE:
            reading, stdout = os.pipe()
            closing.append(stdout)
            self.stdout = os.fdopen(reading)
        files.append(_descriptor(stdout, (nothing, 1, 1)))
        if stderr == subprocess.PIPE:
            reading, stderr = os.pipe()
            closing.append(stderr)
            self.stderr = os.fdopen(reading)
        files.append(_descriptor(stderr, (nothing, 2, files[1])))
        told = {"line": [*line], "env": env, "cwd": str(cwd), "imports": [*imports]}
        try:
            socket.send_fds(_forker(), [json.dumps(told).encode()], [*files, status])
        finally:
            for descriptor in closing:
                os.close(descriptor)
        self.pid: int = _NUMBER.unpack(os.read(self._status, _NUMBER.size))[0]

    def __del__(self) -> None:
        if self.returncode is None:
            os.close(self._status)

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code when it has ended; TimeoutExpired when it has not after so many seconds."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            (status,) = _NUMBER.unpack(os.read(self._status, _NUMBER.size))
            os.close(self._status)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def is_stopped(self) -> bool:
        """Whether it was stopped by a signal and not continued since; as `/proc` says it."""
        if self.poll() is not None:
            return False
        _, _, told = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")
        return told.startswith("T")

    def send_signal(self, number: int) -> None:
        """Does nothing when it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """The same with SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """The same with SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it wrote to pipes, until it ended; it is killed when that lasts longer."""
        files = [self.stdout, self.stderr]
        with ThreadPoolExecutor(len(files)) as pool:
            reading = [pool.submit(_read_all, file) for file in files]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
        out, error = (one.result() for one in reading)
        return out, error


def _read_all(file: TextIO | None) -> str:
    if file is None:
        return ""
    with file:
        return file.read()


Process: TypeAlias = WarmProcess | subprocess.Popen[str]


def run(
    line: Sequence[str], *, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a module to its end and return what it wrote; when it does not end in time it is killed."""
    process = start(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    out, error = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess([*line], process.wait(), out, error)


def _descriptor(file: int | None, meant: tuple[int, int, int]) -> int:
    """The descriptor of a standard file: given itself, or by the word of `subprocess` for it."""
    words = {subprocess.DEVNULL: meant[0], None: meant[1], subprocess.STDOUT: meant[2]}
    return words.get(file, file or 0)


_turn = threading.Lock()
_sockets: dict[int, socket.socket] = {}


def _forker() -> socket.socket:
    """The connection to the forking process, which the first request starts."""
    with _turn:
        if (found := _sockets.get(os.getpid())) is not None:
            return found
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            line = [sys.executable, "-m", __name__, str(theirs.fileno())]
            ours_too = [
                str(ROOT),
                *(f"{ROOT / name}" for name in ("broker", "watchdog", "migrations")),
            ]
            path = [*filter(None, [os.environ.get("PYTHONPATH")]), *ours_too]
            process = subprocess.Popen(
                line,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        _sockets[os.getpid()] = ours
        atexit.register(_end, ours, process)
        return ours


def _end(ours: socket.socket, process: subprocess.Popen[bytes]) -> None:
    ours.close()
    process.wait()


# ---- in the process that forks ------------------------------------------------------------------


def _serve(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for each request. Returns the request in a child, and nothing when nobody asks any more."""
    waiting: dict[int, tuple[int, int]] = {}
    while True:
        for ready in select.select([control.fileno(), *waiting], [], [])[0]:
            if ready != control.fileno():
                child, status = waiting.pop(ready)
                with suppress(BrokenPipeError):
                    os.write(status, _NUMBER.pack(os.waitpid(child, 0)[1]))
                os.close(ready)
                os.close(status)
                continue
            packet, files, _, _ = socket.recv_fds(control, _PACKET_BYTES_MAX, _STANDARD + 1)
            if not packet:
                return None
            told = json.loads(packet)
            _import(told["imports"])
            child = os.fork()
            if not child:
                return told, files[:_STANDARD]
            os.write(files[_STANDARD], _NUMBER.pack(child))
            waiting[os.pidfd_open(child)] = child, files.pop()
            for file in files:
                os.close(file)


def _become(told: Mapping[str, Any], files: Sequence[int]) -> None:
    """Be what was asked for: nothing of the process that forked is left but its modules."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(_STANDARD, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    os.chdir(told["cwd"])
    os.environ.clear()
    os.environ.update(told["env"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    module, *arguments = told["line"]
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [place for place in (told["cwd"], *given) if place and place not in sys.path]
    sys.argv[1:] = arguments
    is_package = hasattr(sys.modules.get(module), "__path__")
    sys.modules.pop(
        f"{module}.__main__" if is_package else module, None
    )  # what runs is not imported
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _import(names: Iterable[str]) -> None:
    for name in names:
        with suppress(ImportError):
            importlib.import_module(name)


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, which is for what was asked for
    _import(_IMPORTED)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as control:
        request = _serve(control)
        if request is None:
            return
        control.detach()
    try:
        _become(*request)
    finally:
        # What was imported stays left out of collections: to search it once more at the very end, when all
        # is taken down, takes a third of a second. A watchdog that ends has given it back to the collector.
        if not gc.get_freeze_count():
            gc.freeze()


if __name__ == "__main__":
    _main()
