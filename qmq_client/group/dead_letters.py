"""Messages that a group does not get again, and why.

There may be very many, so each is kept as the bytes that a snapshot has of it: a third of the memory,
and nothing for the garbage collector to visit. They stand in blocks of some thousands, by sequence: what
is asked about a range of them, or done with it, costs as much as its blocks, not as all of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterator, MutableMapping, Sequence
from itertools import chain, islice
from typing import Final

import msgspec

from qmq_client.group.history import History

#: A consumer rejected it.
REJECTED: Final = "rejected"
#: It was delivered as often as the group allows.
ATTEMPTS_USED_UP: Final = "attempts used up"
#: Its time to live ended before it was delivered.
EXPIRED: Final = "expired"
#: Letters of one block, at most: to put them in order takes less than a millisecond.
BLOCK_LETTERS_MAX: Final = 4_096
#: Letters that are looked at, or freed, at a time: about ten milliseconds.
LEAVING_MAX: Final = 10_000
#: Memory of one letter next to its bytes: their head, its number, and its places in a table that may be half empty.
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


class _Block:
    """Neighbouring letters, in any order."""

    __slots__ = ("encoded_bytes", "letters", "most", "newest_ms")

    def __init__(self, letters: dict[int, bytes], newest_ms: int) -> None:
        self.letters = letters
        self.encoded_bytes = sum(map(len, letters.values()))
        #: None of them died later.
        self.newest_ms = newest_ms
        #: So many there were: the table has room for them.
        self.most = len(letters)

    def put(self, sequence: int, encoded: bytes, at_ms: int) -> None:
        self.encoded_bytes += len(encoded) - len(self.letters.get(sequence, b""))
        self.letters[sequence] = encoded
        self.newest_ms = max(self.newest_ms, at_ms)
        self.most = max(self.most, len(self.letters))

    def take(self, sequence: int) -> None:
        self.encoded_bytes -= len(self.letters.pop(sequence))
        if 4 * len(self.letters) < self.most:
            self.letters = dict(self.letters.items())
            self.most = len(self.letters)

    def cut(self, sequence: int) -> _Block:
        """Take out those from this sequence on."""
        kept = {one: its for one, its in self.letters.items() if one < sequence}
        gone = {one: its for one, its in self.letters.items() if one >= sequence}
        self.letters, self.most = kept, len(kept)
        self.encoded_bytes = sum(map(len, kept.values()))
        return _Block(gone, self.newest_ms)


class DeadLetters(MutableMapping[int, DeadLetter]):
    """The dead letters of one group, by sequence.

    Retention asks each second which is the first that it must wait for: what it need not wait for is
    passed once, and not looked at again.
    """

    __slots__ = ("_blocks", "_count", "_encoded_bytes", "_firsts", "_forgotten", "_needed_from")

    def __init__(self) -> None:
        #: In order. Each has what lies between its own first sequence and the next one's.
        self._blocks: list[_Block] = []
        self._firsts: list[int] = []
        self._count = self._encoded_bytes = 0
        #: Blocks that nobody asks for again; to free a million letters at once takes too long.
        self._forgotten: list[_Block] = []
        #: Retention waits for no letter with a lower sequence.
        self._needed_from = 0

    @property
    def memory_bytes(self) -> int:
        """The memory that all of them take, roughly."""
        return self._encoded_bytes + LETTER_BYTES * self._count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(block.letters for block in self._blocks)

    def __contains__(self, sequence: object) -> bool:
        return isinstance(sequence, int) and self._encoded(sequence) is not None

    def __getitem__(self, sequence: int) -> DeadLetter:
        encoded = self._encoded(sequence)
        if encoded is None:
            raise KeyError(sequence)
        return _DECODER.decode(encoded)

    def __setitem__(self, sequence: int, letter: DeadLetter) -> None:
        # Copied, because what the encoder gives has room to spare.
        encoded = bytes(memoryview(_ENCODER.encode(letter)))
        block = self._block_for(sequence)
        before = len(block.letters), block.encoded_bytes
        block.put(sequence, encoded, letter.at_ms)
        self._count += len(block.letters) - before[0]
        self._encoded_bytes += block.encoded_bytes - before[1]
        self._needed_from = min(self._needed_from, sequence)
        self.free(1)

    def __delitem__(self, sequence: int) -> None:
        place = self._place(sequence)
        if place < 0:
            raise KeyError(sequence)
        block = self._blocks[place]
        self._encoded_bytes -= block.encoded_bytes
        block.take(sequence)
        self._encoded_bytes += block.encoded_bytes
        self._count -= 1
        if not block.letters:
            del self._blocks[place], self._firsts[place]

    def between(self, first: int, next_: int, count_max: int | None = None) -> list[int]:
        """Sequences in this range, lowest first."""
        return list(islice(self._in_order(first, next_), count_max))

    def count(self, first: int, next_: int) -> int:
        """How many there are in this range."""
        count = 0
        for place in range(max(0, self._place(first)), self._place(next_ - 1) + 1):
            letters = self._blocks[place].letters
            is_whole = first <= self._firsts[place] and place + 1 < len(self._firsts)
            if is_whole and self._firsts[place + 1] <= next_:
                count += len(letters)
            else:
                count += sum(first <= one < next_ for one in letters)
        return count

    def forget_from(self, sequence: int) -> None:
        """Forget all from this sequence on; their memory is freed by and by."""
        place = max(0, self._place(sequence))
        if place == len(self._blocks):
            return
        gone = [self._blocks[place].cut(sequence), *self._blocks[place + 1 :]]
        keeps = place + bool(self._blocks[place].letters)
        del self._blocks[keeps:], self._firsts[keeps:]
        self._count -= sum(len(block.letters) for block in gone)
        self._encoded_bytes -= sum(block.encoded_bytes for block in gone)
        self._forgotten += gone

    def free(self, blocks: int) -> bool:
        """Free the memory of some blocks that were forgotten; whether more are left."""
        del self._forgotten[-blocks:]
        return bool(self._forgotten)

    def encoded(self) -> tuple[bytes, ...]:
        """Each as MessagePack, in no order, as they are now."""
        return tuple(chain.from_iterable(block.letters.values() for block in self._blocks))

    def first_since(
        self, at_ms: int, *, without: Container[int], first_sequence: int = 0
    ) -> int | None:
        """The lowest sequence from `first_sequence` on that died at this time or later, or None.

        A lower one when very many died before; it rises with each call. Requires: neither the time
        nor what is left out ever goes back.
        """
        self.free(LEAVING_MAX // BLOCK_LETTERS_MAX)
        first = max(self._needed_from, first_sequence)
        for looks, sequence in enumerate(self._in_order(first, None, since_ms=at_ms)):
            self._needed_from = sequence
            if looks == LEAVING_MAX:
                return sequence
            if sequence not in without and self[sequence].at_ms >= at_ms:
                return sequence
        if self._blocks:
            self._needed_from = max(first, max(self._blocks[-1].letters) + 1)
        return None

    def _in_order(
        self, first: int, next_: int | None, *, since_ms: int | None = None
    ) -> Iterator[int]:
        """Sequences from `first` on, without blocks of which all died before `since_ms`."""
        for block in self._blocks[max(0, self._place(first)) :]:
            if since_ms is not None and block.newest_ms < since_ms:
                continue
            for sequence in sorted(block.letters):
                if next_ is not None and sequence >= next_:
                    return
                if sequence >= first:
                    yield sequence

    def _place(self, sequence: int) -> int:
        """Of the block that has this sequence if there is such a letter; -1 if there is none."""
        return bisect_right(self._firsts, sequence) - 1

    def _encoded(self, sequence: int) -> bytes | None:
        place = self._place(sequence)
        return None if place < 0 else self._blocks[place].letters.get(sequence)

    def _block_for(self, sequence: int) -> _Block:
        """The block that has this sequence, or gets it: made, or made room in, if need be."""
        place = max(0, self._place(sequence))
        if not self._blocks:
            return self._insert(0, sequence, _Block({}, 0))
        self._firsts[0] = min(self._firsts[0], sequence)
        block = self._blocks[place]
        if len(block.letters) < BLOCK_LETTERS_MAX or sequence in block.letters:
            return block
        if place + 1 == len(self._blocks) and sequence > max(block.letters):
            return self._insert(place + 1, sequence, _Block({}, 0))
        middle = sorted(block.letters)[len(block.letters) // 2]
        upper = self._insert(place + 1, middle, block.cut(middle))
        return upper if sequence >= middle else block

    def _insert(self, place: int, first: int, block: _Block) -> _Block:
        self._blocks.insert(place, block)
        self._firsts.insert(place, first)
        return block


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
