"""Makes a spare segment ahead of need, so that a full segment is followed by a file that already
exists.

Retention leaves deleted segments as spares. A log without deleted segments has none, and the disk
would have to allocate new blocks while a commit waits. So when the active segment is half full and
there is no spare, one is made. Its space is allocated at once; then it is filled with zeros in
small steps during light writes, because writing to blocks a second time is several times faster
than to blocks that were only reserved. It becomes a spare when it is full, or when it will be
needed soon, whichever comes first.

If the disk has no room for the log to grow by a step, messages are refused. So spares are removed
then, because their space is needed for messages.

Runs in a background thread. Until the last step, a rename, the file is not part of the log: a crash
before it leaves a draft that the next maker starts over, a crash after it a normal spare. No
failure here stops the broker.
"""

from __future__ import annotations

import logging
from typing import Final

from qmq_broker.errors import DiskError, NoRoomError, PoisonedError
from qmq_broker.options import StoreOptions
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk, DiskFile
from qmq_broker.storage.logs.segmented_log import SegmentedLog

_log = logging.getLogger(__name__)
#: Length of one write of zeros, synced at once so that no commit waits for many of them.
STEP_BYTES: Final = 1024 * 1024
#: A spare is started when this share of the active segment is used …
BEGUN_AT: Final = 1 / 2
#: … and finished, even if not filled, when no more than this share is left.
NEEDED_AT: Final = 1 / 8


class SpareMaker:
    """Makes spares of one commit log; belongs to one thread, parallel to the writer."""

    def __init__(self, disk: Disk, log: SegmentedLog, options: StoreOptions) -> None:
        """Changes nothing."""
        self._disk = disk
        self._log = log
        self._spares_max = options.spare_segments
        self._reserve_bytes = options.reserve_bytes
        self._step_bytes = min(options.growth_bytes, log.segment_bytes)
        self._zeros = bytes(min(STEP_BYTES, log.segment_bytes))
        self._draft: DiskFile | None = None
        self._written = 0
        self._is_prepared = False
        #: The reason why no spares are made until the next start; empty while they are made.
        self.fault = ""

    def step(self, *, is_busy: bool) -> bool:
        """Begin, continue or finish a spare; returns whether more work is due now.

        Never raises because of the disk: without room it does nothing; after a failure it stays
        off. While `is_busy`, no zeros are written.
        """
        if self.fault or not self._spares_max or self._log.poison is not None:
            return False
        try:
            return self._step(is_busy)
        except NoRoomError as error:
            _log.debug("spare segment waits for room: reason=%s", error)
            self._give_up()
        except (DiskError, PoisonedError) as error:
            self.fault = str(error)
            _log.error("no spare segments are made until the next start: reason=%s", error)
            self.close()
        return False

    def close(self) -> None:
        """Close the draft without finishing it. Safe to call twice."""
        if self._draft is not None:
            self._draft.close()
            self._draft = None

    def _step(self, is_busy: bool) -> bool:
        if not self._is_prepared:
            self._remove_draft()  # left by an earlier run: its space may be needed
            self._is_prepared = True
        segment_bytes = self._log.segment_bytes
        left_bytes = segment_bytes - self._log.written_offset % segment_bytes
        if self._disk.free_bytes() < self._reserve_bytes + self._step_bytes:
            return self._free()
        if self._draft is None:
            is_wanted = not self._log.spare_count and left_bytes <= segment_bytes * BEGUN_AT
            if is_wanted and self._has_room(segment_bytes):
                self._begin(segment_bytes)
            return self._draft is not None
        if left_bytes <= segment_bytes * NEEDED_AT or self._written >= segment_bytes:
            self._finish()
            return False
        if is_busy:
            return False
        count = min(len(self._zeros), segment_bytes - self._written)
        self._draft.write(self._written, [self._zeros[:count]])
        self._draft.sync()
        self._written += count
        return True

    def _has_room(self, segment_bytes: int) -> bool:
        """Whether there is room for the spare and one more segment: a spare is optional."""
        return self._disk.free_bytes() >= self._reserve_bytes + 2 * segment_bytes

    def _free(self) -> bool:
        """Remove the draft, or otherwise one spare; returns whether there was one."""
        if self._draft is not None:
            self._give_up()
            return True
        return self._log.remove_spare()

    def _begin(self, segment_bytes: int) -> None:
        self._draft = self._disk.open(layout.SPARE_DRAFT, is_new=True)
        self._written = 0
        self._draft.allocate(segment_bytes)
        self._draft.sync()

    def _finish(self) -> None:
        assert self._draft is not None
        self._draft.sync()
        self.close()
        if self._log.spare_count < self._spares_max:
            self._log.add_spare(layout.SPARE_DRAFT)
        else:
            self._remove_draft()

    def _give_up(self) -> None:
        self.close()
        try:
            self._remove_draft()
        except DiskError as error:
            self.fault = str(error)

    def _remove_draft(self) -> None:
        directory, _, name = layout.SPARE_DRAFT.rpartition("/")
        if name in self._disk.names(directory):
            self._disk.unlink(layout.SPARE_DRAFT)
