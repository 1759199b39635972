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

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk import Disk
from qmq_broker.storage.files.small_file import read_file, replace_file, unseal


class Retained(msgspec.Struct, frozen=True, array_like=True):
    """The lower end of the commit log."""

    store_id: bytes
    #: Where its first segment begins.
    first_offset: int
    #: First sequence that is still there, of each subject that has lost some.
    first_sequences: dict[str, int]


def read_retained(disk: Disk, store_id: bytes) -> Retained:
    """The lower end as it is; raises `CorruptionError` for a file that is not whole."""
    data = read_file(disk, layout.RETAINED)
    if data is None:
        return Retained(store_id, 0, {})
    content = unseal(data)
    try:
        if content is None:
            raise msgspec.DecodeError("its checksum does not fit")
        retained = msgspec.msgpack.decode(content, type=Retained)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptionError(segment=layout.RETAINED, offset=0, reason=str(error)) from error
    if retained.store_id != store_id:
        reason = f"of store {retained.store_id.hex()}; this is store {store_id.hex()}"
        raise CorruptionError(segment=layout.RETAINED, offset=0, reason=reason)
    return retained


def write_retained(disk: Disk, retained: Retained) -> None:
    """Let the log begin there; durable on return."""
    replace_file(disk, layout.RETAINED, msgspec.msgpack.encode(retained))
