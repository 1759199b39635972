"""The checkpoint: the durable offsets of the logs and the epoch; two slots written in turn.

::

    offset bytes field
    0      8     magic "QMQCKPT1"
    8      8     generation, one more with each write; the higher valid slot counts
    16     8     epoch, one more with each opening of the store
    24     24    commit log: durable offset, offset of its last frame, stored at of that frame
    48     24    action log: the same
    72     8     commit log offset from which on message ids are remembered
    80     16    store id; zeros in slots from before it was recorded
    96     3996  zeros
    4092   4     CRC-32C of bytes 0 … 4091

Each slot is a one-page file of its own, overwritten in place with its own sync, so a crash during
one write leaves the other intact. The offsets in a slot were synced before the slot was written:
damage below them is damage to accepted data, even if the log looks like a torn tail. Big-endian.

A third such slot, `state/actions`, is the *witness* of the action log: it reveals an older log that
was copied in together with both checkpoints. (For the commit log the journals do this.) It only
gives the synced offset of that log; no scan begins there, and an older store has none.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from qmq_broker.errors import NoRoomError, UnknownFormatError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk, DiskFile
from qmq_client.wire.checksum import crc32c

SLOT_BYTES: Final = 4096
_MAGIC: Final = b"QMQCKPT1"
_FIELDS: Final = struct.Struct(">8s9Q16s")
#: The store id of a slot without one.
NO_STORE: Final = bytes(16)
_CRC: Final = struct.Struct(">I")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPoint:
    """The durable end of one log."""

    durable_offset: int
    #: Offset of its last frame, where the scan of the next start begins.
    last_frame_offset: int
    #: When that frame was stored; later frames are never stamped earlier.
    last_stored_at_ms: int


START: Final = LogPoint(durable_offset=0, last_frame_offset=0, last_stored_at_ms=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The content of one slot."""

    generation: int
    epoch: int
    commit_log: LogPoint
    action_log: LogPoint
    #: All message ids of the dedupe window are at or above this commit log offset.
    window_offset: int


class CheckpointFiles:
    """The two slots on a disk, of one store. Belongs to the writer thread."""

    def __init__(self, disk: Disk, store_id: bytes = NO_STORE) -> None:
        self._disk = disk
        self._store_id = store_id
        self._files: list[DiskFile] = []
        self._witnessed_offset = 0

    def read(self) -> Checkpoint | None:
        """The newest valid slot, or None; changes nothing. Raises `UnknownFormatError`."""
        there = set(self._disk.names(layout.ROOT))
        slots = [self._slot(path) for path in layout.CHECKPOINTS if path in there]
        whole = [slot for slot in slots if slot is not None]
        return max(whole, key=lambda slot: slot.generation, default=None)

    def _slot(self, path: str) -> Checkpoint | None:
        file = self._disk.open(path)
        try:
            slot, store_id = decode_slot(file.read(0, SLOT_BYTES))
        finally:
            file.close()
        return None if is_foreign(store_id, self._store_id) else slot

    def prepare(self) -> None:
        """Make both files ready for writing; their names become durable."""
        if self._files:
            return
        for path in layout.CHECKPOINTS:
            file = self._disk.open(path, is_new=True)
            file.allocate(SLOT_BYTES)
            self._files.append(file)
        self._disk.sync_directory(layout.ROOT)

    def write(self, checkpoint: Checkpoint) -> None:
        """Write a slot; durable on return. Requires: the logs were synced up to its offsets."""
        slot = encode_slot(checkpoint, self._store_id)
        _overwrite(self._files[checkpoint.generation % len(layout.CHECKPOINTS)], slot)
        actions_offset = checkpoint.action_log.durable_offset
        if actions_offset > self._witnessed_offset:
            with suppress(NoRoomError):  # the next one tries again
                self._write_witness(slot)
                self._witnessed_offset = actions_offset

    def _write_witness(self, slot: bytes) -> None:
        if len(self._files) == len(layout.CHECKPOINTS):  # an idle store has written none
            self._disk.make_directory(layout.STATE)
            file = self._disk.open(layout.ACTIONS_WITNESS, is_new=True)
            self._files.append(file)
            file.allocate(SLOT_BYTES)
            self._disk.sync_directory(layout.STATE)
        _overwrite(self._files[-1], slot)

    def close(self) -> None:
        """Close all files."""
        for file in self._files:
            file.close()
        self._files.clear()
        self._witnessed_offset = 0


def _overwrite(file: DiskFile, slot: bytes) -> None:
    file.write(0, [slot])
    file.sync()


def read_slot(file: DiskFile, store_id: bytes) -> tuple[Checkpoint | None, str]:
    """The slot, or the reason why it is not valid: damaged, or of another store."""
    slot, named = decode_slot(file.read(0, SLOT_BYTES))
    if is_foreign(named, store_id):
        return None, f"of store {named.hex()}"
    return slot, "" if slot else "not a complete slot"


def read_witness(disk: Disk, store_id: bytes) -> tuple[int, str]:
    """The durable offset of the action log according to its witness, 0 without one; and the reason if it is damaged."""
    if layout.ACTIONS_WITNESS.rpartition("/")[2] not in disk.names(layout.STATE):
        return 0, ""
    file = disk.open(layout.ACTIONS_WITNESS)
    try:
        slot, why_not = read_slot(file, store_id)
    finally:
        file.close()
    return (slot.action_log.durable_offset if slot else 0), why_not


def is_foreign(found: bytes, store_id: bytes) -> bool:
    """Whether a slot that names the store `found` is not one of `store_id`."""
    return NO_STORE not in (found, store_id) and found != store_id


def encode_slot(checkpoint: Checkpoint, store_id: bytes = NO_STORE) -> bytes:
    """One slot as bytes."""
    points = (checkpoint.commit_log, checkpoint.action_log)
    numbers = [
        number
        for point in points
        for number in (point.durable_offset, point.last_frame_offset, point.last_stored_at_ms)
    ]
    fields = _FIELDS.pack(
        _MAGIC,
        checkpoint.generation,
        checkpoint.epoch,
        *numbers,
        checkpoint.window_offset,
        store_id,
    )
    content = fields.ljust(SLOT_BYTES - _CRC.size, b"\0")
    return content + _CRC.pack(crc32c(content))


def decode_slot(data: bytes) -> tuple[Checkpoint | None, bytes]:
    """The content of a slot, None if it is damaged; and the store that it names.

    Raises `UnknownFormatError` if it is intact, and of another version.
    """
    if len(data) != SLOT_BYTES:
        return None, NO_STORE
    content = data[: -_CRC.size]
    magic, generation, epoch, *numbers, store_id = _FIELDS.unpack_from(data)
    if _CRC.unpack(data[-_CRC.size :])[0] != crc32c(content):
        return None, NO_STORE
    if magic != _MAGIC or any(content[_FIELDS.size :]):
        raise UnknownFormatError(
            setting="a checkpoint",
            found=f"{magic!r}" if magic != _MAGIC else "one with more fields",
            known=f"{_MAGIC!r}",
        )
    checkpoint = Checkpoint(
        generation=generation,
        epoch=epoch,
        commit_log=_point(numbers[0:3]),
        action_log=_point(numbers[3:6]),
        window_offset=numbers[6],
    )
    return checkpoint, store_id


def _point(numbers: list[int]) -> LogPoint:
    durable_offset, last_frame_offset, last_stored_at_ms = numbers
    return LogPoint(
        durable_offset=durable_offset,
        last_frame_offset=last_frame_offset,
        last_stored_at_ms=last_stored_at_ms,
    )
