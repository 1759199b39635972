"""Small file systems of a test's own: in memory, or ext4 on a loop device."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.conftest import give_up

KINDS: Final = ("tmpfs", "ext4")
_BYTES: Final = {"tmpfs": 2_000_000, "ext4": 6_000_000}
_COMMAND_S_MAX: Final = 60


@contextmanager
def small_disk(kind: str, folder: Path) -> Iterator[Path]:
    """Where it is mounted; gone at the end. Skipped, or failed in CI, where that may not be."""
    place = folder / "disk"
    place.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={_BYTES[kind]}", "none"]
    try:
        if kind == "ext4":
            image = folder / "image"
            with image.open("wb") as file:
                file.truncate(_BYTES[kind])
            # Blocks for root alone would look like free space that is none.
            _run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
            options = ["-o", "loop", str(image)]
        _run("mount", *options, str(place))
    except (OSError, subprocess.SubprocessError) as error:
        give_up(f"no small disk of kind {kind} for the tests. It needs root: {error}", os.environ)
    try:
        yield place
    finally:
        _run("umount", str(place))


@contextmanager
def read_only(place: Path) -> Iterator[None]:
    """Nothing on the disk can be changed meanwhile, as after an error of its file system."""
    _run("mount", "-o", "remount,ro", str(place))
    try:
        yield
    finally:
        _run("mount", "-o", "remount,rw", str(place))


def fill(place: Path, *, free_bytes: int) -> Path:
    """Write a file that leaves so much; removing it makes room again."""
    ballast = place / "ballast"
    with ballast.open("wb") as file:
        while (excess := _free_bytes(place) - free_bytes) > 0:
            try:
                file.write(bytes(min(excess, 65_536)))
                file.flush()
            except OSError:
                break  # what is left is less than a block
    return ballast


def _free_bytes(place: Path) -> int:
    return shutil.disk_usage(place).free


def _run(*command: str) -> None:
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    subprocess.run(
        command,
        check=True,
        capture_output=True,
        timeout=_COMMAND_S_MAX,
        env={**os.environ, "PATH": path},
    )
