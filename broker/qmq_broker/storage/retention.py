"""Retention: deletes the oldest segments of the commit log; no commit waits for that.

::

    noted      parallel to the writer   where each queue will begin, then state/retained, durably
    taken      by the writer       nothing reads below it any more
    removed    parallel to the writer   files of the log and of the queues; some segments stay as spares

Finding where ten thousand queues begin means reading all of their files, and a file system may take
a second to remove a GiB. So the writer only starts such work and asks later how it went. A crash
leaves the old beginning, or the new one plus files below it, which the next start removes.

What a restart needs is never given up: the segment of the last checkpoint, ids that may be
repeated, entries that are not in their files, delayed messages that were not copied. What a keeper
has not got yet (`keepers.py`) is given up only by force.

Whether a group still needs something is decided in another thread, which asks for it to be given
up. From then on no group can seek there: what is decided is not looked at again.
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
        #: Where the log begins, or will begin once the work under way is done. No new keeper can
        #: start below it.
        self.coming_offset = retained.first_offset
        #: What the writer was asked to give up below, and has not begun with; 0 for nothing. Set by
        #: the thread that asks, which waits for 0 before it asks again.
        self.asked_offset = 0
        #: What was noted parallel to the writer, for the writer to take over.
        self._noted: Retained | None = None
        #: Runs what takes long.
        self.background = Background()
        keep_room_for_keepers(disk)
        self._keep_room()

    @property
    def first_offset(self) -> int:
        """Where the commit log begins; everything below was given up. For any thread."""
        return self._retained.first_offset

    @property
    def spared_offset(self) -> int:
        """No group can begin or be moved below this: what is there may go at any moment.

        For the thread that asks.
        """
        # In this order: what was asked is forgotten only when what is coming of it is noted.
        return max(self.asked_offset, self.coming_offset)

    def expired_offset(self, now_ms: int) -> int:
        """How far the log may be given up if no group needs it; a segment begins there.

        Counts neither entries nor delayed messages that are not saved: asking is what saves them.
        Once that was asked, nothing may go before the first segment is saved, which takes long on a
        full disk. For any thread.
        """
        first_offset, last = self.first_offset, self._saver.last
        is_asked = self._saver.wanted_offset > first_offset
        if is_asked and self._parts.commit_log.base_of(self._saved_offset()) <= first_offset:
            return first_offset
        needed_offset = min(last.commit_log.last_frame_offset, last.window_offset)
        offset = min(self._wanted_offset(now_ms), needed_offset)
        return self._parts.commit_log.base_of(offset)

    def look_for_old_ids(self, now_ms: int) -> None:
        """Have ids forgotten that are too old by now, if they are in the way. For any thread.

        Ids grow old by the log's own time, and that stands still while nothing can be stored, such
        as on a disk that is full of what should go.
        """
        is_in_the_way = self._saver.last.window_offset < self._wanted_offset(now_ms)
        self._saver.is_forgetting = is_in_the_way

    def old_offset(self, now_ms: int) -> int:
        """How far age and length alone allow it; a segment begins there. For any thread."""
        log, options = self._parts.commit_log, self._options
        too_long_offset = log.written_offset - options.retain_bytes if options.retain_bytes else 0
        bases = log.bases()
        expired_offset = bases[0] if bases else 0
        for base in bases[1:]:
            # A segment got its last message when the next one was begun.
            is_old = log.made_at_ms(base) <= now_ms - options.retain_ms
            if not is_old and base > too_long_offset:
                break
            expired_offset = base
        return expired_offset

    def gives_up(self, offset: int) -> bool:
        """Whether anything is below `offset` that could go. For any thread."""
        return self._parts.commit_log.base_of(offset) > self.first_offset

    def ask(self, offset: int) -> bool:
        """Keep readers from what is to be given up below `offset`; returns whether that is anything.

        Then the writer has to call `give_up_below`. For the thread that asks, once at a time.
        """
        assert not self.asked_offset
        if not self.gives_up(offset):
            return False
        self.asked_offset = self._parts.commit_log.base_of(offset)
        return True

    def give_up_below(self, offset: int) -> int:
        """Let the log begin at the last segment at or below `offset` that a restart can do without.

        Returns how many bytes were given up so far; where this takes long, a later `step` continues.
        While an earlier request is under way nothing is started: ask again.
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
                self.coming_offset = self.first_offset  # also where there was no room for the note
                return True
            self._take_over(noted)
            self.background.begin(self._remove)
        return False

    def remove_subject(self, subject: str) -> bool:
        """Forget a subject whose messages are all gone; returns whether that is so.

        Durable on return. Its place is kept: sent to again, it continues where it ended. Requires:
        there is such a subject. Raises `NoRoomError` with nothing changed.
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
        """How many were removed and did not come again. For any thread."""
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
        """The lowest offset that a restart reads or a keeper has not got."""
        parts, last = self._parts, self._saver.last
        return min(
            self._keepers.needed.commit,
            last.commit_log.last_frame_offset,
            last.window_offset,  # what is remembered by now begins there or later
            self._saved_offset(),
            parts.commit_log.written_offset - 1,
        )

    def _saved_offset(self) -> int:
        """Entries and delayed messages below this are in their files. For any thread."""
        return min(self._parts.queues.indexed_offset, self._parts.schedule.copied_offset)

    def _note(self, first_offset: int) -> None:
        """Parallel to the writer: note durably where the log begins, before anything below it goes."""
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
        """Parallel to the writer: remove the files of what was given up."""
        self._parts.commit_log.put_away()
        self._parts.queues.remove_given_up()
        self._keep_room()

    def _keep_room(self) -> None:
        """See that the next note can be written where nothing is left: it is what makes room.

        Only where notes are written, parallel to the writer, or before it begins.
        """
        keep_room_for_retained(self._disk, self._parts.queues.subjects())
