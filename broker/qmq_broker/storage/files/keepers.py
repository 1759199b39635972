"""The file of keepers: archives of the logs with the offsets that each has; retention waits for them.

::

    state/keepers    MessagePack of KeeperTable and a checksum line

Not derived: no other file says what an archive still lacks. Written durably before a keeper is
answered. Without the file there are no keepers. A draft always exists next to it, so that a keeper
can be removed on a full disk.
"""

from __future__ import annotations

from typing import Final

import msgspec

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.small_file import keep_room, read_truth, replace_file
from qmq_client.wire.names import is_name
from qmq_client.wire.requests import Natural

#: Enough for sixteen keepers with the longest names and numbers, and the rest of the file.
_ROOM_BYTES: Final = 3_400
#: The fields of a keeper that were added last.
_FIRST_OFFSETS: Final = slice(6, 8)


class Keeper(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An application that archives the logs; retention waits for it."""

    name: str
    #: The commit log below this offset is archived …
    kept_offset: Natural
    #: … and the action log below this one.
    kept_actions_offset: Natural
    #: When it last reported.
    reported_at_ms: Natural
    #: Bytes that were deleted by force before it had them, below its current offsets.
    lost_bytes: Natural = 0
    lost_actions_bytes: Natural = 0
    #: Where the logs began when it registered: retention never waited for earlier parts. Not written if both are 0.
    first_offset: Natural = 0
    first_actions_offset: Natural = 0


class KeeperTable(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All keepers of one store."""

    store_id: bytes
    #: By name.
    keepers: tuple[Keeper, ...]


def read_keepers(disk: Disk, store_id: bytes) -> tuple[Keeper, ...]:
    """All keepers, by name; raises `CorruptionError` if the file is damaged."""
    table = read_truth(disk, layout.KEEPERS, KeeperTable, store_id)
    if table is None:
        return ()
    names = [keeper.name for keeper in table.keepers]
    if names != sorted(set(names)) or not all(map(is_name, names)):
        reason = "its names are not in order, or none"
        raise CorruptionError(segment=layout.KEEPERS, offset=0, reason=reason)
    return table.keepers


def write_keepers(disk: Disk, store_id: bytes, keepers: tuple[Keeper, ...]) -> None:
    """Replace the keepers by these; durable on return."""
    table = (store_id, tuple(map(_fields, keepers)))
    replace_file(disk, layout.KEEPERS, msgspec.msgpack.encode(table))


def keep_room_for_keepers(disk: Disk) -> None:
    """Reserve room so that the file can be replaced on a full disk, if there is room now."""
    keep_room(disk, layout.KEEPERS, _ROOM_BYTES)


def _fields(keeper: Keeper) -> tuple[object, ...]:
    fields = msgspec.structs.astuple(keeper)
    return fields if any(fields[_FIRST_OFFSETS]) else fields[: _FIRST_OFFSETS.start]
