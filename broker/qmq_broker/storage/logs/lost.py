"""Places of messages that are lost: what stands in the log where accepted frames were damaged.

A damaged range that a person gave up (`quarantine.py`) is covered by frames of kind LOST. Body: length
4 (big-endian), MessagePack list of LostRun, zeros. Sequences stay dense: each lost one has an entry in
its consume queue, of length 0, which is never delivered but passed over and counted.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from qmq_broker.storage.logs.frame_scan import ScannedFrame
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import FRAME_HEADER_BYTES, FrameKind, build_frame
from qmq_client.wire.requests import decode_msgpack, sized_part

_LENGTH: Final = struct.Struct(">I")
_ENTRY: Final = struct.Struct(">QIQ")
#: A longer range is covered by several frames, so that no scan must hold it at once.
LOST_FRAME_BYTES_MAX: Final = 1024 * 1024
#: Shortest frame that can say something.
LOST_LEAST_BYTES: Final = FRAME_HEADER_BYTES + _LENGTH.size + 4


class LostRun(msgspec.Struct, frozen=True, array_like=True):
    """Sequences of one subject that are lost."""

    subject: str
    first_sequence: int
    count: int


def lost_frames(range_bytes: int, runs: list[LostRun]) -> list[bytes]:
    """Frames, not yet stamped, that fill a range; the first one says what is lost.

    Those behind it are one and the same as long as they can: a lost segment is a GiB, and its frames must
    not be. Raises `ValueError` when the range is too short for that.
    """
    frames: list[bytes] = []
    while range_bytes:
        size = range_bytes
        if size > LOST_FRAME_BYTES_MAX:
            size = min(LOST_FRAME_BYTES_MAX, range_bytes - LOST_FRAME_BYTES_MAX // 2)
        if len(frames) > 1 and size == len(frames[-1]):
            frames.append(frames[-1])
            range_bytes -= size
            continue
        content = msgspec.msgpack.encode([] if frames else runs)
        body = _LENGTH.pack(len(content)) + content
        if size < LOST_LEAST_BYTES or len(body) > size - FRAME_HEADER_BYTES:
            raise ValueError(f"a range of {size} bytes has no room for {len(body)}")
        frames.append(build_frame(FrameKind.LOST, body.ljust(size - FRAME_HEADER_BYTES, b"\0")))
        range_bytes -= size
    return frames


def lost_runs(frame: ScannedFrame) -> list[LostRun]:
    """What a LOST frame says; raises `ProtocolError`."""
    runs = decode_msgpack(sized_part(frame.data, FRAME_HEADER_BYTES), list[LostRun])
    if any(run.count < 1 or run.first_sequence < 0 for run in runs):
        raise ProtocolError("a lost range without sequences")
    return runs


def lost_entries(offset: int, count: int) -> bytes:
    """Entries of so many lost messages, packed; they point at the frame that says so."""
    return _ENTRY.pack(offset, 0, 0) * count
