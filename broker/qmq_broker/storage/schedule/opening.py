"""Loads the delayed messages of a store from their files at a start.

The table gives the length of each file; bytes after it were left by an interrupted copy. Without a
table the files decide: a record whose source is not above the last one of its bucket is already
copied.
"""

from __future__ import annotations

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.files import layout
from qmq_broker.storage.schedule.bucket import LOGS, Bucket, BucketState, read_table
from qmq_broker.storage.schedule.schedule import Schedule


def load(schedule: Schedule, *, first_offset: int, next_offset: int) -> bool:
    """Load the content of the files; returns whether there was a table. Changes no file.

    `first_offset` and `next_offset` are those of the commit log. Raises `CorruptionError`, and `UnknownFormatError`
    with nothing changed.
    """
    table = read_table(schedule.disk, schedule.store_id)
    if table is None:
        _load_files(schedule)
        schedule.copied_offset = first_offset
        return False
    if table.copied_offset > next_offset:
        raise CorruptionError(
            segment=layout.COMMIT_LOG,
            offset=next_offset,
            reason=f"the log ends here; {layout.SCHEDULE_TABLE} says synced up to offset "
            f"{table.copied_offset}",
        )
    for state in table.buckets:
        for log, length in zip(LOGS, (state.schedule_bytes, state.dispatch_bytes), strict=True):
            there = schedule.files.refuse_later(log, state.bucket, length)
            if there < length:
                reason = f"{length} bytes were synced, {there} are there"
                path = layout.bucket_path(log, state.bucket)
                raise CorruptionError(segment=path, offset=there, reason=reason)
        schedule.buckets[state.bucket] = Bucket(state)
    schedule.pending = dict(table.pending)
    schedule.bucket_ms = table.bucket_ms
    schedule.copied_offset = max(table.copied_offset, first_offset)
    return True


def _load_files(schedule: Schedule) -> None:
    """All buckets, judged by their files alone."""
    for bucket in schedule.files.buckets(layout.SCHEDULE):
        state, subjects = _read_bucket(schedule, bucket)
        if not state.schedule_bytes:
            continue
        loaded = schedule.buckets[bucket] = Bucket(state)
        states = loaded.states(schedule.files)
        for sequence, subject in subjects.items():
            if not states.get(sequence):
                schedule.pending[subject] = schedule.pending.get(subject, 0) + 1


def _read_bucket(schedule: Schedule, bucket: int) -> tuple[BucketState, dict[int, str]]:
    files = schedule.files
    schedule_bytes = files.good_bytes(layout.SCHEDULE, bucket)
    subjects: dict[int, str] = {}
    last_source = 0
    for columns in files.columns(bucket, schedule.subjects, next_position=schedule_bytes):
        for sequence, number in zip(columns.sequences, columns.subjects, strict=True):
            subjects[sequence] = schedule.subjects.names[number]
        last_source = max(last_source, *columns.sources)
    dispatch_bytes = 0
    if files.has(layout.DISPATCH, bucket):
        dispatch_bytes = files.good_bytes(layout.DISPATCH, bucket)
    settled = {sequence for _, sequence in files.states(bucket, next_position=dispatch_bytes)}
    return (
        BucketState(
            bucket, len(subjects), schedule_bytes, last_source, len(settled), dispatch_bytes
        ),
        subjects,
    )


def clear_strays(schedule: Schedule) -> int:
    """Remove files of unknown buckets; returns how many.

    Requires: a table was read. They were left by an interrupted copy, or their buckets were
    finished.
    """
    removed = 0
    for log in LOGS:
        months = set()
        for bucket in schedule.files.buckets(log):
            state = schedule.buckets.get(bucket)
            is_needed = state is not None and (
                state.copied.schedule_bytes
                if log == layout.SCHEDULE
                else state.copied.dispatch_bytes
            )
            if not is_needed:
                schedule.files.remove(log, bucket)
                months.add(layout.bucket_directory(log, bucket))
                removed += 1
        for month in sorted(months):
            schedule.disk.sync_directory(month)
    return removed
