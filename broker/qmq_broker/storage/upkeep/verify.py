"""Verifies the data directory of a stopped broker: every file, every frame, both checksums.

Takes the lock so that no file changes meanwhile, and changes only the name of the holder in the
lock file. The result has a list of `Fault`, and counts of valid content. Segments are independent
of each other, so several processes may read them, see `verify_segment.py`.

Key index files are checked against their checksums. Their entries are not compared with the log: a
search does that with every entry it follows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import msgspec

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk, DiskFile
from qmq_broker.storage.files.faults import Fault, Level, damaged, ignored, rebuilt
from qmq_broker.storage.files.format_file import Format, not_a_data_directory, read_format
from qmq_broker.storage.files.snapshots import CheckGroups
from qmq_broker.storage.index.key_index import IndexTable
from qmq_broker.storage.index.key_index_file import (
    INDEX_ENTRY_BYTES,
    INDEX_HEADER_BYTES,
    IndexFile,
    IndexFileState,
)
from qmq_broker.storage.logs.log_recovery import torn_bytes_after
from qmq_broker.storage.logs.segments import Segments
from qmq_broker.storage.upkeep.inspect_files import SmallFiles, inspect_files, sealed_array
from qmq_broker.storage.upkeep.verify_journals import (
    JournalFindings,
    inspect_journals,
    known_next,
    schedule_faults,
)
from qmq_broker.storage.upkeep.verify_log import LogClaims, LogVerdict, judge_log, lost_fault
from qmq_broker.storage.upkeep.verify_segment import (
    Run,
    SegmentOutcome,
    SegmentTask,
    verify_segment,
)
from qmq_client.clock import Clock
from qmq_client.wire.checksum import crc32c

_NO_FORMAT: Final = (
    "The broker does not start (exit code 3). An unfinished backup or restore has none: "
    "repeat it in an empty directory."
)


class LogSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one log."""

    log: str
    first_offset: int
    #: The offset after the last good frame.
    next_offset: int
    segments: int
    spares: int
    frames: int
    #: Messages, or actions.
    records: int
    #: Messages lost in ranges that are in quarantine.
    lost: int
    #: Bytes after the end of the log that the next start cuts: never acknowledged.
    torn_bytes: int


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a data directory."""

    store_id: str
    #: Whether the last stop was clean.
    is_clean: bool
    epoch: int
    logs: list[LogSummary]
    #: Subject → first and next sequence.
    subjects: dict[str, tuple[int, int]]
    faults: list[Fault]
    duration_ms: int

    @property
    def worst(self) -> Level | None:
        """The most serious level that was found; None without faults."""
        levels = {fault.level for fault in self.faults}
        return next((level for level in Level if level in levels), None)


def verify_store(
    disk: Disk,
    clock: Clock,
    *,
    check_groups: CheckGroups,
    is_deep: bool = False,
    run: Run | None = None,
) -> Verification:
    """Check all files. `run` verifies the segments, by default one after the other in this process.

    Raises `LockedError` if a broker has the directory, `UnknownFormatError`, and `StoreError` if
    there is no data directory; all other problems become faults.
    """
    began_s = clock.monotonic_s()
    if layout.FORMAT not in disk.names(layout.ROOT) and not disk.names(layout.COMMIT_LOG):
        raise not_a_data_directory("FORMAT and the commit log are missing")
    lock = disk.lock(layout.LOCK, f"pid {os.getpid()} (store verify)")
    try:
        found = _look(disk, check_groups, is_deep, run or _one_by_one(disk))
    finally:
        lock.release()
    return msgspec.structs.replace(found, duration_ms=round((clock.monotonic_s() - began_s) * 1000))


def _one_by_one(disk: Disk) -> Run:
    return lambda tasks: [verify_segment(disk, task) for task in tasks]


def _look(disk: Disk, check_groups: CheckGroups, is_deep: bool, run: Run) -> Verification:
    try:
        format_ = read_format(disk)
    except CorruptionError as error:
        return _unknown(damaged(layout.FORMAT, error.reason))
    if format_ is None:
        return _unknown(damaged(layout.FORMAT, "missing", meaning=_NO_FORMAT))
    files = inspect_files(disk, format_, check_groups)
    if foreign := [fault for fault in files.faults if fault.file == layout.FORMAT]:
        return _unknown(*foreign)  # compared with a foreign FORMAT, all other files look damaged
    journals = inspect_journals(disk, format_.store_id, files)
    look = _Look(disk, format_, files, run, is_deep=is_deep)
    commit, commit_verdict = look.log(_commit_claims(files, journals, format_))
    kept_offset = _kept_actions_offset(disk, files, format_)
    actions, action_verdict = look.log(_action_claims(files, format_, kept_offset))
    faults = [*files.faults, *journals.faults, *look.faults]
    faults += _queues(disk, files, journals, commit_verdict)
    first_offset = files.retained.first_offset
    faults += index_faults(disk, format_, first_offset, commit_verdict.next_offset)
    faults += _ends(files, journals, commit_verdict, action_verdict)
    faults += schedule_faults(disk, format_.store_id, commit_verdict.next_offset)
    firsts = files.retained.first_sequences
    checkpoint = files.checkpoint
    return Verification(
        store_id=format_.store_id.hex(),
        is_clean=files.is_clean,
        epoch=checkpoint.epoch if checkpoint else 0,
        logs=[commit, actions],
        subjects={
            subject: (firsts.get(subject, 0), next_)
            for subject, next_ in sorted(commit_verdict.next_sequences.items())
            if not files.retained.is_removed(subject, next_)
        },
        faults=sorted(faults, key=lambda one: list(Level).index(one.level)),
        duration_ms=0,
    )


def judge_commit_log(disk: Disk, format_: Format, files: SmallFiles) -> LogVerdict:
    """Judge the whole commit log, every frame of it read in this process."""
    look = _Look(disk, format_, files, _one_by_one(disk), is_deep=False)
    journals = inspect_journals(disk, format_.store_id, files)
    return look.log(_commit_claims(files, journals, format_))[1]


def judge_action_log(disk: Disk, format_: Format, files: SmallFiles) -> LogVerdict:
    """The verdict on the action log from the offset that the newest snapshot needs, in the same way."""
    look = _Look(disk, format_, files, _one_by_one(disk), is_deep=False)
    return look.log(_action_claims(files, format_, files.action_first_offset))[1]


def _unknown(*faults: Fault) -> Verification:
    return Verification(
        store_id="",
        is_clean=False,
        epoch=0,
        logs=[],
        subjects={},
        faults=list(faults),
        duration_ms=0,
    )


def _commit_claims(files: SmallFiles, journals: JournalFindings, format_: Format) -> LogClaims:
    last, table, first_offset = files.checkpoint, files.table, files.retained.first_offset
    claims = {
        "the checkpoint": last.commit_log.durable_offset if last else first_offset,
        layout.QUEUE_TABLE: table.indexed_offset if table else 0,
        "a journal": journals.claimed_offset,
        layout.SCHEDULE_TABLE: files.copied_offset,
    }
    claimed_by = max(claims, key=lambda one: claims[one])
    point_offset = last.commit_log.last_frame_offset if last else first_offset
    # A start reads frames of delayed messages from this offset on; without the table, all of them.
    copied_offset = first_offset
    if files.has_schedule_table:
        copied_offset = max(first_offset, files.copied_offset, journals.copied_offset)
    return LogClaims(
        log=layout.COMMIT_LOG,
        segment_bytes=format_.segment_bytes,
        first_offset=first_offset - first_offset % format_.segment_bytes,
        durable_offset=claims[claimed_by],
        claimed_by=claimed_by,
        start_offset=min(point_offset, journals.ids_offset, journals.entries_offset, copied_offset),
        unbroken_offset=point_offset,
        first_sequences=files.retained.first_sequences,
    )


def _kept_actions_offset(disk: Disk, files: SmallFiles, format_: Format) -> int:
    """The offset from which a start or a keeper needs the action log; parts deleted by force do not
    count as missing.
    """
    there = Segments(disk, layout.ACTION_LOG, format_.action_segment_bytes)
    begins = next(iter(there.bases), 0)
    there.close()
    kept_offset = files.kept_actions_offset
    first_offset = files.action_first_offset
    return first_offset if kept_offset is None else min(first_offset, max(begins, kept_offset))


def _action_claims(files: SmallFiles, format_: Format, kept_offset: int) -> LogClaims:
    last, first_offset = files.checkpoint, files.action_first_offset
    segment_bytes = format_.action_segment_bytes
    claims = {
        "the checkpoint": last.action_log.durable_offset if last else 0,
        layout.ACTIONS_WITNESS: files.witnessed_offset,
        "the snapshot of the groups": first_offset,
    }
    claimed_by = max(claims, key=lambda one: claims[one])
    return LogClaims(
        log=layout.ACTION_LOG,
        segment_bytes=segment_bytes,
        first_offset=kept_offset - kept_offset % segment_bytes,
        durable_offset=claims[claimed_by],
        claimed_by=claimed_by,
        start_offset=first_offset - first_offset % segment_bytes,
        unbroken_offset=0,
    )


class _Look:
    """Both logs, one after the other."""

    def __init__(
        self, disk: Disk, format_: Format, files: SmallFiles, run: Run, *, is_deep: bool
    ) -> None:
        self._disk = disk
        self._format = format_
        self._files = files
        self._run = run
        self._is_deep = is_deep
        self.faults: list[Fault] = []

    def log(self, claims: LogClaims) -> tuple[LogSummary, LogVerdict]:
        """Check every segment of a log."""
        segments = Segments(self._disk, claims.log, claims.segment_bytes)
        try:
            self.faults += _strays(self._disk, segments, claims)
            task = SegmentTask(
                format=self._format,
                log=claims.log,
                base=0,
                queues=self._queues() if claims.log == layout.COMMIT_LOG else {},
                is_deep=self._is_deep,
            )
            bases = [base for base in segments.bases if base >= claims.first_offset]
            outcomes = self._run([replace(task, base=base) for base in bases])
            verdict = judge_log([outcome.survey for outcome in outcomes], claims)
            self.faults += [*verdict.faults, *verdict.unexplained]
            for outcome in outcomes:
                self.faults += outcome.faults
            return _summary(segments, claims, outcomes, verdict), verdict
        finally:
            segments.close()

    def _queues(self) -> dict[str, tuple[int, int]]:
        table, firsts = self._files.table, self._files.retained.first_sequences
        return {
            state.subject: (firsts.get(state.subject, 0), state.next_sequence)
            for state in (table.queues if table else ())
        }


def _summary(
    segments: Segments, claims: LogClaims, outcomes: list[SegmentOutcome], verdict: LogVerdict
) -> LogSummary:
    surveys = [outcome.survey for outcome in outcomes]
    return LogSummary(
        log=claims.log,
        first_offset=claims.first_offset,
        next_offset=verdict.next_offset,
        segments=len(surveys),
        spares=len(segments.spares),
        frames=sum(survey.frames for survey in surveys),
        records=sum(survey.records for survey in surveys),
        lost=sum(survey.lost for survey in surveys),
        torn_bytes=torn_bytes_after(segments, verdict.next_offset),
    )


def _strays(disk: Disk, segments: Segments, claims: LogClaims) -> Iterator[Fault]:
    for name in disk.names(claims.log):
        base = layout.parse_number(name)
        path = f"{claims.log}/{name}"
        if path == layout.SPARE_DRAFT:
            continue
        if base is None and layout.parse_spare(name) is None:
            yield ignored(path, "not a segment", "It is never read.")
        elif base is not None and not segments.has(base):
            what = f"not named by a multiple of {claims.segment_bytes}"
            yield ignored(path, what, "It is never read.")
        elif base is not None and base < claims.first_offset and claims.log == layout.COMMIT_LOG:
            yield ignored(path, "given up", "The next start removes it.")
        elif base is not None:
            surplus_bytes = segments.file(base).length() - claims.segment_bytes
            if surplus_bytes > 0:
                what = f"{surplus_bytes} bytes longer than a segment"
                yield ignored(
                    path, what, "They are never read.", offset=base + claims.segment_bytes
                )


def _queues(
    disk: Disk,
    files: SmallFiles,
    journals: JournalFindings,
    verdict: LogVerdict,
) -> Iterator[Fault]:
    """Check the queues' table against the files, and table and journal against the end of the log."""
    firsts = files.retained.first_sequences
    for name in disk.names(layout.CONSUME_QUEUES):
        if layout.parse_subject(name) is None:
            path = f"{layout.CONSUME_QUEUES}/{name}"
            yield ignored(path, "not the folder of a subject", "It is never read.")
    for subject in files.unfit_queues:
        path = layout.queue_directory(subject)
        yield rebuilt(path, "its files are missing or do not match the table")
    for subject, known in known_next(files, journals).items():
        next_sequence = verdict.next_sequences.get(subject, firsts.get(subject, 0))
        if known > next_sequence:
            yield lost_fault(layout.COMMIT_LOG, subject, next_sequence, known)


def _ends(
    files: SmallFiles, journals: JournalFindings, commit: LogVerdict, actions: LogVerdict
) -> Iterator[Fault]:
    """Check for files written after a sync of a log that is shorter now."""
    for file, offset in (
        (layout.QUEUE_TABLE, files.table.indexed_offset if files.table else 0),
        ("a journal", journals.claimed_offset),
    ):
        if offset > commit.next_offset:
            what = f"ends at {commit.next_offset}; {file} says synced up to offset {offset}"
            yield damaged(layout.COMMIT_LOG, what)
    if files.action_first_offset > actions.next_offset:
        what = f"ends at {actions.next_offset}; the snapshot of the groups ends at "
        yield damaged(layout.ACTION_LOG, f"{what}{files.action_first_offset}")


_READ_BYTES: Final = 1024 * 1024


def index_faults(
    disk: Disk, format_: Format, first_offset: int, next_offset: int
) -> Iterator[Fault]:
    """Faults of table and files; the offsets are the beginning and end of the commit log."""
    table, reason = sealed_array(disk, layout.INDEX_TABLE, IndexTable)
    if table is not None and table.store_id != format_.store_id:
        reason = f"of store {table.store_id.hex()}"
        table = None
    if reason:
        yield rebuilt(layout.INDEX_TABLE, reason)
    states = table.files if table is not None else ()
    known = {state.name for state in states}
    there = set(disk.names(layout.INDEX))
    for name in sorted(there - known):
        is_ours = layout.is_index_name(name)
        meaning = "The next start removes it." if is_ours else "It is never read."
        yield ignored(layout.index_path(name), "not in the table", meaning)
    for state in states:
        path = layout.index_path(state.name)
        if state.next_offset > next_offset:
            yield rebuilt(path, f"up to offset {state.next_offset}; the log ends at {next_offset}")
        elif state.name not in there and state.next_offset <= first_offset:
            yield ignored(path, "missing, like its part of the log", "The next start forgets it.")
        elif state.name not in there:
            yield rebuilt(path, "missing")
        elif fault := _fault(disk, format_, state):
            yield rebuilt(path, fault)


def _fault(disk: Disk, format_: Format, state: IndexFileState) -> str:
    """The fault of one file; empty without one."""
    file = IndexFile.of_state(disk, format_.store_id, state)
    try:
        if file.is_sealed:
            while not file.check_some():
                pass
            return ""
    except CorruptionError as error:
        return error.reason
    return _fault_of_growing(disk, state, file.header())


def _fault_of_growing(disk: Disk, state: IndexFileState, header: bytes) -> str:
    file = disk.open(layout.index_path(state.name))
    try:
        if file.read(0, INDEX_HEADER_BYTES) != header:
            return "another header"
        is_whole = _entries_crc(file, state) == state.entries_crc
        return "" if is_whole else "entries were altered"
    finally:
        file.close()


def _entries_crc(file: DiskFile, state: IndexFileState) -> int:
    """The checksum of the entries of a growing file that the table covers."""
    position = INDEX_HEADER_BYTES + 4 * state.slot_count
    after = position + INDEX_ENTRY_BYTES * state.count
    crc = 0
    while position < after:
        data = file.read(position, min(_READ_BYTES, after - position))
        if not data:
            return -1
        crc = crc32c(data, crc)
        position += len(data)
    return crc
