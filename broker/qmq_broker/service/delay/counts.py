"""Counters of delayed messages: how many were released, and how late."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from typing import Final

from qmq_broker.storage.schedule.columns import DelayedMessage
from qmq_client.wire.names import COPIES

#: Upper bounds of the lateness classes in milliseconds; the last class is open. They are dense
#: around the promised 200 ms, because a quantile is reported as the upper bound of its class.
LATE_BOUNDS_MS: Final = (
    *(10, 20, 50, 100, 150, 200, 250, 300, 400, 500, 700, 1_000),
    *(2_000, 5_000, 30_000, 300_000, 3_600_000),
)
#: Most damaged copies that are kept individually at a time.
DAMAGED_MAX: Final = 100


class DelayCounts:
    """Counters of one broker; written by the thread that releases, read by any."""

    def __init__(self) -> None:
        #: Messages released since the start.
        self.released = 0
        #: Commits that released them.
        self.commits = 0
        #: Due messages that were not released because they were cancelled or released before.
        self.passed_over = 0
        #: Unreadable messages, by bucket.
        self.damaged_by_bucket: dict[int, int] = {}
        #: Unreadable messages since the start, including messages that could be read later.
        self.damaged_total = 0
        #: Unreadable copies for long retries; they are cancelled when no group waits for them.
        self.damaged_copies: deque[DelayedMessage] = deque()
        #: Buckets of such copies beyond `DAMAGED_MAX`; they are checked again after that.
        self.more_copies: set[int] = set()
        #: Lateness at the commit, by class, of messages that were not overdue at the start.
        self.late = [0] * (len(LATE_BOUNDS_MS) + 1)
        self.late_sum_ms = 0
        self.late_max_ms = 0

    @property
    def damaged(self) -> int:
        """How many messages could not be read."""
        return sum(self.damaged_by_bucket.copy().values())

    def note_damaged(self, bucket: int, message: DelayedMessage | None) -> None:
        """Count an unreadable message of this bucket; None if it is unknown which one."""
        self.damaged_total += 1
        self.damaged_by_bucket[bucket] = self.damaged_by_bucket.get(bucket, 0) + 1
        if message is None or message.subject != COPIES:
            return
        if len(self.damaged_copies) < DAMAGED_MAX:
            self.damaged_copies.append(message)
        else:
            self.more_copies.add(bucket)

    def forget_damaged(self, bucket: int) -> None:
        """Forget the damage of this bucket, because it will be read again."""
        self.damaged_by_bucket.pop(bucket, None)
        self.more_copies.discard(bucket)

    def note_late(self, late_ms: Iterable[int]) -> None:
        """Count messages that were committed this long after their due times."""
        in_order = sorted(late_ms)
        if not in_order:
            return
        passed = 0
        for number, bound_ms in enumerate(LATE_BOUNDS_MS):
            before, passed = passed, bisect_right(in_order, bound_ms)
            self.late[number] += passed - before
        self.late[-1] += len(in_order) - passed
        self.late_sum_ms += sum(in_order)
        self.late_max_ms = max(self.late_max_ms, in_order[-1])

    def late_quantile_ms(self, share: float) -> int:
        """The upper bound of the class that holds this quantile; 0 if there are no messages."""
        wanted = share * sum(self.late)
        passed = 0
        for bound_ms, count in zip((*LATE_BOUNDS_MS, self.late_max_ms), self.late, strict=True):
            passed += count
            if passed and passed >= wanted:
                return min(bound_ms, self.late_max_ms)
        return 0
