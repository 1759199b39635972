"""The key index of a store: finds frames by message id and by key.

::

    index/<17 digits>    files of entries, see key_index_file.py; each covers a range of the log
    state/index          MessagePack of IndexTable and a checksum line

Derived, and always behind the log. `step` indexes the next frames that no file covers, a bounded
number of bytes at a time, in a separate thread; no send waits for it. A missing or damaged file
leaves a gap, and gaps are indexed again; without a table, the whole log is. No failure here stops
the broker: without room the index waits, after a failed call it is switched off until the next
start, and searches scan the parts that it does not cover (`key_search.py`).
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from threading import Lock
from typing import Final

import msgspec

from qmq_broker.errors import CorruptionError, DiskError, NoRoomError, disk_full
from qmq_broker.options import StoreOptions
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.small_file import read_file, replace_file, unseal
from qmq_broker.storage.index.index_keys import frame_keys
from qmq_broker.storage.index.key_index_file import IndexFile, IndexFileState
from qmq_broker.storage.logs.frame_scan import ReadAhead
from qmq_broker.storage.logs.frame_seek import (
    LogRange,
    frame_at_or_after,
    read_message_frame,
    read_stamp,
)
from qmq_broker.storage.logs.segments import Segments
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import FrameKind, MessageFrame

_log = logging.getLogger(__name__)
#: Entries kept in memory before they are written: 1.3 MB.
TAIL_BYTES_MAX: Final = 65_536 * 20
#: Log bytes after which the table is written again: without the table a search would scan this much.
NOTE_BYTES: Final = 256 * 1024 * 1024
#: Entries per slot of a full file, as in RocketMQ.
ENTRIES_PER_SLOT: Final = 4
#: Kinds with a place in a consume queue; a delayed message gets one when it is released.
INDEXED_KINDS: Final = frozenset({FrameKind.MESSAGES, FrameKind.RELEASED})

#: The current beginning and durable end of the commit log.
LogBounds = Callable[[], LogRange]


class IndexTable(msgspec.Struct, frozen=True, array_like=True):
    """How much of the key index is in its files."""

    store_id: bytes
    #: In the order of the log; the last one may still grow.
    files: tuple[IndexFileState, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexStep:
    """The result of one step."""

    log_bytes: int = 0
    messages: int = 0
    #: Whether more work may be left now.
    is_unfinished: bool = False


class KeyIndex:
    """The files of one store.

    `step`, `finish` and `close` belong to one thread; the rest is for any.
    """

    def __init__(
        self,
        disk: Disk,
        segments: Segments,
        options: StoreOptions,
        *,
        store_id: bytes,
        bounds: LogBounds,
    ) -> None:
        """Reads only the table and the names of files; changes nothing."""
        self._disk = disk
        self._segments = segments
        self._entries_max = options.index_entries
        self._slot_count = max(1, options.index_entries // ENTRIES_PER_SLOT)
        self._files_max = options.index_files
        self._reserve_bytes = options.reserve_bytes
        self._note_bytes = min(options.queue_flush_bytes, NOTE_BYTES)
        self._store_id = store_id
        self._bounds = bounds
        self._lock = Lock()
        #: By the range of the log they cover; the ranges do not overlap.
        self._files = self._known_files()
        self._growing: IndexFile | None = None
        self._is_prepared = False
        self._is_noted = True
        #: Log bytes indexed since the table was written.
        self._unnoted_bytes = 0
        #: Files that a reader found damaged, with the reason.
        self._suspects: list[tuple[IndexFile, str]] = []
        #: The reason why there is no index until the next start; empty while there is one.
        self.fault = "" if self._entries_max else "switched off"

    def files(self) -> list[IndexFile]:
        """The files in the order of the log."""
        with self._lock:
            return list(self._files)

    def cover(self, within: LogRange) -> tuple[list[IndexFile], list[LogRange]]:
        """The files that can be searched, and the parts of this range that none of them covers.

        Both belong to one moment: together they cover the whole range.
        """
        files = [file for file in self.files() if file.is_usable]
        return files, [gap for gap in _gaps(files, within) if gap.length]

    def gaps(self, within: LogRange) -> list[LogRange]:
        """The parts of this range without a file, or with one that was not reopened yet."""
        return self.cover(within)[1]

    @property
    def indexed_offset(self) -> int:
        """The commit log below this offset is indexed."""
        within = self._bounds()
        gaps = self.gaps(within)
        return gaps[0].first_offset if gaps else within.next_offset

    def step(self, bytes_max: int) -> IndexStep:
        """Index about this many bytes of the log, or check files, if either is due.

        Never raises because of the disk: without room it does nothing; after a failure it stays off.
        """
        if self.fault:
            return IndexStep()
        try:
            return self._step(bytes_max)
        except NoRoomError as error:
            _log.debug("key index waits for room: reason=%s", error)
        except DiskError as error:
            self._turn_off(str(error))
        return IndexStep()

    def note(self) -> None:
        """Write all entries to the files and update the table; durable on return."""
        if self._growing is not None:
            self._growing.flush()
            self._growing.sync()
        files = [file for file in self.files() if file.count]
        self._disk.sync_directory(layout.INDEX)
        table = IndexTable(self._store_id, tuple(file.state() for file in files))
        replace_file(self._disk, layout.INDEX_TABLE, msgspec.msgpack.encode(table))
        self._unnoted_bytes = 0
        self._is_noted = True

    def finish(self) -> None:
        """Update the table if needed; never raises because of the disk.

        Requires: no step is under way.
        """
        if self.fault or not self._is_prepared or self._is_noted:
            return
        try:
            self.note()
        except (DiskError, NoRoomError) as error:
            _log.warning("key index not noted: reason=%s", error)

    def close(self) -> None:
        """Close all files without updating the table. Safe to call twice."""
        for file in self.files():
            file.close()

    def suspect(self, file: IndexFile, reason: str) -> None:
        """Report a damaged file: the next step drops it and indexes its range again."""
        with self._lock:
            self._suspects.append((file, reason))

    def _step(self, bytes_max: int) -> IndexStep:
        self._prepare()
        while self._suspects:
            self._give_up_file(*self._suspects.pop())
        within = self._bounds()
        self._drop_below(within.first_offset)
        gaps = self.gaps(self._kept(within))
        if not gaps:
            if self._growing is None and not self._is_noted:
                self.note()
            return IndexStep(is_unfinished=self._check_some())
        file = self._file_at(gaps[0].first_offset)
        done = self._index(file, gaps[0].next_offset, bytes_max)
        is_rest = len(gaps) > 1 or not all(one.is_checked for one in self.files())
        done = replace(done, is_unfinished=done.is_unfinished or is_rest)
        file = self._growing or file
        if file.tail_bytes >= TAIL_BYTES_MAX:
            self._check_room(file.tail_bytes)
            file.flush()
        self._unnoted_bytes += done.log_bytes
        if self._unnoted_bytes >= self._note_bytes:
            self.note()
        return done

    def _kept(self, within: LogRange) -> LogRange:
        """The range to cover, without the files that were removed because there were too many."""
        files = self.files()
        if len(files) < self._files_max:
            return within
        return LogRange(max(within.first_offset, files[0].first_offset), within.next_offset)

    def _index(self, file: IndexFile, next_offset: int, bytes_max: int) -> IndexStep:
        """Add the next frames of a gap that ends at `next_offset` to the growing file."""
        log_bytes = messages = 0
        ahead_bytes = min(bytes_max, next_offset - file.next_offset)
        log = ReadAhead(self._segments, ahead_bytes)
        while file.next_offset < next_offset and log_bytes < bytes_max:
            offset = file.next_offset
            try:
                header = read_stamp(log, offset)
                if header.kind in INDEXED_KINDS:
                    file = self._add(file, read_message_frame(log, offset))
                    messages += header.record_count
            except (CorruptionError, ProtocolError) as error:
                self._skip(file, next_offset, str(error))
                continue
            file.next_offset = offset + header.frame_bytes
            self._is_noted = False
            log_bytes += header.frame_bytes
        return IndexStep(
            log_bytes=log_bytes, messages=messages, is_unfinished=file.next_offset < next_offset
        )

    def _add(self, file: IndexFile, frame: MessageFrame) -> IndexFile:
        """Index one frame, in a new file if this one is full; returns the file."""
        keys, header = frame_keys(frame), frame.header
        if file.count and file.count + keys.entry_count > self._entries_max:
            offset = file.next_offset
            self._seal()
            file = self._file_at(offset)
        if not file.count:
            self._check_room(self._entries_max * 20 + self._slot_count * 4)
            file.begin(self._free_name(header.stored_at_ms), header.stored_at_ms)
        file.add(keys, offset=header.physical_offset, stored_at_ms=header.stored_at_ms)
        return file

    def _skip(self, file: IndexFile, next_offset: int, reason: str) -> None:
        """Continue after a damaged range, or at the current beginning of the log."""
        offset = file.next_offset
        first_offset = self._bounds().first_offset
        if first_offset > offset:
            file.next_offset = min(first_offset, next_offset)
            return
        header = frame_at_or_after(self._segments, LogRange(offset + 1, next_offset))
        file.next_offset = next_offset if header is None else header.physical_offset
        after = file.next_offset
        _log.warning("log not indexed: offset=%d next_offset=%d reason=%s", offset, after, reason)

    def _file_at(self, offset: int) -> IndexFile:
        """The growing file, if it continues at `offset`; otherwise a new one."""
        growing = self._growing
        if growing is not None and growing.next_offset == offset:
            return growing
        if growing is not None:
            self._seal()
        file = IndexFile(
            self._disk, self._store_id, first_offset=offset, slot_count=self._slot_count
        )
        with self._lock:
            insort(self._files, file, key=_first_offset)
        self._growing = file
        return file

    def _seal(self) -> None:
        assert self._growing is not None
        self._growing.seal()
        self._growing = None
        surplus = self.files()[: -self._files_max]
        for file in surplus:
            self._forget(file)
        try:
            self.note()
        finally:  # after the table, which may name only existing files; they are removed without room too
            for file in surplus:
                file.remove()

    def _prepare(self) -> None:
        """Once: remove files that the table does not name, and reopen the growing file."""
        if self._is_prepared:
            return
        files = self.files()
        known = {file.name for file in files}
        for name in self._disk.names(layout.INDEX):
            if layout.is_index_name(name) and name not in known:
                self._disk.unlink(layout.index_path(name))
        for file in files:
            if not file.is_sealed:
                try:
                    file.take_up()
                    self._growing = file
                except (CorruptionError, DiskError) as error:
                    self._give_up_file(file, str(error))
        self._is_prepared = True

    def _check_some(self) -> bool:
        """Check one megabyte of an unchecked file; returns whether there may be more to check."""
        file = next((file for file in self.files() if not file.is_checked), None)
        if file is None:
            return False
        try:
            file.check_some()
        except (CorruptionError, DiskError) as error:
            self._give_up_file(file, str(error))
        return True

    def _give_up_file(self, file: IndexFile, reason: str) -> None:
        if file in self.files():
            _log.warning("key index file given up: file=%s reason=%s", file.path, reason)
            self._remove(file)

    def _drop_below(self, offset: int) -> None:
        """Remove the files that cover nothing at or above `offset`."""
        for file in [file for file in self.files() if file.next_offset <= offset]:
            self._remove(file)

    def _remove(self, file: IndexFile) -> None:
        self._forget(file)
        file.remove()

    def _forget(self, file: IndexFile) -> None:
        with self._lock:
            self._files.remove(file)
        if file is self._growing:
            self._growing = None
        self._is_noted = False

    def _free_name(self, stored_at_ms: int) -> str:
        """The time as a file name, or the next millisecond whose name is free."""
        taken = {file.name for file in self.files()} | set(self._disk.names(layout.INDEX))
        while (name := layout.index_name(stored_at_ms)) in taken:
            stored_at_ms += 1
        return name

    def _check_room(self, count: int) -> None:
        if not self._reserve_bytes:
            return
        free_bytes, reserve_bytes = self._disk.free_bytes(), self._reserve_bytes
        if free_bytes - count < reserve_bytes:
            raise disk_full(free_bytes=free_bytes, needed_bytes=count, reserve_bytes=reserve_bytes)

    def _turn_off(self, reason: str) -> None:
        self.fault = reason
        _log.error("no key index until the next start: reason=%s", reason)
        with self._lock:
            files, self._files = self._files, []
        for file in files:
            file.close()

    def _known_files(self) -> list[IndexFile]:
        data = read_file(self._disk, layout.INDEX_TABLE)
        content = None if data is None else unseal(data)
        if content is None or not self._entries_max:
            return []
        try:
            table = msgspec.msgpack.decode(content, type=IndexTable)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return []
        # A restored copy may lack frames that the table covers: then the table is ignored.
        end = self._bounds().next_offset
        if table.store_id != self._store_id or not _is_in_order(table.files, end):
            return []
        # A file may have been removed with its part of the log, before a kill prevented the update of the table.
        there = set(self._disk.names(layout.INDEX))
        states = [state for state in table.files if state.name in there]
        return [IndexFile.of_state(self._disk, self._store_id, state) for state in states]


def _is_in_order(states: tuple[IndexFileState, ...], next_offset: int) -> bool:
    """Whether the ranges follow each other within the log, and the names are possible ones."""
    offset = 0
    for state in states:
        is_name = layout.is_index_name(state.name)
        if not offset <= state.first_offset < state.next_offset <= next_offset or not is_name:
            return False
        offset = state.next_offset
    return True


def _gaps(files: list[IndexFile], within: LogRange) -> Iterator[LogRange]:
    offset = within.first_offset
    for file in files:
        yield LogRange(offset, min(file.first_offset, within.next_offset))
        offset = max(offset, file.next_offset)
    yield LogRange(offset, within.next_offset)


def _first_offset(file: IndexFile) -> int:
    return file.first_offset
