"""All consume queues of a store, their files, and the journal of newer entries.

::

    state/queues           the table (queue_table.py), and the one before it
    entries/<20 digits>    the journal of entries that are not in the files (files/journal.py, entry_chunk.py)

Up to `indexed_offset` of the commit log, entries are in the files, with the checksums in the table.
From there to `known_offset` they are in the journal, and beyond that each start makes them from the
log. If a file does not match the table, the start goes back to the previous table; if that does not
match either, all queues are rebuilt from the beginning of the log. Derived files may be deleted at
any time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from qmq_broker.errors import CorruptionError
from qmq_broker.options import StoreOptions
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.journal import Journal
from qmq_broker.storage.files.retained import Retained
from qmq_broker.storage.queues.consume_queue import ConsumeQueue
from qmq_broker.storage.queues.entry_chunk import (
    EntryChunk,
    EntryRun,
    decode_entry_chunk,
    encode_entry_chunk,
)
from qmq_broker.storage.queues.queue_files import ENTRY_BYTES, QueueFiles
from qmq_broker.storage.queues.queue_table import (
    QueueState,
    QueueTable,
    read_queue_tables,
    write_queue_table,
)

#: Entries in memory that are not in the files. Beyond this a flush begins, and a start writes them
#: there.
UNFLUSHED_BYTES_MAX: Final = 64 * 1024 * 1024
#: Flushed entries of each queue that stay in memory at most, because the newest are read most; with
#: thousands of queues each keeps less.
HOT_ENTRIES: Final = 1024
HOT_BYTES_MAX: Final = 32 * 1024 * 1024
#: With more queues than this to flush, no file is synced: thousands of syncs would hold up commits
#: for minutes. Entries that a power cut removes are rebuilt.
SYNCED_QUEUES_MAX: Final = 256
#: Queues flushed between two commits, with a sync each and without; together a few milliseconds.
SYNCED_PER_STEP: Final = 8
UNSYNCED_PER_STEP: Final = 64


class _Flush(NamedTuple):
    """A flush under way: the new table, and the remaining queues with their ends."""

    indexed_offset: int
    queues: list[tuple[ConsumeQueue, int]]
    #: Whether each file is synced.
    is_synced: bool


class ConsumeQueues:
    """The queues by subject. Changed by the writer thread only, read by any."""

    def __init__(self, disk: Disk, options: StoreOptions, store_id: bytes) -> None:
        self._disk = disk
        self._store_id = store_id
        self._files = QueueFiles(
            disk,
            entries_per_file=options.queue_entries_per_file,
            open_files=options.open_files,
        )
        self._journal = Journal(disk, layout.ENTRIES, store_id)
        self._queues: dict[str, ConsumeQueue] = {}
        self._staged: dict[str, ConsumeQueue] = {}
        self._unflushed: dict[str, ConsumeQueue] = {}
        self._unjournaled: dict[str, ConsumeQueue] = {}
        self._flush: _Flush | None = None
        self._first_sequences: dict[str, int] = {}
        self._removed: set[str] = set()
        #: Whether files hold entries that are not in the table.
        self._is_flushed_ahead = False
        #: Commit log offset below which all entries are in the files.
        self.indexed_offset = 0
        #: The same according to the previous table: below it the journal is not needed.
        self._kept_offset = 0
        #: Packed bytes that are not in the files.
        self.unflushed_bytes = 0
        #: According to the journal, all delayed messages in the commit log below this are in their
        #: own files.
        self.copied_offset = 0

    @property
    def known_offset(self) -> int:
        """Commit log offset below which a start knows all entries without reading frames."""
        return max(self.indexed_offset, self._journal.next_offset)

    def load(self, log_next_offset: int, retained: Retained) -> bool:
        """Load files and journal; returns whether any of them could be used.

        Changes no file. `log_next_offset` is where the commit log ends. A table of entries that
        were synced after it means that accepted messages are missing: `CorruptionError`.
        """
        self._first_sequences = retained.first_sequences
        self._removed = set(retained.removed)
        tables = list(read_queue_tables(self._disk, self._store_id))
        has_files = any(self._take_over(table, log_next_offset, retained) for table in tables)
        if not has_files:
            self._start_over(retained)
        offsets = [table.indexed_offset for table in tables]
        self._kept_offset = min([self.indexed_offset, *offsets])
        # From the previous table on, to keep the journal that it needs, unless a part is missing.
        for first_offset in sorted({self._kept_offset, self.indexed_offset}):
            self._kept_offset = first_offset
            self._journal.disbelieve(first_offset)
            if self._load_journal(first_offset, log_next_offset):
                break
        if self.known_offset < retained.first_offset:
            # From the previous table, without the later journal: the missing entries are not in the log either.
            self._start_over(retained)
            self._kept_offset = self.indexed_offset
            self._journal.disbelieve(self.indexed_offset)
            return False
        return has_files or self.known_offset > self.indexed_offset

    def _load_journal(self, first_offset: int, log_next_offset: int) -> bool:
        """Continue from the files with the journal, as far as it matches; returns whether it does."""
        known_offset = self.indexed_offset
        for chunk in self._journal.read(first_offset, log_next_offset):
            found = decode_entry_chunk(chunk.content)
            if found is None or not all(map(self._follows, found.runs)):
                self._journal.disbelieve(known_offset)
                return True
            for run in found.runs:
                known = self.staged_sequence(run.subject)
                entries = run.entries[max(0, known - run.first_sequence) * ENTRY_BYTES :]
                if entries:
                    self.stage(run.subject, known, entries, offset=chunk.first_offset)
            self.make_visible()
            self.copied_offset = found.copied_offset
            known_offset = max(known_offset, chunk.next_offset)
        self._set_journaled()
        return self._journal.next_offset >= self.indexed_offset

    def _follows(self, run: EntryRun) -> bool:
        """Whether there is no gap between a queue and these entries; they may overlap."""
        is_whole = not len(run.entries) % ENTRY_BYTES
        return is_whole and run.first_sequence <= self.staged_sequence(run.subject)

    def _set_journaled(self) -> None:
        for queue in self._unjournaled.values():
            queue.journaled_sequence = queue.next_sequence
        self._unjournaled.clear()

    def start_journal(self, *, next_offset: int) -> None:
        """Get the journal ready to append.

        Requires: the commit log ends durably at `next_offset`.

        If the log gave more entries than a journal should hold, they are written to the files.
        """
        self._journal.start()
        if self._is_flushed_ahead:
            self.flush(next_offset)
            self._journal.restart(next_offset)
            self._set_journaled()
            self._is_flushed_ahead = False

    def write_journal(self, durable_offset: int, copied_offset: int) -> None:
        """Write all visible entries to the journal; durable on return.

        Requires: exactly the frames below `durable_offset` were staged and published. The next
        start finds `copied_offset` there. Raises `NoRoomError` with nothing lost.
        """
        if durable_offset <= self.known_offset:
            return
        runs = [
            EntryRun(subject, *queue.unjournaled()) for subject, queue in self._unjournaled.items()
        ]
        self._journal.append(durable_offset, encode_entry_chunk(EntryChunk(copied_offset, runs)))
        self._set_journaled()

    def _start_over(self, retained: Retained) -> None:
        """Go back to the beginning of the log: all queues are rebuilt from there."""
        there = retained.first_sequences.keys() - self._removed
        self._queues = {subject: self._new_queue(subject) for subject in there}
        for waiting in (self._staged, self._unflushed, self._unjournaled):
            waiting.clear()
        self.unflushed_bytes = self.copied_offset = 0
        self.indexed_offset = retained.first_offset

    def _take_over(self, table: QueueTable, log_next_offset: int, retained: Retained) -> bool:
        if table.indexed_offset > log_next_offset:
            raise CorruptionError(
                segment=layout.COMMIT_LOG,
                offset=log_next_offset,
                reason=f"the log ends here, but {layout.QUEUE_TABLE} says synced up to offset "
                f"{table.indexed_offset}",
            )
        if next(self._files.unfit(table, retained), None) is not None:
            return False
        for state in table.queues:
            if retained.is_removed(state.subject, state.next_sequence):
                continue
            self._queues[state.subject] = ConsumeQueue(
                state.subject,
                self._files,
                first_sequence=retained.first_sequences.get(state.subject, 0),
                flushed_sequence=state.next_sequence,
                crcs=state.crcs,
            )
        self.indexed_offset = table.indexed_offset
        return True

    def is_empty(self, subject: str) -> bool:
        """Whether all messages of this subject are deleted, and no flush or journal has entries of it."""
        queue = self._queues[subject]
        waits = subject in self._staged or subject in self._unflushed or self.is_flushing
        return queue.first_sequence == queue.staged_sequence and not waits

    def remove(self, subject: str, first_sequences: dict[str, int]) -> None:
        """Forget a subject. Requires: it is empty, and durably recorded as removed."""
        self._first_sequences = first_sequences
        self._removed.add(subject)
        del self._queues[subject]
        self._unjournaled.pop(subject, None)
        self._files.remove(subject)

    def removed(self) -> tuple[str, ...]:
        """Removed subjects that do not exist again. For any thread."""
        return tuple(sorted(one for one in self._removed if one not in self._queues))

    def sequences_at(self, offset: int) -> dict[str, int]:
        """For each queue, the first sequence whose record is at or after `offset`.

        For any thread.

        Only queues that lose entries below it. Requires: the log is durable up to there.
        """
        found = {
            subject: queue.sequence_at(offset)
            for subject, queue in list(self._queues.items())
            if queue.next_sequence
        }
        return {subject: sequence for subject, sequence in found.items() if sequence}

    def give_up_below(self, first_sequences: dict[str, int]) -> None:
        """Hide all entries below these sequences from now on."""
        self._first_sequences = first_sequences
        for subject, first_sequence in first_sequences.items():
            queue = self._queues.get(subject)
            if queue is not None:  # otherwise it was removed
                queue.first_sequence = max(queue.first_sequence, first_sequence)

    def remove_given_up(self) -> None:
        """Remove the files that hold only hidden entries."""
        for subject in list(self._queues):
            first_sequence = self._first_sequences.get(subject, 0)
            self._files.remove_below(subject, first_sequence)

    def _new_queue(self, subject: str) -> ConsumeQueue:
        first_sequence = self._first_sequences.get(subject, 0)
        return ConsumeQueue(
            subject,
            self._files,
            first_sequence=first_sequence,
            flushed_sequence=first_sequence,
        )

    def subjects(self) -> list[str]:
        """Subjects with visible messages, sorted."""
        return sorted(
            subject for subject, queue in list(self._queues.items()) if queue.next_sequence
        )

    def visible(self, subject: str) -> ConsumeQueue | None:
        """The queue of a subject; None until it has a visible message."""
        queue = self._queues.get(subject)
        return queue if queue is not None and queue.next_sequence else None

    def staged_sequence(self, subject: str) -> int:
        """The sequence that the next message of the subject gets."""
        queue = self._queues.get(subject)
        if queue is None:
            return self._first_sequences.get(subject, 0)
        return queue.staged_sequence

    def stage(
        self, subject: str, first_sequence: int, entries: bytes | bytearray, *, offset: int
    ) -> None:
        """Add the entries of one run of the frame at `offset`.

        Raises `CorruptionError` if the run does not begin where the queue ends: sequences are dense
        by construction, so the log itself would be wrong.
        """
        queue = self._queues.get(subject)
        if queue is None:
            queue = self._queues[subject] = self._new_queue(subject)
        if queue.staged_sequence != first_sequence:
            raise CorruptionError(
                segment=layout.COMMIT_LOG,
                offset=offset,
                reason=f"first sequence {first_sequence} of subject {subject}, "
                f"whose next is {queue.staged_sequence}",
            )
        queue.stage(entries)
        self._staged[subject] = queue
        self.unflushed_bytes += len(entries)

    def make_visible(self) -> None:
        """Make all staged entries visible. Requires: the commit log was synced."""
        for queue in self._staged.values():
            queue.make_visible()
        self._unflushed.update(self._staged)
        self._unjournaled.update(self._staged)
        self._staged.clear()

    @property
    def unflushed_count(self) -> int:
        """How many queues have entries that are not in their files."""
        return len(self._unflushed) + (len(self._flush.queues) if self._flush else 0)

    @property
    def is_flushing(self) -> bool:
        """Whether a flush was begun and is not finished."""
        return self._flush is not None

    def begin_flush(self, indexed_offset: int) -> None:
        """Plan to write all currently visible entries to the files.

        Requires: nothing is staged, and all frames below `indexed_offset` were.
        """
        queues = [(queue, queue.next_sequence) for queue in self._unflushed.values()]
        self._flush = _Flush(indexed_offset, queues, len(queues) <= SYNCED_QUEUES_MAX)
        self._unflushed = {}
        self._journal.roll()

    def flush_some(self) -> bool:
        """Continue the flush with some queues; returns whether it is finished.

        In portions, so that thousands of subjects do not delay a commit. At the end the table is
        synced; the previous one and the journal since then are kept.
        """
        flush = self._flush
        if flush is None:
            return True
        queues_max = SYNCED_PER_STEP if flush.is_synced else UNSYNCED_PER_STEP
        for _ in range(min(queues_max, len(flush.queues))):
            self._flush_one(*flush.queues[-1], is_synced=flush.is_synced)
            flush.queues.pop()
        if flush.queues:
            return False
        if flush.is_synced:
            self._files.sync_names()
        table = QueueTable(
            store_id=self._store_id,
            indexed_offset=flush.indexed_offset,
            queues=tuple(self._states()),
        )
        write_queue_table(self._disk, table)
        self._kept_offset, self.indexed_offset = self.indexed_offset, flush.indexed_offset
        self._flush = None
        self._journal.remove_below(self._kept_offset)
        return True

    def give_up_flush(self) -> None:
        """Leave the rest of a flush to the next one; the entries stay in memory."""
        if self._flush is not None:
            self._unflushed = {queue.subject: queue for queue, _ in self._flush.queues} | (
                self._unflushed
            )
            self._flush = None

    def flush(self, indexed_offset: int) -> None:
        """Write all visible entries to the files at once, and update the table."""
        self.give_up_flush()
        self.begin_flush(indexed_offset)
        while not self.flush_some():
            pass

    def flush_entries(self) -> None:
        """Write all visible entries to the files without updating the table."""
        self._is_flushed_ahead = True
        is_synced = len(self._unflushed) <= SYNCED_QUEUES_MAX
        while self._unflushed:
            _, queue = self._unflushed.popitem()
            self._flush_one(queue, queue.next_sequence, is_synced=is_synced)

    def _flush_one(self, queue: ConsumeQueue, next_sequence: int, *, is_synced: bool) -> None:
        first_sequence, entries = queue.unflushed(next_sequence)
        queue.crcs = self._files.add(
            queue.subject, first_sequence, entries, queue.crcs, is_synced=is_synced
        )
        hot_entries = HOT_BYTES_MAX // ENTRY_BYTES // len(self._queues)
        queue.set_flushed(next_sequence, hot_entries=min(HOT_ENTRIES, hot_entries))
        self.unflushed_bytes -= len(entries)

    def close(self) -> None:
        """Close all files. Safe to call twice."""
        self._journal.close()
        self._files.close()

    def _states(self) -> Iterator[QueueState]:
        for subject, queue in self._queues.items():
            if queue.flushed_sequence:
                yield QueueState(subject, queue.flushed_sequence, tuple(queue.crcs))
