"""LOST frames, which replace damaged accepted frames in the log and keep the sequences of their messages.

When an operator discards a damaged range (`quarantine.py`), it is covered by frames of kind LOST.
Body: length 4 (big-endian), MessagePack list of LostRun, zeros. Sequences stay dense: each lost one
has an entry of length 0 in its consume queue, which is never delivered but skipped and counted.
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
#: A longer range is covered by several frames, so that no scan must hold the whole range in memory.
LOST_FRAME_BYTES_MAX: Final = 1024 * 1024
#: The shortest frame that can hold a run.
LOST_LEAST_BYTES: Final = FRAME_HEADER_BYTES + _LENGTH.size + 4


class LostRun(msgspec.Struct, frozen=True, array_like=True):
    """Lost sequences of one subject."""

    subject: str
    first_sequence: int
    count: int


def lost_frames(range_bytes: int, runs: list[LostRun]) -> list[bytes]:
    """Unstamped frames that fill a range; the first one lists the lost messages.

    The others share one object where possible, so that the frames for a lost segment of a GiB take little memory.
    Raises `ValueError` if the range is too short.
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
    """The runs of a LOST frame; raises `ProtocolError`."""
    runs = decode_msgpack(sized_part(frame.data, FRAME_HEADER_BYTES), list[LostRun])
    if any(run.count < 1 or run.first_sequence < 0 for run in runs):
        raise ProtocolError("a lost range without sequences")
    return runs


def lost_entries(offset: int, count: int) -> bytes:
    """Packed entries of `count` lost messages; they point at the LOST frame."""
    return _ENTRY.pack(offset, 0, 0) * count
