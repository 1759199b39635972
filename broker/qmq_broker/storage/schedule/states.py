"""The states of the messages of one bucket: two bits for each, in memory and in the dispatch log.

Only the writer decides: it checks the state before it writes a release or a cancellation, and
records the new state with the write. So a message has one state, even with concurrent requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Final


class DelayedState(IntEnum):
    """The state of one delayed message."""

    #: It waits for its due time.
    PENDING = 0
    #: It is in its consume queue.
    RELEASED = 1
    #: It will not be delivered.
    CANCELLED = 2
    #: It waits under another due time.
    RESCHEDULED = 3


_STATES: Final = tuple(DelayedState)
_MASK: Final = 0b11
#: State and sequence share one number of the dispatch log.
_STATE_SHIFT: Final = 56
_SEQUENCE_MASK: Final = (1 << _STATE_SHIFT) - 1


def pack_state(state: DelayedState, sequence: int) -> int:
    """One entry of the dispatch log."""
    return state << _STATE_SHIFT | sequence


def unpack_state(entry: int) -> tuple[DelayedState, int]:
    """State and sequence of an entry; raises `ValueError` for an invalid one."""
    return DelayedState(entry >> _STATE_SHIFT), entry & _SEQUENCE_MASK


class DelayedStates:
    """The states of one bucket, by schedule sequence."""

    __slots__ = ("_bits",)

    def __init__(self) -> None:
        self._bits = bytearray()

    def get(self, sequence: int) -> DelayedState:
        """The state of one message."""
        place = sequence >> 2
        if place >= len(self._bits):
            return DelayedState.PENDING
        return _STATES[self._bits[place] >> 2 * (sequence & 3) & _MASK]

    def pending(self, sequences: Sequence[int | None]) -> list[int]:
        """The indexes of the pending messages among many sequences. A sequence of None is not pending."""
        bits = self._bits
        end = 4 * len(bits)
        return [
            index
            for index, sequence in enumerate(sequences)
            if sequence is not None
            and (sequence >= end or not bits[sequence >> 2] >> 2 * (sequence & 3) & _MASK)
        ]

    def set(self, sequence: int, state: DelayedState) -> bool:
        """Give a pending message this state; returns whether it was pending."""
        return bool(self.set_all((sequence,), state))

    def set_all(self, sequences: Sequence[int], state: DelayedState) -> list[int]:
        """Give the pending ones of these messages this state; returns them."""
        bits, pending = self._bits, []
        places = max(sequences, default=-1) // 4 + 1
        bits.extend(bytes(max(0, places - len(bits))))
        for sequence in sequences:
            place, shift = sequence >> 2, 2 * (sequence & 3)
            if not bits[place] >> shift & _MASK:
                bits[place] |= state << shift
                pending.append(sequence)
        return pending
