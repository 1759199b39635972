"""A file system for one broker, held in memory, whose power can be cut: what was not synced may be gone.

What survives is decided by the model of `tests/crash`: content by sectors, names one by one. Mounted by
a process of its own (run as a module). `mkdir .cut-<seed>` in its root cuts the power, when nobody has a
file open; with `--forget` a sync does nothing and a cut leaves nothing, which a test must notice.
`mkdir .quota-<bytes>` lets this user have no more than that, of which the free space says nothing.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.conftest import give_up, require_program
from tests.crash.image import CutOutcome, Image, Inode, Moment
from tests.crash.power_cut import Lost, Scattered, Torn
from tests.kit.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
CUT = ".cut-"
QUOTA = ".quota-"
UNLIMITED = 1 << 40
_FREE_BLOCKS = 1 << 20


class Files:
    """What FUSE asks for, on an `Image`."""

    use_ns = True

    def __init__(self, *, is_forgetful: bool) -> None:
        self._image = Image()
        self._is_forgetful = is_forgetful
        self._next_number = 1
        self._quota_bytes = UNLIMITED

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        is_directory = path == "/"
        number = None if is_directory else self._number(path)
        common = {"st_uid": os.getuid(), "st_gid": os.getgid()}
        if number is None:
            return {**common, "st_mode": stat.S_IFDIR | 0o700, "st_nlink": 2}
        size = len(self._image.inodes[number].seen)
        links = self._image.links(number)
        return {**common, "st_mode": stat.S_IFREG | 0o600, "st_nlink": links, "st_size": size}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *self._image.listing(_plain(path))]

    def mkdir(self, path: str, mode: int) -> int:
        if path.startswith(f"/{CUT}"):
            self._cut(int(path.removeprefix(f"/{CUT}")))
        elif path.startswith(f"/{QUOTA}"):
            self._quota_bytes = int(path.removeprefix(f"/{QUOTA}"))
        elif _plain(path) in self._image.names:
            raise OSError(errno.EEXIST, path)
        else:
            self._image.name(_plain(path), None)
        return 0

    def create(self, path: str, mode: int, fi: object = None) -> int:
        number = self._next_number
        self._next_number += 1
        self._image.inodes[number] = Inode()
        self._image.name(_plain(path), number)
        return number

    def open(self, path: str, flags: int) -> int:
        number = self._number(path)
        assert number is not None
        return number

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return self._image.inodes[fh].seen[offset : offset + size]

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        inode = self._image.inodes[fh]
        room_bytes = len(inode.seen) + self._left_bytes() - offset
        data = data[: max(0, room_bytes, len(inode.seen) - offset)]
        if not data:
            return -errno.EDQUOT
        inode.change(offset, bytes(data), max(len(inode.seen), offset + len(data)))
        return len(data)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        number = fh if fh is not None else self._number(path)
        assert number is not None
        self._image.inodes[number].change(0, b"", length)
        return 0

    def fallocate(self, path: str, mode: int, offset: int, size: int, fh: int) -> int:
        inode = self._image.inodes[fh]
        if mode or len(inode.seen) >= offset + size:
            return -errno.EOPNOTSUPP if mode else 0
        if offset + size - len(inode.seen) > self._left_bytes():
            return -errno.EDQUOT
        inode.change(0, b"", offset + size)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        if not self._is_forgetful:
            self._image.sync(fh)
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        if not self._is_forgetful:
            self._image.sync_directory(_plain(path))
        return 0

    def rename(self, old: str, new: str) -> int:
        self._image.rename(_plain(old), _plain(new))
        return 0

    def unlink(self, path: str) -> int:
        self._number(path)
        self._image.name(_plain(path), -1)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        blocks = {"f_blocks": _FREE_BLOCKS, "f_bfree": _FREE_BLOCKS, "f_bavail": _FREE_BLOCKS}
        return {"f_bsize": 4096, "f_frsize": 4096, **blocks}

    def _number(self, path: str) -> int | None:
        number = self._image.names.get(_plain(path), -1)
        if number == -1:
            raise OSError(errno.ENOENT, path)
        return number

    def _left_bytes(self) -> int:
        """By how much files may grow; what is taken may be written over, whatever the quota is."""
        numbers = {number for number in self._image.names.values() if number is not None}
        return self._quota_bytes - sum(len(self._image.inodes[number].seen) for number in numbers)

    def _cut(self, seed: int) -> None:
        rng = random.Random(seed)
        # A disk that forgets loses all it holds: by luck of the draw it might have lost nothing.
        outcomes: tuple[CutOutcome, ...] = (Lost(), Torn(1), Scattered(rng), Scattered(rng))
        outcome = Lost() if self._is_forgetful else rng.choice(outcomes)
        self._image = Moment(self._image).after_cut(outcome).image()


def _plain(path: str) -> str:
    return path.strip("/")


@contextmanager
def mounted(place: Path, *, is_forgetful: bool = False) -> Iterator[Path]:
    """The file system; skipped, or failed in CI, where it cannot be."""
    unmount = require_program("fusermount3", "fuse3")
    place.mkdir()
    command = [sys.executable, "-m", "tests.faults.store_fuse", str(place)]
    process = subprocess.Popen(
        [*command, "--forget"] if is_forgetful else command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'broker'}"},
        stderr=subprocess.PIPE,
    )
    try:
        wait_for(lambda: place.is_mount() or process.poll() is not None, "it is not mounted")
        if process.poll() is not None:
            assert process.stderr is not None
            said = process.stderr.read().decode()[-300:]
            give_up(
                f"no FUSE for the tests. It needs the package fuse3 and /dev/fuse: {said}",
                os.environ,
            )
        yield place
    finally:
        if process.poll() is None:
            subprocess.run([unmount, "-u", "-z", str(place)], check=False)
            process.wait(30)
        assert process.stderr is not None
        process.stderr.close()


def cut_power(place: Path, seed: int) -> None:
    """Requires: nobody has a file open."""
    with suppress(FileNotFoundError):  # the kernel looks for what it was told to make
        (place / f"{CUT}{seed}").mkdir()


def set_quota(place: Path, quota_bytes: int = UNLIMITED) -> None:
    """Let nobody have more; what is there already stays."""
    with suppress(FileNotFoundError):
        (place / f"{QUOTA}{quota_bytes}").mkdir()


def used_bytes(place: Path) -> int:
    """What counts for the quota."""
    return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())


def main() -> None:
    """Serve until it is unmounted."""
    from mfusepy import FUSE, Operations  # type: ignore[import-untyped]  # it has no types

    parser = argparse.ArgumentParser()
    parser.add_argument("place")
    parser.add_argument("--forget", action="store_true")
    given = parser.parse_args()

    class Served(Files, Operations):  # type: ignore[misc]  # it has no types
        """Ours first: what we do not do is not offered."""

    FUSE(
        Served(is_forgetful=given.forget),
        given.place,
        foreground=True,
        nothreads=True,
        direct_io=True,
        attr_timeout=0,
        entry_timeout=0,
        negative_timeout=0,
    )


if __name__ == "__main__":
    main()
