"""The beginning of the commit log, once its oldest segments were given up.

::

    state/retained    MessagePack of Retained and a checksum line

Truth, not derived: a subject whose messages are all gone keeps its place here, so that no sequence
is given twice; so does a removed subject. Written durably before the first segment is removed. From
then on everything below `first_offset` is not part of the log, and the next opening deletes it.
Without the file nothing was given up yet. A draft is always next to it, so that segments can be given
up on a full disk.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.small_file import keep_room, read_truth, replace_file

#: Of one subject next to its name: its length and a number.
_SUBJECT_BYTES: Final = 12
#: Subjects that were removed and did not come again: each takes some hundred bytes for good.
REMOVED_MAX: Final = 100_000
#: There may be twice as many subjects before the room is looked after again, or these where there are few.
_SUBJECTS_GROWTH: Final = 2
_FEW_SUBJECTS_BYTES: Final = 4_096


class Retained(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The lower end of the commit log."""

    store_id: bytes
    #: Where its first segment begins.
    first_offset: int
    #: The first sequence still there, for each subject that has lost some.
    first_sequences: dict[str, int]
    #: Those of them that were removed. If one is sent to again, it continues where it ended.
    removed: tuple[str, ...] = ()

    def is_removed(self, subject: str, next_sequence: int) -> bool:
        """Whether a subject that ends there is one that was removed, and not one that came again."""
        return subject in self.removed and next_sequence <= self.first_sequences[subject]


def read_retained(disk: Disk, store_id: bytes) -> Retained:
    """The lower end as it is; raises `CorruptionError` if the file is not whole."""
    retained = read_truth(disk, layout.RETAINED, Retained, store_id)
    return retained or Retained(store_id, 0, {})


def write_retained(disk: Disk, retained: Retained) -> None:
    """Move the beginning of the log; durable on return."""
    # Without removed subjects it is what earlier versions wrote, and can read.
    fields = msgspec.structs.astuple(retained)
    content = fields if retained.removed else fields[:-1]
    replace_file(disk, layout.RETAINED, msgspec.msgpack.encode(content))


def keep_room_for_retained(disk: Disk, subjects: Iterable[str]) -> None:
    """Let it be replaceable with these subjects on a full disk too, if there is room now."""
    subjects_bytes = sum(len(name) + _SUBJECT_BYTES for name in subjects)
    keep_room(disk, layout.RETAINED, _SUBJECTS_GROWTH * subjects_bytes + _FEW_SUBJECTS_BYTES)
