"""Packages of Debian and Ubuntu that tests need: installed by root and apt-get, one at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tests.kit.surroundings import for_packages
from tests.services.rungs import RungError, is_allowed

RUNG: Final = "apt-get"
_TOOL_S_MAX: Final = 600
_REASON_CHARACTERS: Final = 300


def find_or_install(package: str, find: Callable[[], Path | None]) -> Path:
    """A program or library of this package, as `find` finds it; installed now if it was not before.

    Raises `RungError` where it cannot be had.
    """
    _outlast_installation()
    if find() is None and is_allowed(RUNG, os.environ):
        install(package, is_there=lambda: find() is not None)
    if (found := find()) is None:
        raise RungError(f"{package} is not installed")
    return found


def install(package: str, *, is_there: Callable[[], bool]) -> None:
    """Install it, with no service started, unless another worker or run did meanwhile.

    Raises `RungError` where that cannot be.
    """
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise RungError(f"{package} is not installed, and to install it needs root and apt-get")
    with locked(lock_path()):
        if is_there():
            return
        with no_services():
            for line in (["update"], ["install", "-y", "--no-install-recommends", package]):
                run(["apt-get", "-q", *line])


@contextmanager
def no_services(policy: Path = Path("/usr/sbin/policy-rc.d")) -> Iterator[None]:
    """Debian starts a server as soon as it is installed; this file says no, for a while."""
    if policy.exists():
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink(missing_ok=True)


def lock_path() -> Path:
    """Of the file that is locked during an installation."""
    return Path(tempfile.gettempdir()) / "qmq-test-apt.lock"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Other processes that lock this file wait during the block; creates the file and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _outlast_installation() -> None:
    """A program that another worker is installing is there before the libraries that it needs."""
    with suppress(FileNotFoundError), lock_path().open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)


def run(line: Sequence[str], *, seconds_max: float = _TOOL_S_MAX) -> str:
    """The output of an installer or another tool; raises `RungError` with the end of its output if it fails."""
    try:
        done = subprocess.run(
            list(line),
            env=for_packages(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds_max,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RungError(f"{line[0]}: {error}"[:_REASON_CHARACTERS]) from error
    if done.returncode:
        said = " ".join((done.stdout + done.stderr).split())[-_REASON_CHARACTERS:]
        raise RungError(f"{line[0]} failed: {said}")
    return done.stdout
