"""Small files that are either whole or absent, each guarded by a checksum line.

::

    <content, any bytes>
    crc32c <8 hex digits of the content>\n

Replaced in four steps: write a draft, sync it, rename it over the old file, sync the directory.
After a crash either the old or the new content is there, never a mixture. A draft that is there
already is written over and keeps its room meanwhile; `keep_room` makes one ahead of need.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final, Protocol, TypeVar

import msgspec

from qmq_broker.errors import CorruptionError, NoRoomError, UnknownFormatError
from qmq_broker.storage.files.disk_port import Disk, DiskFile
from qmq_broker.storage.files.layout import draft_path
from qmq_client.wire.checksum import crc32c

_SEAL: Final = re.compile(rb"\ncrc32c ([0-9a-f]{8})\n\Z")
_SEAL_BYTES: Final = 17
#: Of a long file, so much is read or written at a time.
_AT_ONCE_BYTES: Final = 1024 * 1024
#: A long file is synced after so much.
_SYNC_BYTES: Final = 16 * 1024 * 1024

V = TypeVar("V")


def replace_file(disk: Disk, path: str, content: bytes) -> None:
    """Replace the content of `path`; durable on return."""
    replace_by_parts(disk, path, [content])


def replace_by_parts(disk: Disk, path: str, parts: Iterable[bytes]) -> int:
    """The same for content in parts, of which few are in memory at a time; returns its length."""
    return replace_whole(disk, path, _sealed(parts), draft=draft_path(path))


def _sealed(parts: Iterable[bytes]) -> Iterator[bytes]:
    checksum = 0
    for part in parts:
        checksum = crc32c(part, checksum)
        yield part
    yield b"\ncrc32c %08x\n" % checksum


def replace_whole(disk: Disk, path: str, parts: Iterable[bytes], *, draft: str) -> int:
    """The same for a file without a checksum line; `draft` is a path next to it. Durable on return."""
    file = open_draft(disk, draft)
    try:
        length = synced = 0
        for some in _batches(parts):
            file.write(length, some)
            length += sum(map(len, some))
            if length - synced >= _SYNC_BYTES:  # a sync of very much would hold up other files
                file.sync()
                synced = length
        file.truncate(length)  # not before: its room would be anybody's
        file.sync()
    finally:
        file.close()
    disk.rename(draft, path)
    disk.sync_directory(path.rpartition("/")[0])
    return length


def _batches(parts: Iterable[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    batch_bytes = 0
    for part in parts:
        batch.append(part)
        batch_bytes += len(part)
        if batch_bytes >= _AT_ONCE_BYTES:
            yield batch
            batch, batch_bytes = [], 0
    if batch:
        yield batch


def keep_room(disk: Disk, path: str, room_bytes: int) -> None:
    """Let `path` be replaceable where nothing is left on the disk: its draft is there and has room.

    For what must change before anything can be given up. Without room now, nothing is done.
    """
    with suppress(NoRoomError):
        file = open_draft(disk, draft_path(path))
        try:
            file.allocate(room_bytes)
        finally:
            file.close()


def open_draft(disk: Disk, draft: str) -> DiskFile:
    """The draft that is there, whatever it holds, or a new one.

    Never the file that counts: of a rename a power cut may leave both names, where the file system
    keeps no journal of them.
    """
    file = disk.open(draft, is_new=True)
    if file.links() == 1:
        return file
    file.close()
    disk.unlink(draft)
    return disk.open(draft, is_new=True)


def read_file(disk: Disk, path: str) -> bytes | None:
    """The whole file with its checksum line; None if there is none."""
    directory, _, name = path.rpartition("/")
    if name not in disk.names(directory):
        return None
    file = disk.open(path)
    try:
        return file.read(0, file.length())
    finally:
        file.close()


def unseal(data: bytes) -> bytes | None:
    """The content of a small file; None if the checksum does not fit."""
    found = _SEAL.search(data, max(0, len(data) - _SEAL_BYTES))
    if found is None:
        return None
    content = data[: found.start()]
    return content if int(found[1], 16) == crc32c(content) else None


def sealed_bytes(file: DiskFile) -> int | None:
    """How long the content of a small file that is long is; None if the checksum does not fit."""
    content_bytes = file.length() - _SEAL_BYTES
    found = _SEAL.match(file.read(max(0, content_bytes), _SEAL_BYTES))
    if found is None:
        return None
    checksum = 0
    for position in range(0, content_bytes, _AT_ONCE_BYTES):
        part = file.read(position, min(_AT_ONCE_BYTES, content_bytes - position))
        checksum = crc32c(part, checksum)
    return content_bytes if int(found[1], 16) == checksum else None


def decode_whole(path: str, content: bytes, kind: type[V]) -> V:
    """MessagePack whose checksum was right, as a value.

    Raises `UnknownFormatError` if it is none: a file that is as it was written is not damaged.
    """
    try:
        return msgspec.msgpack.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise unknown_content(path, str(error)) from error


def unknown_content(path: str, reason: str) -> UnknownFormatError:
    """The error for a file that is as it was written, and that this version cannot read."""
    return UnknownFormatError(
        setting=path, found=f"not as this version writes it ({reason})", known="version 1"
    )


class _OfStore(Protocol):
    @property
    def store_id(self) -> bytes: ...


T = TypeVar("T", bound=_OfStore)


def read_truth(disk: Disk, path: str, kind: type[T], store_id: bytes) -> T | None:
    """The content of a small file that cannot be derived from others; None if there is no file.

    Raises `CorruptionError` if it is not whole, or of another store, and `UnknownFormatError`.
    """
    data = read_file(disk, path)
    if data is None:
        return None
    content = unseal(data)
    if content is None:
        raise CorruptionError(segment=path, offset=0, reason="its checksum does not fit")
    truth = decode_whole(path, content, kind)
    if truth.store_id != store_id:
        reason = f"of store {truth.store_id.hex()}; this is store {store_id.hex()}"
        raise CorruptionError(segment=path, offset=0, reason=reason)
    return truth
