"""Serve by a shifted clock on a disk at one of whose calls the process kills itself; for `test_killed_phases.py`."""

from __future__ import annotations

import argparse
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from qmq_broker.face.logs import start_logging
from qmq_broker.face.server import serve
from qmq_broker.options import ServeOptions, StoreOptions
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.files.os_file import OsFile
from tests.broker.delay.shifted_serve import ShiftedClock

#: Copies follow each few messages, and buckets are removed as soon as they are done with.
STORE = StoreOptions(
    reserve_bytes=0,
    growth_bytes=65_536,
    checkpoint_bytes=1,
    queue_flush_bytes=1,
    bucket_ms=5 * 60_000,
    bucket_grace_ms=0,
)


class Death:
    """Comes before or after the nth call of one kind on files whose path begins so."""

    def __init__(self, text: str) -> None:
        self._when, self._call, self._prefix, count = text.split(":")
        self._left = int(count)

    def note(self, when: str, call: str, path: str) -> None:
        if (when, call) != (self._when, self._call) or not path.startswith(self._prefix):
            return
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)


class DyingFile(OsFile):
    """A file of a process that dies."""

    def __init__(self, file: OsFile, death: Death) -> None:
        super().__init__(file.path, os.dup(file._descriptor))
        file.close()
        self._death = death

    def write(self, position: int, parts: Sequence[bytes | memoryview]) -> None:
        self._death.note("before", "write", self.path)
        super().write(position, parts)
        self._death.note("after", "write", self.path)

    def read(self, position: int, count: int) -> bytes:
        self._death.note("before", "read", self.path)
        return super().read(position, count)


class DyingDisk(OsDisk):
    """The disk of a process that dies."""

    def __init__(self, root: str, death: Death) -> None:
        super().__init__(root)
        self._death = death

    def open(self, path: str, *, is_new: bool = False) -> OsFile:
        return DyingFile(super().open(path, is_new=is_new), self._death)

    def rename(self, old: str, new: str) -> None:
        self._death.note("before", "rename", new)
        super().rename(old, new)
        self._death.note("after", "rename", new)

    def unlink(self, path: str) -> None:
        self._death.note("before", "unlink", path)
        super().unlink(path)
        self._death.note("after", "unlink", path)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--shift", required=True)
    parser.add_argument("--die")
    given = parser.parse_args()
    host, _, port = given.listen.partition(":")
    start_logging(logging.INFO)
    disk = None if given.die is None else DyingDisk(given.data, Death(given.die))
    options = ServeOptions(directory=given.data, host=host, port=int(port), store=STORE)
    return serve(options, ShiftedClock(Path(given.shift)), disk=disk)


if __name__ == "__main__":
    raise SystemExit(main())
