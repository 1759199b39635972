"""Messages that a group does not get again, and why.

There may be very many. Each is kept as the bytes that a snapshot has of it, in blocks of neighbouring
sequences. Of each letter the sequence and the time of its death stay in memory; the bytes of a block
may be *paged out* by a buffer pool (`Pool`) to wherever that keeps its pages, and are read again when
a letter is read or changes the block. Without a pool everything stays in memory.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterator, MutableMapping
from itertools import chain, islice
from typing import Final, NamedTuple, Protocol

import msgspec

from qmq_client.group.history import History

#: A consumer rejected it.
REJECTED: Final = "rejected"
#: It was delivered as often as the group allows.
ATTEMPTS_USED_UP: Final = "attempts used up"
#: Its time to live ended before it was delivered.
EXPIRED: Final = "expired"
#: Letters and bytes of one block, at most: it is read or written in less than a millisecond. A letter
#: that is longer has a block to itself.
BLOCK_LETTERS_MAX: Final = 1_024
BLOCK_BYTES_MAX: Final = 256 * 1024
#: Letters that are looked at at a time: about ten milliseconds.
LEAVING_MAX: Final = 10_000
#: A group with so many blocks may have to read as many in one turn: some ten milliseconds.
_BLOCKS_AT_ONCE: Final = 50
#: Memory of one letter that stays when its block is paged out: sequence and time, and room to grow.
LETTER_BYTES: Final = 20
#: Memory of one block next to its letters.
BLOCK_BYTES: Final = 1_536
#: Memory of one letter in memory next to its bytes: their head, their place in a list.
HELD_BYTES: Final = 64


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
_PAGE: Final = msgspec.msgpack.Decoder(list[DeadLetter])
_PARTS: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])


class Page(Protocol):
    """The letters of one block outside the memory: an array in MessagePack. It never changes."""

    def read(self) -> bytes:
        """All of it, as it was written, in any thread; raises if that cannot be read."""
        ...


class MemoryPage(NamedTuple):
    """The same in memory."""

    letters: tuple[bytes, ...]

    def read(self) -> bytes:
        return _array_head(len(self.letters)) + b"".join(self.letters)


class Pool(Protocol):
    """Knows which blocks are in memory, and pages out those that were not used for longest."""

    def used(self, block: Block) -> None:
        """This block is in memory; it was just read or changed."""
        ...

    def forget(self, block: Block) -> None:
        """This block is not used any more; to free very many at once would take too long."""
        ...


class Block:
    """Neighbouring letters, by sequence."""

    __slots__ = ("at_ms", "encoded_bytes", "letters", "newest_ms", "page", "sequences")

    def __init__(self) -> None:
        self.sequences: array[int] = array("Q")
        #: When each of them died.
        self.at_ms: array[int] = array("q")
        #: Each in MessagePack; None while the block is paged out.
        self.letters: list[bytes] | None = []
        #: What says the same as `letters`; None if it was changed since.
        self.page: Page | None = None
        self.encoded_bytes = 0
        #: None of them died later.
        self.newest_ms = 0

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def memory_bytes(self) -> int:
        """What its letters take in memory besides what stays, roughly."""
        if self.letters is None:
            return 0
        return self.encoded_bytes + HELD_BYTES * len(self.sequences)

    @property
    def is_full(self) -> bool:
        """Whether it gets no further letter."""
        return len(self.sequences) >= BLOCK_LETTERS_MAX or self.encoded_bytes >= BLOCK_BYTES_MAX

    def index(self, sequence: int) -> int | None:
        """Where this letter stands; None if it is not there."""
        index = bisect_left(self.sequences, sequence)
        is_there = index < len(self.sequences) and self.sequences[index] == sequence
        return index if is_there else None

    def loaded(self) -> list[bytes]:
        """Its letters, in memory from now on; raises what `Page.read` does."""
        if self.letters is None:
            assert self.page is not None
            self.letters = [bytes(one) for one in _PARTS.decode(self.page.read())]
            assert len(self.letters) == len(self.sequences)
        return self.letters

    def page_out(self, page: Page) -> None:
        """Drop what this page says."""
        self.page, self.letters = page, None

    def content(self) -> Page:
        """Its letters as they are now, however the block changes."""
        if self.letters is not None:
            return MemoryPage(tuple(self.letters))
        assert self.page is not None
        return self.page

    def put(self, sequence: int, encoded: bytes, at_ms: int) -> None:
        letters = self.loaded()
        index = bisect_left(self.sequences, sequence)
        if index < len(letters) and self.sequences[index] == sequence:
            self.encoded_bytes -= len(letters[index])
            letters[index], self.at_ms[index] = encoded, at_ms
        else:
            self.sequences.insert(index, sequence)
            self.at_ms.insert(index, at_ms)
            letters.insert(index, encoded)
        self.encoded_bytes += len(encoded)
        self.newest_ms = max(self.newest_ms, at_ms)
        self.page = None

    def take(self, index: int) -> None:
        self.encoded_bytes -= len(self.loaded().pop(index))
        del self.sequences[index], self.at_ms[index]
        self.page = None

    def cut(self, begin: int, end: int) -> Block:
        """Take out those from place `begin` to before `end`."""
        letters, gone = self.loaded(), Block()
        gone.sequences, gone.at_ms = self.sequences[begin:end], self.at_ms[begin:end]
        gone.letters = letters[begin:end]
        gone.newest_ms, self.page = self.newest_ms, None
        gone.encoded_bytes = sum(map(len, gone.letters))
        self.encoded_bytes -= gone.encoded_bytes
        del self.sequences[begin:end], self.at_ms[begin:end], letters[begin:end]
        return gone


class DeadLetters(MutableMapping[int, DeadLetter]):
    """The dead letters of one group, by sequence.

    Retention asks each second which is the first that it must wait for: what it need not wait for is
    passed once, and not looked at again.
    """

    __slots__ = (
        "_blocks",
        "_count",
        "_firsts",
        "_needed_from",
        "_pool",
        "encoded_bytes",
    )

    def __init__(self, pool: Pool | None = None) -> None:
        self._pool = pool
        #: In order. Each has what lies between its own first sequence and the next one's.
        self._blocks: list[Block] = []
        self._firsts: list[int] = []
        self._count = 0
        #: Bytes of all letters, in memory or not.
        self.encoded_bytes = 0
        #: Retention waits for no letter with a lower sequence.
        self._needed_from = 0

    @property
    def memory_bytes(self) -> int:
        """The memory that they take even when all blocks are paged out, roughly."""
        return LETTER_BYTES * self._count + BLOCK_BYTES * len(self._blocks)

    @property
    def next_sequence(self) -> int:
        """One more than the highest; 0 if there are none."""
        return self._blocks[-1].sequences[-1] + 1 if self._blocks else 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(block.sequences for block in self._blocks)

    def __contains__(self, sequence: object) -> bool:
        return isinstance(sequence, int) and self._find(sequence) is not None

    def __getitem__(self, sequence: int) -> DeadLetter:
        found = self._find(sequence)
        if found is None:
            raise KeyError(sequence)
        block, index = found
        encoded = block.loaded()[index]
        self._used(block)
        return _DECODER.decode(encoded)

    def __setitem__(self, sequence: int, letter: DeadLetter) -> None:
        # Copied, because what the encoder gives has room to spare.
        encoded = bytes(memoryview(_ENCODER.encode(letter)))
        block = self._block_for(sequence)
        before = len(block), block.encoded_bytes
        block.put(sequence, encoded, letter.at_ms)
        self._count += len(block) - before[0]
        self.encoded_bytes += block.encoded_bytes - before[1]
        self._needed_from = min(self._needed_from, sequence)
        self._used(block)

    def __delitem__(self, sequence: int) -> None:
        found = self._find(sequence)
        if found is None:
            raise KeyError(sequence)
        block, index = found
        before = block.encoded_bytes
        block.take(index)
        self.encoded_bytes += block.encoded_bytes - before
        self._count -= 1
        self._used(block)
        if not len(block):
            place = self._place(sequence)
            del self._blocks[place], self._firsts[place]
            self._forget(block)

    def died_ms(self, sequence: int) -> int | None:
        """When this message died; None if it is no dead letter. Reads no page."""
        found = self._find(sequence)
        return None if found is None else found[0].at_ms[found[1]]

    def changed_at_once(self, count_max: int) -> int:
        """How many of so many letters may be changed in one turn: fewer where each may need a page."""
        return count_max if len(self._blocks) <= _BLOCKS_AT_ONCE else max(1, count_max // 10)

    def load(self, first: int, next_: int) -> None:
        """Read what a change of each letter in this range needs; raises what `Page.read` does, with nothing changed."""
        low, high = max(0, self._place(first)), self._place(next_ - 1)
        for block in self._blocks[low : max(low, high) + 1]:
            block.loaded()
            self._used(block)

    def between(self, first: int, next_: int, count_max: int | None = None) -> list[int]:
        """Sequences in this range, lowest first."""
        return list(islice(self._in_order(first, next_), count_max))

    def count(self, first: int, next_: int) -> int:
        """How many there are in this range."""
        count = 0
        for place in range(max(0, self._place(first)), self._place(next_ - 1) + 1):
            sequences = self._blocks[place].sequences
            low, high = bisect_left(sequences, first), bisect_left(sequences, next_)
            count += max(0, high - low)
        return count

    def forget(self, first: int, next_: int | None = None) -> None:
        """Forget those in this range, or all from `first` on; a pool frees their memory by and by."""
        low = max(0, self._place(first))
        high = len(self._blocks) if next_ is None else max(low, self._place(next_ - 1) + 1)
        kept: list[tuple[Block, int]] = []
        for place in range(low, high):
            block = self._blocks[place]
            begin = bisect_left(block.sequences, first)
            end = len(block) if next_ is None else bisect_left(block.sequences, next_)
            gone = block
            if end - begin < len(block):  # at an edge of the range
                kept.append((block, self._firsts[place]))
                gone = block.cut(begin, end) if begin < end else Block()
                self._used(block)
            self._count -= len(gone)
            self.encoded_bytes -= gone.encoded_bytes
            self._forget(gone)
        self._blocks[low:high] = [block for block, _ in kept]
        self._firsts[low:high] = [number for _, number in kept]

    def contents(self) -> tuple[Page, ...]:
        """All of them as they are now, block by block."""
        return tuple(block.content() for block in self._blocks)

    def add(self, page: Page, *, is_kept: bool = True) -> None:
        """Add the letters of a page; `is_kept`: it stays readable, and need not be written again.

        Raises `msgspec.MsgspecError` or `UnicodeDecodeError` for bytes that are no such page,
        `ValueError` unless its sequences rise, from those that are there already, and what `Page.read` does.
        """
        encoded, block = page.read(), Block()
        letters = letters_of(encoded)
        for letter in letters:
            if letter.sequence < (block.sequences[-1] + 1 if len(block) else self.next_sequence):
                raise ValueError(f"dead letter {letter.sequence} is out of order")
            block.sequences.append(letter.sequence)
            block.at_ms.append(letter.at_ms)
        if not letters:
            raise ValueError("a page without dead letters")
        block.letters = [bytes(one) for one in _PARTS.decode(encoded)]
        block.page = page if is_kept else None
        block.encoded_bytes = sum(map(len, block.letters))
        block.newest_ms = max(block.at_ms)
        self._count += len(block)
        self.encoded_bytes += block.encoded_bytes
        self._insert(len(self._blocks), block.sequences[0], block)
        self._used(block)

    def first_since(
        self, at_ms: int, *, without: Container[int], first_sequence: int = 0
    ) -> int | None:
        """The lowest sequence from `first_sequence` on that died at this time or later, or None.

        A lower one when very many died before; it rises with each call. Requires: neither the time
        nor what is left out ever goes back.
        """
        first = max(self._needed_from, first_sequence)
        for looks, sequence in enumerate(self._in_order(first, None, since_ms=at_ms)):
            self._needed_from = sequence
            if looks == LEAVING_MAX:
                return sequence
            died_ms = self.died_ms(sequence)
            if sequence not in without and died_ms is not None and died_ms >= at_ms:
                return sequence
        self._needed_from = max(first, self.next_sequence)
        return None

    def _in_order(
        self, first: int, next_: int | None, *, since_ms: int | None = None
    ) -> Iterator[int]:
        """Sequences from `first` on, without blocks of which all died before `since_ms`."""
        for block in self._blocks[max(0, self._place(first)) :]:
            if since_ms is not None and block.newest_ms < since_ms:
                continue
            for sequence in block.sequences[bisect_left(block.sequences, first) :]:
                if next_ is not None and sequence >= next_:
                    return
                yield sequence

    def _place(self, sequence: int) -> int:
        """Of the block that has this sequence if there is such a letter; -1 if there is none."""
        return bisect_right(self._firsts, sequence) - 1

    def _find(self, sequence: int) -> tuple[Block, int] | None:
        place = self._place(sequence)
        if place < 0:
            return None
        block = self._blocks[place]
        index = block.index(sequence)
        return None if index is None else (block, index)

    def _block_for(self, sequence: int) -> Block:
        """The block that has this sequence, or gets it: made, or made room in, if need be."""
        place = max(0, self._place(sequence))
        if not self._blocks:
            return self._insert(0, sequence, Block())
        self._firsts[0] = min(self._firsts[0], sequence)
        block = self._blocks[place]
        if not block.is_full:
            return block
        if place + 1 == len(self._blocks) and sequence > block.sequences[-1]:
            return self._insert(place + 1, sequence, Block())
        if len(block) == 1 or (
            block.index(sequence) is not None and block.encoded_bytes < BLOCK_BYTES_MAX
        ):
            return block
        middle = block.sequences[len(block) // 2]
        upper = self._insert(place + 1, middle, block.cut(len(block) // 2, len(block)))
        self._used(block)
        self._used(upper)
        return upper if sequence >= middle else block

    def _insert(self, place: int, first: int, block: Block) -> Block:
        self._blocks.insert(place, block)
        self._firsts.insert(place, first)
        return block

    def _used(self, block: Block) -> None:
        if self._pool is not None:
            self._pool.used(block)

    def _forget(self, block: Block) -> None:
        if self._pool is not None:
            self._pool.forget(block)


def letters_of(page: bytes) -> list[DeadLetter]:
    """What stands in the bytes of a page; raises `msgspec.MsgspecError` or `UnicodeDecodeError` if it is none."""
    return _PAGE.decode(page)


def _array_head(count: int) -> bytes:
    """What stands before the elements of an array, as short as it can be."""
    if count < 1 << 4:
        return bytes([0x90 | count])
    return b"\xdc" + count.to_bytes(2) if count < 1 << 16 else b"\xdd" + count.to_bytes(4)
