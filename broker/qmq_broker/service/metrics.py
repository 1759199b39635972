"""The metrics of a broker: counters and histograms.

Plain numbers since the process started, each written by one thread and read by any: a reader may
see one of two related numbers a moment before the other. Recording costs a few hundred nanoseconds
per commit, and nothing per message.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from qmq_client.wire.frame import MessageFrame

#: Upper bounds of the duration classes, in seconds: from a fast disk to a hung one.
SECONDS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
)
#: Upper bounds of the classes of requests per commit; no commit has more than the last.
REQUESTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
#: Subjects that are counted individually; the rest share one name, so that no sender decides how
#: many rows a scrape has.
SUBJECTS_MAX: Final = 1_000
#: The shared name: no subject can have it.
OTHER_SUBJECTS: Final = "*"


class Histogram:
    """Counts of values up to each of several bounds, and the sum of all values."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """Requires: `bounds` ascend."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def note(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def steps(self) -> list[tuple[float, int]]:
        """For each bound, infinity last, how many values were no greater."""
        return steps_of(self._bounds, self._counts)


def steps_of(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[float, int]]:
    """Counts per class, one more than bounds, as counts up to each bound."""
    return list(zip((*bounds, float("inf")), accumulate(counts), strict=True))


class Accepted:
    """The acknowledged messages of one subject."""

    __slots__ = ("bytes", "messages", "requests")

    def __init__(self) -> None:
        self.messages = 0
        #: Total length of the records.
        self.bytes = 0
        self.requests = 0


class Intakes:
    """Accepted messages by subject. Written in the loop thread."""

    def __init__(self) -> None:
        self.subjects: dict[str, Accepted] = {}
        #: How many of the messages were stored before.
        self.duplicates = 0

    def note(self, frame: MessageFrame, duplicates: int) -> None:
        """Count an answered request, whose messages are durable."""
        self.duplicates += duplicates
        first = 0
        for run in frame.runs:
            accepted = self.subjects.get(run.subject) or self._begin(run.subject)
            accepted.messages += run.count
            accepted.bytes += sum(frame.lengths[first : first + run.count])
            accepted.requests += 1
            first += run.count

    def _begin(self, subject: str) -> Accepted:
        if len(self.subjects) >= SUBJECTS_MAX:
            subject = OTHER_SUBJECTS
        return self.subjects.setdefault(subject, Accepted())


class Metrics:
    """The metrics of one broker, besides those of its groups and delayed messages."""

    def __init__(self) -> None:
        self.intakes = Intakes()
        #: For one commit of messages: time until the operating system has all of it …
        self.append_s = Histogram(SECONDS)
        #: … and from there until it is on the disk.
        self.sync_s = Histogram(SECONDS)
        #: Requests per commit.
        self.commit_requests = Histogram(REQUESTS)
        #: For one sync of the action log.
        self.action_sync_s = Histogram(SECONDS)
        #: Refused requests, by the code of the answer.
        self.refused: Counter[str] = Counter()
