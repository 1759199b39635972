"""Delayed messages in a backup: the table, and every file as far as the table goes.

Nothing the table covers is ever overwritten, so it can be copied while a broker runs. The commit
log is copied afterwards, and must reach back to where the table ends.
"""

from __future__ import annotations

import msgspec

from qmq_broker.errors import DiskError, StoreError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.copying import copy_file
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.small_file import replace_file
from qmq_broker.storage.schedule.bucket import LOGS, read_table
from qmq_broker.storage.schedule.files import ScheduleFiles

#: A bucket may be finished and removed while its files are copied; that happens once per bucket
#: length.
_TRIES_MAX = 3


class ScheduleCopy(msgspec.Struct, frozen=True, kw_only=True):
    """What was copied."""

    copied_bytes: int
    #: The commit log of the copy must begin at or before this; None if it must be whole.
    copied_offset: int | None


def take_schedule(source: Disk, target: Disk, store_id: bytes) -> ScheduleCopy:
    """Copy what the table of the schedule covers; durable on return, except for the root's names.

    Raises `CorruptionError` if the files do not match the table, `StoreError` if there are files of
    delayed messages and no table.
    """
    for directory in LOGS:
        target.make_directory(directory)
    for number in range(_TRIES_MAX):
        table = read_table(source, store_id)
        if table is None:
            if any(map(ScheduleFiles(source, store_id).buckets, LOGS)):
                raise StoreError(
                    "delayed messages have no whole table: start a broker on the directory, which "
                    "makes it again, and try again."
                )
            return ScheduleCopy(copied_bytes=0, copied_offset=None)
        try:
            copied_bytes = sum(
                _copy(source, target, layout.bucket_path(log, state.bucket), length)
                for state in table.buckets
                for log, length in zip(
                    LOGS, (state.schedule_bytes, state.dispatch_bytes), strict=True
                )
                if length
            )
        except DiskError:
            if number + 1 == _TRIES_MAX or read_table(source, store_id) == table:
                raise
            continue
        _sync(target)
        replace_file(target, layout.SCHEDULE_TABLE, msgspec.msgpack.encode(table))
        return ScheduleCopy(copied_bytes=copied_bytes, copied_offset=table.copied_offset)
    raise AssertionError("the loop ends with its last try")


def _copy(source: Disk, target: Disk, path: str, length: int) -> int:
    log, month, _ = path.split("/")
    target.make_directory(f"{log}/{month}")
    return copy_file(source, path, target, length=length)


def _sync(target: Disk) -> None:
    for log in LOGS:
        for month in target.names(log):
            target.sync_directory(f"{log}/{month}")
        target.sync_directory(log)
