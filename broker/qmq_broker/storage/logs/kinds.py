"""Which kinds of frames stand in the commit log, and what each sort of them is for."""

from __future__ import annotations

from typing import Final

from qmq_client.wire.frame import FrameKind

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
#: What clients send, and copies, which are the broker's own (`id_runs.is_remembered` tells them apart).
SENT_KINDS: Final = frozenset({FrameKind.MESSAGES, FrameKind.DELAYED})
#: What has places in consume queues.
QUEUED_KINDS: Final = frozenset({FrameKind.MESSAGES, FrameKind.RELEASED})
#: What settles the fates of delayed messages that stand in it.
SETTLING_KINDS: Final = frozenset({FrameKind.RELEASED, FrameKind.RESCHEDULED})
