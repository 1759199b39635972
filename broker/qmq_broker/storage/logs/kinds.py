"""Which kinds of frames stand in the commit log, what each sort of them is for, how long they may be."""

from __future__ import annotations

from typing import Final

from qmq_client.wire.frame import FrameKind
from qmq_client.wire.limits import Limits

#: What the commit log holds.
COMMIT_KINDS: Final = frozenset(
    {
        FrameKind.MESSAGES,
        FrameKind.DELAYED,
        FrameKind.RELEASED,
        FrameKind.RESCHEDULED,
        FrameKind.CANCELLED,
    }
)
#: What clients send, and copies, which are the broker's own (`ids.runs.is_remembered` tells them apart).
SENT_KINDS: Final = frozenset({FrameKind.MESSAGES, FrameKind.DELAYED})
#: What has places in consume queues.
QUEUED_KINDS: Final = frozenset({FrameKind.MESSAGES, FrameKind.RELEASED})
#: What settles the fates of delayed messages that stand in it.
SETTLING_KINDS: Final = frozenset({FrameKind.RELEASED, FrameKind.RESCHEDULED})
#: For frames that stand in the log already: they passed the limits of their day.
LOG_LIMITS: Final = Limits(
    record_bytes=1024 * 1024 * 1024 - 1024,
    tags=64,
    headers=65_535,
    headers_bytes=65_535,
    frame_bytes=1024 * 1024 * 1024,
    records_per_frame=1_000_000,
)
