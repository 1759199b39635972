"""Messages that may have crashed their consumer: each is delivered alone, so that it harms no
other.

When a process dies, every message in its hands has used up an attempt. Nobody can tell which of
them was the cause; but the cause does it again, and its neighbours do not. So a message whose
leases ended without a word again and again (a *suspect*, `Redelivery.is_suspect`) is delivered to a
consumer that holds nothing else of the group. Until that consumer says something about the message,
it gets nothing else. A settlement or an extension says something.

A busy consumer always holds something. So one consumer of a group at a time is given nothing until
its hands are empty, but only for a while, because a handler that hangs must not keep the others'
messages waiting. After each suspect a consumer gets others first, if there are any: suspects slow a
group down and never stop it.

Known in memory only: a restart forgets whose hands are being emptied, and begins again.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from qmq_client.group.state import GroupState

#: How long a consumer is given nothing so that its hands become empty, at most; its lease if that
#: is shorter.
EMPTYING_MS_MAX: Final = 10_000


class Turn(Enum):
    """What a pull is to be given."""

    #: Whatever is there, except suspects.
    OTHERS = "others"
    #: The same; a suspect if there is nothing else.
    OTHERS_FIRST = "others first"
    #: The next suspect.
    SUSPECT = "suspect"
    NOTHING = "nothing"


class Suspects:
    """Whose hands are kept free, in one group; belongs to the loop thread."""

    __slots__ = ("_emptying", "_emptying_until_ms", "_holding", "_others_next", "_slow", "_state")

    def __init__(self, state: GroupState) -> None:
        """`state` is only read."""
        self._state = state
        #: Consumer → pull sequence and end of lease of the suspect that it holds.
        self._holding: dict[str, tuple[int, int]] = {}
        #: The consumer that is given nothing until its hands are empty.
        self._emptying: str | None = None
        self._emptying_until_ms = 0
        #: Consumers whose hands did not become empty in time, until they do.
        self._slow: set[str] = set()
        #: Consumers whose last answer was a suspect.
        self._others_next: set[str] = set()

    def turn(self, consumer: str, lease_ms: int, now_ms: int) -> Turn:
        """What to give this consumer now."""
        if self._is_holding(consumer):
            return Turn.NOTHING
        if not self._state.redeliveries.has_suspect(now_ms):
            return Turn.OTHERS
        is_empty = self._has_empty_hands(consumer)
        if is_empty:
            self._slow.discard(consumer)
        if is_empty or consumer in self._slow:
            return Turn.OTHERS_FIRST if consumer in self._others_next else Turn.SUSPECT
        if self._emptying is None:
            self._emptying = consumer
            self._emptying_until_ms = now_ms + min(lease_ms, EMPTYING_MS_MAX)
        return Turn.NOTHING if self._emptying == consumer else Turn.OTHERS

    def note_given(self, consumer: str, *, pull_sequence: int, until_ms: int) -> None:
        """This consumer was given a suspect."""
        self._holding = {one: held for one, held in self._holding.items() if self._is_holding(one)}
        self._holding[consumer] = pull_sequence, until_ms
        self._others_next.add(consumer)
        if self._emptying == consumer:
            self._emptying = None

    def note_others(self, consumer: str) -> None:
        """This consumer was given others, or there were none."""
        self._others_next.discard(consumer)

    def look(self, now_ms: int) -> int | None:
        """End what has lasted too long or serves no purpose; returns when to check again."""
        if self._state.redeliveries.next_suspect_ms() is None:
            self._emptying = None
            self._slow.clear()
            self._others_next.clear()
            return None
        if self._emptying is None:
            return None
        if self._has_empty_hands(self._emptying):  # its hands are free, or it was not seen since
            self._emptying = None
            return None
        if now_ms >= self._emptying_until_ms:
            self._slow.add(self._emptying)
            self._emptying = None
            return None
        return self._emptying_until_ms

    def is_held_back(self, consumer: str) -> bool:
        """Whether a pull of this consumer would be given nothing, whatever there is."""
        if self._is_holding(consumer):
            return True
        return self._emptying == consumer and not self._has_empty_hands(consumer)

    def _is_holding(self, consumer: str) -> bool:
        held, log = self._holding.get(consumer), self._state.consumer(consumer)
        if held is None or log is None:
            return False
        pull_sequence, until_ms = held
        lease = log.at(pull_sequence)
        return lease is not None and lease.until_ms == until_ms

    def _has_empty_hands(self, consumer: str) -> bool:
        log = self._state.consumer(consumer)
        return log is None or not log.in_flight
