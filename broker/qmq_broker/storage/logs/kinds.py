"""The kinds of frames in the commit log: the purpose and the longest length of each."""

from __future__ import annotations

from typing import Final

from qmq_client.wire.frame import FrameKind
from qmq_client.wire.limits import Limits

#: All kinds in the commit log.
COMMIT_KINDS: Final = frozenset(
    {
        FrameKind.MESSAGES,
        FrameKind.DELAYED,
        FrameKind.RELEASED,
        FrameKind.RESCHEDULED,
        FrameKind.CANCELLED,
    }
)
#: Frames of clients, and copies made by the broker (`ids.runs.is_remembered` distinguishes them).
SENT_KINDS: Final = frozenset({FrameKind.MESSAGES, FrameKind.DELAYED})
#: Frames whose records get places in consume queues.
QUEUED_KINDS: Final = frozenset({FrameKind.MESSAGES, FrameKind.RELEASED})
#: Frames that settle the state of the delayed messages in them.
SETTLING_KINDS: Final = frozenset({FrameKind.RELEASED, FrameKind.RESCHEDULED})
#: Limits for frames that are already in the log, which passed the limits of their time.
LOG_LIMITS: Final = Limits(
    record_bytes=1024 * 1024 * 1024 - 1024,
    tags=64,
    headers=65_535,
    headers_bytes=65_535,
    frame_bytes=1024 * 1024 * 1024,
    records_per_frame=1_000_000,
)
