"""Copying a file to the same path below another directory, through the disk port."""

from __future__ import annotations

from typing import Final

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.files.disk_port import Disk

_BLOCK_BYTES: Final = 1024 * 1024


def copy_file(source: Disk, path: str, target: Disk, *, length: int | None = None) -> int:
    """Copy a file, or its first `length` bytes; returns how many bytes.

    The content is durable on return, the name is not yet. Raises `CorruptionError` if there are
    fewer bytes.
    """
    file = source.open(path)
    try:
        copy = target.open(path, is_new=True)
        try:
            copy.truncate(0)
            position = 0
            while block := file.read(position, _next_bytes(position, length)):
                copy.write(position, [block])
                position += len(block)
            copy.sync()
        finally:
            copy.close()
    finally:
        file.close()
    if length is not None and position < length:
        reason = f"{length} bytes were synced, {position} are there"
        raise CorruptionError(segment=path, offset=position, reason=reason)
    return position


def _next_bytes(position: int, length: int | None) -> int:
    return _BLOCK_BYTES if length is None else min(_BLOCK_BYTES, length - position)
