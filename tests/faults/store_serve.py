"""A broker with short segments as a process of its own, for faults of the disk; run as a module.

With `--record` it writes a line for each call of the disk port that changes something: the call and
the path. With `--bypass` it changes a file beside the port now and then, to show that this is seen.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from weakref import WeakSet

from qmq_broker.face.logs import start_logging
from qmq_broker.face.server import serve
from qmq_broker.options import ServeOptions, StoreOptions
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk import OsDisk, OsLock
from qmq_broker.storage.files.os_file import OsFile
from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.wire.limits import Limits

LIMITS = Limits(record_bytes=4_096, frame_bytes=8_192)
#: A life of some seconds goes through all that a broker does with files.
STORE = StoreOptions(
    segment_bytes=16_384,
    action_segment_bytes=4_096,
    growth_bytes=4_096,
    queue_entries_per_file=16,
    dedupe_ids=8,
    reserve_bytes=0,
    checkpoint_bytes=4_096,
    checkpoint_ms=50,
    queue_flush_bytes=12_000,
    retain_bytes=40_000,
    snapshot_bytes=3_000,
    index_entries=64,
    index_files=4,
)
#: The same, but everything is kept and repeats are known for long.
KEEPING = replace(STORE, retain_bytes=0, dedupe_ids=100_000)


class Record:
    """Where the calls are written, one line each, in one write."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)

    def note(self, call: str, path: str) -> None:
        os.write(self._descriptor, f"{call} {path}\n".encode())


class RecordedFile(OsFile):
    """A file whose changes are written down before they are made."""

    def __init__(self, file: OsFile, record: Record) -> None:
        super().__init__(file.path, os.dup(file._descriptor), file._witness)
        file.close()
        self._record = record
        #: As the operating system sees it: a file keeps its descriptor when it is renamed.
        self.present_path = file.path

    def write(self, position: int, parts: Sequence[bytes | memoryview]) -> None:
        self._record.note("write", self.present_path)
        super().write(position, parts)

    def sync(self) -> None:
        self._record.note("sync", self.present_path)
        self._record.note("allocate", layout.LOCK)  # which has the room: is it still taken?
        super().sync()

    def allocate(self, length: int) -> None:
        self._record.note("allocate", self.present_path)
        super().allocate(length)

    def truncate(self, length: int) -> None:
        self._record.note("truncate", self.present_path)
        super().truncate(length)


class RecordedDisk(OsDisk):
    """The machine's disk, its changes written down."""

    def __init__(self, root: str, record: Record, *, is_bypassed: bool) -> None:
        super().__init__(root)
        self._record = record
        self._is_bypassed = is_bypassed
        self._files: WeakSet[RecordedFile] = WeakSet()

    def lock(self, path: str, holder: str) -> OsLock:
        for call in ("make", "write"):
            self._record.note(call, path)
        return super().lock(path, holder)

    def open(self, path: str, *, is_new: bool = False) -> OsFile:
        if is_new:
            self._record.note("make", path)
        file = RecordedFile(super().open(path, is_new=is_new), self._record)
        self._files.add(file)
        return file

    def make_directory(self, path: str) -> None:
        self._noted("make directory", path, super().make_directory)

    def sync_directory(self, path: str) -> None:
        self._record.note("allocate", layout.LOCK)
        self._noted("sync", path, super().sync_directory)

    def rename(self, old: str, new: str) -> None:
        self._record.note("rename", new)
        if self._is_bypassed:
            with open(f"{self.root}/{old}", "ab") as file:
                file.write(b"")
                os.fsync(file.fileno())
        super().rename(old, new)
        for known in [known for known in self._files if known.present_path == old]:
            known.present_path = new

    def unlink(self, path: str) -> None:
        self._noted("unlink", path, super().unlink)

    def _noted(self, call: str, path: str, make: Callable[[str], None]) -> None:
        self._record.note(call, path)
        make(path)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--record")
    parser.add_argument("--keep-all", action="store_true")
    parser.add_argument("--reserve-bytes", type=int, default=0)
    parser.add_argument("--bypass", action="store_true")
    given = parser.parse_args()
    host, _, port = given.listen.partition(":")
    start_logging(logging.INFO)
    disk = None
    if given.record:
        disk = RecordedDisk(given.data, Record(given.record), is_bypassed=given.bypass)
    options = ServeOptions(
        directory=given.data,
        host=host,
        port=int(port),
        store=replace(KEEPING if given.keep_all else STORE, reserve_bytes=given.reserve_bytes),
        limits=LIMITS,
        drain_ms=3_000,
    )
    return serve(options, SYSTEM_CLOCK, disk=disk)


if __name__ == "__main__":
    sys.exit(main())
