"""Checking the files of delayed messages while no broker has them; changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.faults import Fault, damaged, ignored, rebuilt
from qmq_broker.storage.files.small_file import decode_whole, read_file, unseal
from qmq_broker.storage.schedule.bucket import LOGS, BucketState, ScheduleTable
from qmq_broker.storage.schedule.columns import Subjects
from qmq_broker.storage.schedule.files import ScheduleFiles

_PATH = layout.SCHEDULE_TABLE
_HELD = "The broker starts, and holds back the messages that it cannot read here."
_MENDED = "Put the file back from a backup and run `qmq delayed retry`, or start the broker with --quarantine."


def schedule_faults(disk: Disk, store_id: bytes, commit_next_offset: int) -> Iterator[Fault]:
    """What is wrong with table, schedule logs and dispatch logs; every frame is read."""
    data = read_file(disk, _PATH)
    files = ScheduleFiles(disk, store_id)
    try:
        if data is None:
            yield from _without_table(files)
            return
        table, reason = _read(data)
        if table is not None and table.store_id != store_id:
            reason = f"of store {table.store_id.hex()}"
            table = None
        if table is None:
            yield rebuilt(_PATH, reason)
            yield from _without_table(files)
            return
        if table.copied_offset > commit_next_offset:
            what = f"ends at {commit_next_offset}; {_PATH} says synced up to offset "
            yield damaged(layout.COMMIT_LOG, f"{what}{table.copied_offset}")
        for state in table.buckets:
            yield from _bucket(files, state)
        known = {state.bucket for state in table.buckets}
        for log in LOGS:
            for bucket in files.buckets(log):
                if bucket not in known:
                    path = layout.bucket_path(log, bucket)
                    yield ignored(path, "not in the table", "The next start removes it.")
    finally:
        files.close()


def _read(data: bytes) -> tuple[ScheduleTable | None, str]:
    content = unseal(data)
    if content is None:
        return None, "its checksum does not fit"
    return decode_whole(_PATH, content, ScheduleTable), ""


def _without_table(files: ScheduleFiles) -> Iterator[Fault]:
    for log in LOGS:
        for bucket in files.buckets(log):
            try:
                files.good_bytes(log, bucket)
            except CorruptionError as error:
                yield damaged(error.segment, error.reason, offset=error.offset)


def _bucket(files: ScheduleFiles, state: BucketState) -> Iterator[Fault]:
    lengths = {layout.SCHEDULE: state.schedule_bytes, layout.DISPATCH: state.dispatch_bytes}
    for log, length in lengths.items():
        there = files.length(log, state.bucket)
        if there < length:
            what = f"{length} bytes were synced, {there} are there"
            yield damaged(layout.bucket_path(log, state.bucket), what, offset=there)
            continue
        if not length:
            continue
        try:
            for _ in files.frames(log, state.bucket, next_position=length):
                pass
            if log == layout.SCHEDULE:
                columns = files.columns(state.bucket, Subjects(), next_position=length)
                count = sum(len(part) for part in columns)
                if count != state.next_sequence:
                    what = f"{count} messages; the table says {state.next_sequence}"
                    path = layout.bucket_path(log, state.bucket)
                    yield damaged(path, what, meaning=_HELD, remedy=_MENDED)
        except CorruptionError as error:
            yield damaged(
                error.segment, error.reason, meaning=_HELD, remedy=_MENDED, offset=error.offset
            )
