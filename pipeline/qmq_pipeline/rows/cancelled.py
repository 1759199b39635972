"""Frames of the commit log that cancel messages, as rows of `cancelled`.

Messages of the broker's own subjects are left out, here as in `decode.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from qmq_broker.storage.logs.frame_scan import ScannedFrame
from qmq_broker.storage.schedule.cancelled import read_cancelled, read_withdrawn
from qmq_client.wire.frame import FrameKind
from qmq_client.wire.names import OWN_PREFIX
from qmq_pipeline.tables.columns import hex_text, longs, times
from qmq_pipeline.tables.schemas import CANCELLED


def batches(frames: Iterable[ScannedFrame]) -> Iterator[pa.RecordBatch]:
    """The rows of each frame."""
    for frame in frames:
        if frame.header.kind is not FrameKind.CANCELLED:
            continue
        told = read_cancelled(frame.data)
        found: list[tuple[bytes, str | None]] = [
            (one.message_id, one.subject) for one in told if not one.subject.startswith(OWN_PREFIX)
        ]
        found += [
            (message_id, subject or None)
            for subject, ids in read_withdrawn(frame.data).items()
            for message_id in ids
        ]
        ids = np.frombuffer(b"".join(one for one, _ in found), np.uint8).reshape(-1, 16)
        halves = ids.view(">u8")
        at_ms = np.full(len(found), frame.header.stored_at_ms, np.int64)
        yield pa.RecordBatch.from_arrays(
            [
                pa.repeat(pa.scalar(frame.offset, pa.int64()), len(found)),
                pa.array(np.arange(len(found), dtype=np.int32)),
                hex_text(ids),
                longs(halves[:, 0]),
                longs(halves[:, 1]),
                pa.array([subject for _, subject in found], pa.string()),
                times(at_ms),
            ],
            schema=CANCELLED.arrow(),
        )
