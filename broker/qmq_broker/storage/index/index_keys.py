"""The hashes of message ids and keys in the key index.

The hash of a key is the CRC-32C of subject, zero byte, key. The hash of a message id is the CRC-32C
of its first half plus its second half, modulo 2³². The ids of one producer are dense, so those of a
frame lead to neighbouring slots and are linked as columns instead of one by one.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from qmq_broker.storage.ids.runs import IdRun, id_runs
from qmq_client.wire.checksum import crc32c
from qmq_client.wire.columns import byte_column
from qmq_client.wire.frame import FrameKind, MessageFrame
from qmq_client.wire.record import DUE_BYTES, KEY_BYTES_POSITION, RECORD_FIXED_BYTES

#: Number of possible hashes.
HASHES: Final = 2**32


class FrameKeys(NamedTuple):
    """The indexed values of a frame: its ids as runs, and the hashes of its keys, each once."""

    ids: list[IdRun]
    keys: list[int]

    @property
    def entry_count(self) -> int:
        """How many entries the frame needs."""
        return len(self.keys) + sum(run.next_counter - run.first_counter for run in self.ids)


def frame_keys(frame: MessageFrame) -> FrameKeys:
    """The indexed values of a frame. For a record without a key only one byte is read."""
    data = frame.data
    key_bytes = byte_column(frame, KEY_BYTES_POSITION)
    if not any(key_bytes):
        return FrameKeys(id_runs(frame), [])
    hashes: dict[int, None] = {}
    after_fixed = RECORD_FIXED_BYTES + (DUE_BYTES if frame.header.kind is FrameKind.RELEASED else 0)
    index = 0
    for run in frame.runs:
        seed = crc32c(run.subject.encode() + b"\0")
        places = zip(
            frame.positions[index : index + run.count],
            key_bytes[index : index + run.count],
            strict=True,
        )
        keys = [data[at + after_fixed : at + after_fixed + count] for at, count in places if count]
        hashes.update((crc32c(key, seed), None) for key in dict.fromkeys(keys))
        index += run.count
    return FrameKeys(id_runs(frame), list(hashes))


def id_hash(instance: int, counter: int) -> int:
    """The hash of a message id, given its halves."""
    return (crc32c(instance.to_bytes(8)) + counter) % HASHES


def key_hash(subject: str, key: str) -> int:
    """The hash of a key of one subject."""
    return crc32c(key.encode(), crc32c(subject.encode() + b"\0"))
