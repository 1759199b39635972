"""Retention: deletes the oldest segments of the commit log; no commit waits for that.

::

    noted      parallel to the writer   new beginning of each queue, then state/retained, durably
    taken      by the writer       readers no longer read below it
    removed    parallel to the writer   files of the log and of the queues; some segments stay as spares

Finding the new beginning of ten thousand queues means reading all of their files, and a file system
may take a second to remove a GiB. So the writer only starts such work and checks the result later.
A crash leaves the old beginning, or the new one plus files below it, which the next start removes.

Retention never deletes what a restart needs: the segment of the last checkpoint, ids of the dedupe
window, entries that are not in their files, delayed messages that were not copied. Segments that a
keeper does not have yet (`keepers.py`) are deleted only by force.

Another thread decides whether a group still needs a segment, and requests the deletion. From then
on no group can seek there, so the decision need not be checked again.
"""

from __future__ import annotations

import logging

from qmq_broker.errors import NoRoomError
from qmq_broker.options import StoreOptions
from qmq_broker.storage.files.background import Background
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.keepers import keep_room_for_keepers
from qmq_broker.storage.files.retained import (
    Retained,
    keep_room_for_retained,
    write_retained,
)
from qmq_broker.storage.keepers import Keepers
from qmq_broker.storage.saving import Saved, Saver

_log = logging.getLogger(__name__)


class Retention:
    """The lower end of one commit log; belongs to the writer thread.

    Every method but the properties raises `DiskError` when the disk fails; nothing may be written
    after that.
    """

    def __init__(
        self,
        disk: Disk,
        options: StoreOptions,
        parts: Saved,
        saver: Saver,
        *,
        retained: Retained,
        keepers: Keepers,
    ) -> None:
        self._disk = disk
        self._options = options
        self._parts = parts
        self._saver = saver
        self._retained = retained
        self._keepers = keepers
        #: The beginning of the log, or its beginning after the work under way. No new keeper can start below it.
        self.coming_offset = retained.first_offset
        #: Offset below which the writer was asked to delete, until it begins; 0 for none. Set by
        #: the requesting thread, which waits for 0 before the next request.
        self.asked_offset = 0
        #: The new beginning that was written parallel to the writer, for the writer to take over.
        self._noted: Retained | None = None
        #: Runs long work.
        self.background = Background()
        keep_room_for_keepers(disk)
        self._keep_room()

    @property
    def first_offset(self) -> int:
        """The beginning of the commit log; earlier segments were deleted. For any thread."""
        return self._retained.first_offset

    @property
    def spared_offset(self) -> int:
        """No group can begin or be moved below this: earlier messages may be deleted at any moment.

        For the requesting thread.
        """
        # In this order: a request is cleared only after its result is recorded.
        return max(self.asked_offset, self.coming_offset)

    def expired_offset(self, now_ms: int) -> int:
        """The offset below which the log may be deleted if no group needs it; a segment begins there.

        Ignores entries and delayed messages that are not saved, because a request causes their
        saving. After a request, nothing may be deleted before the first segment is saved, which
        takes long on a full disk. For any thread.
        """
        first_offset, last = self.first_offset, self._saver.last
        is_asked = self._saver.wanted_offset > first_offset
        if is_asked and self._parts.commit_log.base_of(self._saved_offset()) <= first_offset:
            return first_offset
        needed_offset = min(last.commit_log.last_frame_offset, last.window_offset)
        offset = min(self._wanted_offset(now_ms), needed_offset)
        return self._parts.commit_log.base_of(offset)

    def look_for_old_ids(self, now_ms: int) -> None:
        """Make the window forget expired ids if they prevent a deletion. For any thread.

        Ids expire by the log's own time, which stands still while nothing can be stored, such as on
        a disk full of expired segments.
        """
        is_in_the_way = self._saver.last.window_offset < self._wanted_offset(now_ms)
        self._saver.is_forgetting = is_in_the_way

    def old_offset(self, now_ms: int) -> int:
        """The offset below which age and length alone allow a deletion; a segment begins there. For any thread."""
        log, options = self._parts.commit_log, self._options
        too_long_offset = log.written_offset - options.retain_bytes if options.retain_bytes else 0
        bases = log.bases()
        expired_offset = bases[0] if bases else 0
        for base in bases[1:]:
            # A segment got its last message when the next one was created.
            is_old = log.made_at_ms(base) <= now_ms - options.retain_ms
            if not is_old and base > too_long_offset:
                break
            expired_offset = base
        return expired_offset

    def gives_up(self, offset: int) -> bool:
        """Whether a segment below `offset` could be deleted. For any thread."""
        return self._parts.commit_log.base_of(offset) > self.first_offset

    def ask(self, offset: int) -> bool:
        """Request the deletion of segments below `offset`, and keep readers out; returns whether there are any.

        Then the writer must call `give_up_below`. For the requesting thread, one request at a time.
        """
        assert not self.asked_offset
        if not self.gives_up(offset):
            return False
        self.asked_offset = self._parts.commit_log.base_of(offset)
        return True

    def give_up_below(self, offset: int) -> int:
        """Delete segments below `offset`, except those that a restart needs.

        Returns how many bytes were deleted so far; long work is continued by a later `step`. While
        an earlier request is under way nothing is started: call it again later.
        """
        before, log = self.first_offset, self._parts.commit_log
        self._saver.make_way(log.base_of(min(offset, log.durable_offset)))
        if self.step():
            first_offset = log.base_of(max(0, min(offset, self._needed_offset())))
            if first_offset > self.first_offset:
                self.coming_offset = first_offset
                self.background.begin(lambda: self._note(first_offset))
                self.step()
        return self.first_offset - before

    def step(self) -> bool:
        """Continue with the work under way; returns whether none is left."""
        while not self.background.is_busy:
            self.background.check()
            noted, self._noted = self._noted, None
            if noted is None:
                self.coming_offset = self.first_offset  # also if there was no room to record it
                return True
            self._take_over(noted)
            self.background.begin(self._remove)
        return False

    def remove_subject(self, subject: str) -> bool:
        """Forget a subject whose messages are all deleted; returns whether they are.

        Durable on return. Its next sequence is kept: if it gets messages again, it continues there.
        Requires: the subject exists. Raises `NoRoomError` with nothing changed.
        """
        queues = self._parts.queues
        if not self.step() or not queues.is_empty(subject):
            return False
        sequences = self._retained.first_sequences | {subject: queues.staged_sequence(subject)}
        removed = (*(one for one in queues.removed() if one != subject), subject)
        retained = Retained(self._retained.store_id, self.first_offset, sequences, removed)
        write_retained(self._disk, retained)
        self._retained = retained
        queues.remove(subject, sequences)
        return True

    @property
    def removed_subjects(self) -> int:
        """How many removed subjects do not exist again. For any thread."""
        return len(self._parts.queues.removed())

    def finish(self) -> None:
        """Finish the work under way, before a clean stop."""
        while not self.step():
            self.background.wait()

    def close(self) -> None:
        """Wait for work parallel to the writer: this data directory may soon belong to another process."""
        self.background.wait()

    def _wanted_offset(self, now_ms: int) -> int:
        return min(self.old_offset(now_ms), self._keepers.needed.commit)

    def _needed_offset(self) -> int:
        """The lowest offset that a restart reads or a keeper does not have."""
        parts, last = self._parts, self._saver.last
        return min(
            self._keepers.needed.commit,
            last.commit_log.last_frame_offset,
            last.window_offset,  # the remembered ids begin there or later
            self._saved_offset(),
            parts.commit_log.written_offset - 1,
        )

    def _saved_offset(self) -> int:
        """Entries and delayed messages below this are in their files. For any thread."""
        return min(self._parts.queues.indexed_offset, self._parts.schedule.copied_offset)

    def _note(self, first_offset: int) -> None:
        """Parallel to the writer: record the new beginning of the log durably, before files below it are removed."""
        removed = self._parts.queues.removed()
        sequences = {name: self._retained.first_sequences[name] for name in removed}
        sequences |= self._parts.queues.sequences_at(first_offset)
        removed = tuple(name for name in removed if name in self._retained.removed)
        retained = Retained(self._retained.store_id, first_offset, sequences, removed)
        try:
            write_retained(self._disk, retained)
        except NoRoomError as error:
            self._saver.refusals.note("retention", error)
            return
        self._noted = retained

    def _take_over(self, noted: Retained) -> None:
        given_up_bytes = noted.first_offset - self.first_offset
        self._retained = noted
        self._parts.queues.give_up_below(noted.first_sequences)
        self._parts.commit_log.give_up_below(noted.first_offset)
        _log.info("segments given up: first_offset=%d bytes=%d", noted.first_offset, given_up_bytes)

    def _remove(self) -> None:
        """Parallel to the writer: remove the files of deleted segments."""
        self._parts.commit_log.put_away()
        self._parts.queues.remove_given_up()
        self._keep_room()

    def _keep_room(self) -> None:
        """Reserve room for the next record, which must be written on a full disk before space is freed.

        Only where records are written, parallel to the writer, or before the writer begins.
        """
        keep_room_for_retained(self._disk, self._parts.queues.subjects())
