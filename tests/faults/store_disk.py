"""Small file systems of a test's own: in memory, or ext4 on a loop device."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tests.conftest import give_up

KINDS: Final = ("tmpfs", "ext4")
_BYTES: Final = {"tmpfs": 2_000_000, "ext4": 6_000_000}
#: An error that it finds in itself makes it read-only, as most systems set it up.
_EXT4_OPTIONS: Final = "loop,errors=remount-ro"
#: All that a check may say of a file system whose writes were stopped: nothing, or that it was mended.
_CHECKED: Final = (0, 1)
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
            options = ["-o", _EXT4_OPTIONS, str(image)]
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


def stop_writes(place: Path) -> None:
    """Let an ext4 find an error in itself: it is read-only from then on, under whoever works on it."""
    device = place.stat().st_dev
    name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
    try:
        Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("1")
    except OSError as error:
        give_up(f"no ext4 that fails for the tests. It needs root and /sys: {error}", os.environ)


def check_and_mount_again(place: Path, folder: Path) -> None:
    """What an operator does then. Requires: nobody has a file open; `folder` is that of `small_disk`."""
    image = str(folder / "image")
    _run("umount", str(place))
    _run("e2fsck", "-f", "-y", image, codes=_CHECKED)
    _run("mount", "-o", _EXT4_OPTIONS, image, str(place))


def fill(place: Path, *, free_bytes: int) -> Path:
    """Write a file that leaves so much; removing it makes room again.

    There is none if whoever works on the disk had it full before, as a spare segment may do.
    """
    ballast = place / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while (excess := _free_bytes(place) - free_bytes) > 0:
            file.write(bytes(min(excess, 65_536)))  # until what is left is less than a block
    return ballast


def _free_bytes(place: Path) -> int:
    return shutil.disk_usage(place).free


def _run(*command: str, codes: tuple[int, ...] = (0,)) -> None:
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        timeout=_COMMAND_S_MAX,
        env={**os.environ, "PATH": path},
    )
    if done.returncode not in codes:
        done.check_returncode()
