"""Verifies the journals of ids and entries, and the files of delayed messages.

Each file is checked against its checksums. Ids and entries are not compared with the frames here: the
broker compares a repeat with the frame that the journal names, and an entry with its record, each
time it uses them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.faults import Fault, damaged, ignored, rebuilt
from qmq_broker.storage.files.journal import JournalFile, journal_bases
from qmq_broker.storage.files.small_file import decode_whole, read_file, unseal
from qmq_broker.storage.queues.entry_chunk import decode_entry_chunk
from qmq_broker.storage.queues.queue_files import ENTRY_BYTES
from qmq_broker.storage.schedule.bucket import LOGS, BucketState, ScheduleTable
from qmq_broker.storage.schedule.columns import Subjects
from qmq_broker.storage.schedule.files import ScheduleFiles
from qmq_broker.storage.upkeep.inspect_files import SmallFiles


@dataclass(slots=True, kw_only=True)
class JournalFindings:
    """The extent of the journals, read like at a start."""

    #: Offsets below which a start reads no frames: for the remembered ids, and for the queues.
    ids_offset: int
    entries_offset: int
    #: All delayed messages below this offset of the commit log were copied, according to the last entries.
    copied_offset: int
    #: By subject, the sequence after its last entry in the journal.
    next_sequences: dict[str, int]
    faults: list[Fault] = field(default_factory=list)

    @property
    def claimed_offset(self) -> int:
        """The offset up to which the commit log was synced, according to the journals."""
        return max(self.ids_offset, self.entries_offset)


def inspect_journals(disk: Disk, store_id: bytes, files: SmallFiles) -> JournalFindings:
    """Read both journals; change nothing."""
    first_offset = files.retained.first_offset
    last, table = files.checkpoint, files.believed_table
    window_offset = max(first_offset, last.window_offset if last else 0)
    indexed_offset = max(first_offset, table.indexed_offset if table else 0)
    ids = _Chain(disk, layout.IDS, store_id, window_offset)
    # Like at a start: from the previous table on, unless the journal lacks part of that range.
    before = files.table_before
    kept_offset = min(indexed_offset, before.indexed_offset if before else indexed_offset)
    entries = _Chain(disk, layout.ENTRIES, store_id, kept_offset)
    if entries.next_offset < indexed_offset:
        entries = _Chain(disk, layout.ENTRIES, store_id, indexed_offset)
    return JournalFindings(
        ids_offset=ids.next_offset,
        entries_offset=entries.next_offset,
        copied_offset=_copied_offset(entries.contents),
        next_sequences=_next_sequences(entries.contents),
        faults=[*ids.faults(), *entries.faults(), *_missing_table(files, entries.next_offset)],
    )


def _missing_table(files: SmallFiles, entries_offset: int) -> Iterator[Fault]:
    """The fault if neither the queues' table nor the journal has all entries after a clean stop."""
    last = files.checkpoint
    is_short = last is not None and entries_offset < last.commit_log.durable_offset
    if files.is_clean and files.is_table_missing and is_short:
        yield rebuilt(layout.QUEUE_TABLE, "missing after a clean stop")


def known_next(files: SmallFiles, journals: JournalFindings) -> dict[str, int]:
    """By subject, the sequence after its last message, according to the queues' table and journal."""
    known = {one.subject: one.next_sequence for one in (files.table.queues if files.table else ())}
    for subject, next_sequence in journals.next_sequences.items():
        known[subject] = max(known.get(subject, 0), next_sequence)
    return known


class _Chain:
    """The files of one journal that a start reads."""

    def __init__(self, disk: Disk, directory: str, store_id: bytes, first_offset: int) -> None:
        self.next_offset = first_offset
        self._disk = disk
        self._directory = directory
        self._bases = journal_bases(disk, directory)
        self._read: list[JournalFile] = []
        #: Chunks of entries that their queues lack: a few dozen megabytes at most.
        self.contents: list[bytes] = []
        base = max((base for base in self._bases if base <= first_offset), default=None)
        while base is not None:
            file = JournalFile(disk, directory, base, store_id)
            for chunk in file.chunks():
                if chunk.next_offset > first_offset and directory == layout.ENTRIES:
                    self.contents.append(chunk.content)
            self._read.append(file)
            self.next_offset = max(self.next_offset, file.next_offset)
            base = file.next_offset if base < file.next_offset in self._bases else None

    def faults(self) -> Iterator[Fault]:
        """Faults of the files that a start reads, and the files that it ignores."""
        for name in self._disk.names(self._directory):
            if layout.parse_number(name) is None:
                path = f"{self._directory}/{name}"
                yield ignored(path, "not a file of a journal", "It is never read.")
        known = {file.path for file in self._read}
        for base in self._bases:
            path = layout.segment_path(self._directory, base)
            if path not in known:
                yield ignored(path, "does not continue the journal", "The next start removes it.")
        for file in self._read:
            if not file.is_journal:
                yield rebuilt(file.path, "not the head of a journal of this store")
            elif file.rest_bytes:
                what = f"{file.rest_bytes} bytes from position {file.position} are not a complete chunk"
                yield rebuilt(file.path, what)


def _copied_offset(contents: list[bytes]) -> int:
    chunk = decode_entry_chunk(contents[-1]) if contents else None
    return 0 if chunk is None else chunk.copied_offset


def _next_sequences(contents: list[bytes]) -> dict[str, int]:
    found: dict[str, int] = {}
    for content in contents:
        chunk = decode_entry_chunk(content)
        for run in chunk.runs if chunk is not None else ():
            found[run.subject] = run.first_sequence + len(run.entries) // ENTRY_BYTES
    return found


_PATH = layout.SCHEDULE_TABLE
_HELD = "The broker starts, and holds back the messages that it cannot read here."
_MENDED = "Put the file back from a backup and run `qmq delayed retry`, or start the broker with --quarantine."


def schedule_faults(disk: Disk, store_id: bytes, commit_next_offset: int) -> Iterator[Fault]:
    """Faults of the table, the schedule logs and the dispatch logs; reads every frame."""
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
        return None, "its checksum does not match"
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
