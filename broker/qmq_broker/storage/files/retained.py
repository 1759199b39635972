"""The file with the beginning of the commit log, written when the oldest segments are deleted.

::

    state/retained    MessagePack of Retained and a checksum line

Not derived: a subject whose messages are all deleted keeps its next sequence here, so that no
sequence is used twice; so does a removed subject. Written durably before the first segment is
removed. From then on files below `first_offset` are not part of the log, and the next start deletes
them. Without the file no segment was deleted yet. A draft always exists next to it, so that
segments can be deleted on a full disk.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.small_file import keep_room, read_truth, replace_file

#: Bytes of one subject besides its name: the name's length and a number.
_SUBJECT_BYTES: Final = 12
#: Most removed subjects that do not exist again: each takes some hundred bytes permanently.
REMOVED_MAX: Final = 100_000
#: The reserved room is enough until the number of subjects has doubled, or for this many if there are few.
_SUBJECTS_GROWTH: Final = 2
_FEW_SUBJECTS_BYTES: Final = 4_096


class Retained(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The lower end of the commit log."""

    store_id: bytes
    #: Where its first segment begins.
    first_offset: int
    #: The first existing sequence of each subject with deleted messages.
    first_sequences: dict[str, int]
    #: The removed ones of these subjects. A removed subject that gets a message again continues at its next sequence.
    removed: tuple[str, ...] = ()

    def is_removed(self, subject: str, next_sequence: int) -> bool:
        """Whether a subject with this next sequence is still removed, and did not get messages again."""
        return subject in self.removed and next_sequence <= self.first_sequences[subject]


def read_retained(disk: Disk, store_id: bytes) -> Retained:
    """Read the lower end; raises `CorruptionError` if the file is damaged."""
    retained = read_truth(disk, layout.RETAINED, Retained, store_id)
    return retained or Retained(store_id, 0, {})


def write_retained(disk: Disk, retained: Retained) -> None:
    """Move the beginning of the log; durable on return."""
    # Without removed subjects the file has the form of earlier versions, which they can read.
    fields = msgspec.structs.astuple(retained)
    content = fields if retained.removed else fields[:-1]
    replace_file(disk, layout.RETAINED, msgspec.msgpack.encode(content))


def keep_room_for_retained(disk: Disk, subjects: Iterable[str]) -> None:
    """Reserve room so that the file can be replaced with these subjects on a full disk, if there is room now."""
    subjects_bytes = sum(len(name) + _SUBJECT_BYTES for name in subjects)
    keep_room(disk, layout.RETAINED, _SUBJECTS_GROWTH * subjects_bytes + _FEW_SUBJECTS_BYTES)
