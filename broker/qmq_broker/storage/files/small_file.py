"""Small files that are either whole or absent, each guarded by a checksum line.

::

    <content, any bytes>
    crc32c <8 hex digits of the content>\n

Replaced in four steps: write a draft, sync it, rename it over the old file, sync the directory.
After a crash the file has either the old or the new content, never a mixture. An existing draft is
overwritten and keeps its allocated space; `keep_room` makes one in advance.
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
#: Bytes of a long file that are read or written at a time.
_AT_ONCE_BYTES: Final = 1024 * 1024
#: A long file is synced after this many bytes.
_SYNC_BYTES: Final = 16 * 1024 * 1024

V = TypeVar("V")


def replace_file(disk: Disk, path: str, content: bytes) -> None:
    """Replace the content of `path`; durable on return."""
    replace_by_parts(disk, path, [content])


def replace_by_parts(disk: Disk, path: str, parts: Iterable[bytes]) -> int:
    """Like `replace_file`, for content in parts, of which few are in memory at a time; returns its length."""
    return replace_whole(disk, path, _sealed(parts), draft=draft_path(path))


def _sealed(parts: Iterable[bytes]) -> Iterator[bytes]:
    checksum = 0
    for part in parts:
        checksum = crc32c(part, checksum)
        yield part
    yield b"\ncrc32c %08x\n" % checksum


def replace_whole(disk: Disk, path: str, parts: Iterable[bytes], *, draft: str) -> int:
    """Like `replace_file`, for a file without a checksum line; `draft` is a path next to it. Durable on return."""
    file = open_draft(disk, draft)
    try:
        length = synced = 0
        for some in _batches(parts):
            file.write(length, some)
            length += sum(map(len, some))
            if length - synced >= _SYNC_BYTES:  # a sync of very many bytes would delay other files
                file.sync()
                synced = length
        file.truncate(length)  # not earlier: other files could take its space
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
    """Make `path` replaceable on a full disk: create its draft and allocate its space.

    For files that must change before space can be freed. Without room now, it does nothing.
    """
    with suppress(NoRoomError):
        file = open_draft(disk, draft_path(path))
        try:
            file.allocate(room_bytes)
        finally:
            file.close()


def open_draft(disk: Disk, draft: str) -> DiskFile:
    """Open the existing draft, with any content, or a new one.

    Never the file itself: after a power cut during a rename both names may exist, on a file system without a journal.
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
    """The content of a small file; None if the checksum does not match."""
    found = _SEAL.search(data, max(0, len(data) - _SEAL_BYTES))
    if found is None:
        return None
    content = data[: found.start()]
    return content if int(found[1], 16) == crc32c(content) else None


def sealed_bytes(file: DiskFile) -> int | None:
    """The length of the content of a long small file; None if the checksum does not match."""
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
    """Decode MessagePack whose checksum was verified.

    Raises `UnknownFormatError` if it cannot: an intact file is not damaged.
    """
    try:
        return msgspec.msgpack.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise unknown_content(path, str(error)) from error


def unknown_content(path: str, reason: str) -> UnknownFormatError:
    """The error for an intact file that this version cannot read."""
    return UnknownFormatError(
        setting=path, found=f"not in the form of this version ({reason})", known="version 1"
    )


class _OfStore(Protocol):
    @property
    def store_id(self) -> bytes: ...


T = TypeVar("T", bound=_OfStore)


def read_truth(disk: Disk, path: str, kind: type[T], store_id: bytes) -> T | None:
    """The content of a small file that is not derived from others; None if there is no file.

    Raises `CorruptionError` if it is damaged or of another store, and `UnknownFormatError`.
    """
    data = read_file(disk, path)
    if data is None:
        return None
    content = unseal(data)
    if content is None:
        raise CorruptionError(segment=path, offset=0, reason="its checksum does not match")
    truth = decode_whole(path, content, kind)
    if truth.store_id != store_id:
        reason = f"of store {truth.store_id.hex()}; this is store {store_id.hex()}"
        raise CorruptionError(segment=path, offset=0, reason=reason)
    return truth
