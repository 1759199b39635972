"""Messages that a group does not get again, and why."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

from qmq_broker.service.delivery.history import History

#: A consumer rejected it.
REJECTED: Final = "rejected"
#: It was delivered as often as the group allows.
ATTEMPTS_USED_UP: Final = "attempts used up"
#: Its time to live ended before it was delivered.
EXPIRED: Final = "expired"
#: Few enough to be looked through at any time.
_FEW: Final = 64
#: Letters that leave the heap at a time: about ten milliseconds.
LEAVING_MAX: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A message that this group does not get again unless it is replayed."""

    sequence: int
    attempts: int
    reason: str
    #: What the last consumer said.
    error: str
    at_ms: int
    #: The attempts so far.
    history: History = ()


class DeadLetters(dict[int, DeadLetter]):
    """The dead letters of one group, by sequence.

    There may be a million, and retention asks each second which is the first that it must wait for.
    So their sequences stand in a heap as well, from which those leave that it need not wait for.
    """

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[int] = []

    def __setitem__(self, sequence: int, letter: DeadLetter) -> None:
        before = self.get(sequence)
        super().__setitem__(sequence, letter)
        if before is None or before.at_ms != letter.at_ms:
            if len(self._heap) > 2 * len(self) + _FEW:  # most of them are no dead letters any more
                self._heap = sorted(self)
            else:
                heappush(self._heap, sequence)

    def first_since(
        self, at_ms: int, *, without: Container[int], first_sequence: int = 0
    ) -> int | None:
        """The lowest sequence from `first_sequence` on that died at this time or later, or None.

        A lower one when very many died before; it rises with each call. Requires: neither the time
        nor what is left out ever goes back.
        """
        heap = self._heap
        for _ in range(LEAVING_MAX):
            if not heap:
                return None
            letter = self.get(heap[0]) if heap[0] >= first_sequence else None
            if letter is not None and letter.at_ms >= at_ms and heap[0] not in without:
                return heap[0]
            heappop(heap)
        return heap[0] if heap else None
