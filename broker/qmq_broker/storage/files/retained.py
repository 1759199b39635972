"""Where the commit log begins, once its oldest segments were given up.

::

    state/retained    MessagePack of Retained and a checksum line

Truth, not derived: a subject whose messages are all gone keeps its place here, so that a sequence is
never given twice. Written, and durable, before the first segment goes; whatever lies below
`first_offset` is from then on nobody's, and the next opening clears it away. No file means that
nothing was given up yet.
"""

from __future__ import annotations

import msgspec

from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk import Disk
from qmq_broker.storage.files.small_file import read_truth, replace_file


class Retained(msgspec.Struct, frozen=True, array_like=True):
    """The lower end of the commit log."""

    store_id: bytes
    #: Where its first segment begins.
    first_offset: int
    #: First sequence that is still there, of each subject that has lost some.
    first_sequences: dict[str, int]


def read_retained(disk: Disk, store_id: bytes) -> Retained:
    """The lower end as it is; raises `CorruptionError` for a file that is not whole."""
    retained = read_truth(disk, layout.RETAINED, Retained, store_id)
    return retained or Retained(store_id, 0, {})


def write_retained(disk: Disk, retained: Retained) -> None:
    """Let the log begin there; durable on return."""
    replace_file(disk, layout.RETAINED, msgspec.msgpack.encode(retained))
