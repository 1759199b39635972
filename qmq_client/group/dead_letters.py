"""Messages that a group does not get again, and why.

There may be very many, so each is kept as the bytes that a snapshot has of it: a third of the memory,
and nothing for the garbage collector to visit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterator, MutableMapping, Sequence
from heapq import heappop, heappush
from itertools import islice, takewhile
from typing import Final

import msgspec

from qmq_client.group.history import History

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
#: Memory of one letter beside its bytes: their head, its number, and places in table and heap.
LETTER_BYTES: Final = 224


class DeadLetter(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True
):
    """A message that this group does not get again unless it is replayed."""

    sequence: int
    attempts: int
    reason: str
    #: What the last consumer said.
    error: str
    at_ms: int
    #: The attempts so far.
    history: History = ()


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(DeadLetter)


class DeadLetters(MutableMapping[int, DeadLetter]):
    """The dead letters of one group, by sequence.

    Retention asks each second which is the first that it must wait for. So their sequences stand in a
    heap as well, from which those leave that it need not wait for. People ask for them in order, a page
    at a time: the order is kept from one page to the next.
    """

    __slots__ = ("_by_sequence", "_encoded_bytes", "_first", "_heap", "_order")

    def __init__(self) -> None:
        self._by_sequence: dict[int, bytes] = {}
        self._encoded_bytes = 0
        self._heap: list[int] = []
        #: No letter has a lower sequence.
        self._first = 0
        #: All sequences in order, and some that are no letters any more; empty if not known.
        self._order: list[int] = []

    @property
    def memory_bytes(self) -> int:
        """The memory that all of them take, roughly."""
        return self._encoded_bytes + LETTER_BYTES * len(self._by_sequence)

    def __len__(self) -> int:
        return len(self._by_sequence)

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_sequence)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._by_sequence

    def __getitem__(self, sequence: int) -> DeadLetter:
        return _DECODER.decode(self._by_sequence[sequence])

    def __setitem__(self, sequence: int, letter: DeadLetter) -> None:
        before = self._by_sequence.get(sequence)
        # Copied, because what the encoder gives has room to spare.
        encoded = self._by_sequence[sequence] = bytes(memoryview(_ENCODER.encode(letter)))
        self._encoded_bytes += len(encoded) - len(before or b"")
        if before is None:
            self._note_new(sequence)
        if before is not None and _DECODER.decode(before).at_ms == letter.at_ms:
            return
        if len(self._heap) > 2 * len(self) + _FEW:  # most of them are no dead letters any more
            self._heap = sorted(self)
        else:
            heappush(self._heap, sequence)

    def __delitem__(self, sequence: int) -> None:
        self._encoded_bytes -= len(self._by_sequence.pop(sequence))

    def between(self, first: int, next_: int, count_max: int | None = None) -> list[int]:
        """Sequences in this range, lowest first."""
        if not self._order or len(self._order) > 2 * len(self) + _FEW:
            self._order = sorted(self)
        order, known = self._order, self._by_sequence
        found = (order[place] for place in range(bisect_left(order, first), len(order)))
        return list(
            islice((one for one in takewhile(next_.__gt__, found) if one in known), count_max)
        )

    def forget_from(self, sequence: int) -> None:
        """Forget all from this sequence on; nearly all or nearly none of a million in some ten milliseconds."""
        known = self._by_sequence
        kept = [one for one in known if one < sequence] if sequence > self._first else []
        if 2 * len(kept) > len(known):
            for one in [] if len(kept) == len(known) else [one for one in known if one >= sequence]:
                self._encoded_bytes -= len(known.pop(one))
            return
        self._by_sequence = {one: known[one] for one in kept}
        self._encoded_bytes = sum(map(len, self._by_sequence.values()))
        self._heap, self._order = sorted(kept), []

    def _note_new(self, sequence: int) -> None:
        order = self._order
        self._first = min(self._first, sequence) if len(self) > 1 else sequence
        if len(self) == 1:
            self._order = [sequence]
        elif order and sequence > order[-1]:
            order.append(sequence)
        elif order and order[bisect_left(order, sequence)] != sequence:
            self._order = []

    def encoded(self) -> tuple[bytes, ...]:
        """Each as MessagePack, in no order, as they are now."""
        return tuple(self._by_sequence.values())

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


def encoded_array(elements: Sequence[bytes]) -> bytes:
    """An array of what is encoded already, made in parts: other threads run in between."""
    parts = range(0, len(elements), LEAVING_MAX)
    return _array_head(len(elements)) + b"".join(
        [b"".join(elements[first : first + LEAVING_MAX]) for first in parts]
    )


def _array_head(count: int) -> bytes:
    """What stands before the elements of an array, as short as it can be."""
    if count < 1 << 4:
        return bytes([0x90 | count])
    return b"\xdc" + count.to_bytes(2) if count < 1 << 16 else b"\xdd" + count.to_bytes(4)
