"""The dead letters of a group: messages that the group gave up, each with the reason.

A group may have millions. Each letter is kept in the encoding of a snapshot, in blocks of
neighbouring sequences. The sequence and the time of death of every letter stay in memory. A buffer
pool (`Pool`) may *page out* the bytes of a block; they are read again when one of its letters is
read or the block changes. Without a pool everything stays in memory.
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
#: Most letters and bytes of one block, so that it is read or written in less than a millisecond. A
#: longer letter has a block to itself.
BLOCK_LETTERS_MAX: Final = 1_024
BLOCK_BYTES_MAX: Final = 256 * 1024
#: Letters that one call of `first_since` checks: about ten milliseconds.
LEAVING_MAX: Final = 10_000
#: Blocks that one change may read at once: some ten milliseconds.
_BLOCKS_AT_ONCE: Final = 50
#: Memory of one letter whose block is paged out: sequence, time, and spare room of the arrays.
LETTER_BYTES: Final = 20
#: Memory of one block besides its letters.
BLOCK_BYTES: Final = 1_536
#: Memory of one loaded letter besides its bytes: the object's header and its slot in the list.
HELD_BYTES: Final = 64


class DeadLetter(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True
):
    """A message that this group does not get again unless it is replayed."""

    sequence: int
    attempts: int
    reason: str
    #: The error that the last consumer reported.
    error: str
    #: When it died, by the broker's clock.
    at_ms: int
    #: Its attempts, oldest first.
    history: History = ()


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(DeadLetter)
_PAGE: Final = msgspec.msgpack.Decoder(list[DeadLetter])
_PARTS: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])


class Page(Protocol):
    """The letters of one block, stored as an array in MessagePack. It never changes."""

    def read(self) -> bytes:
        """The whole array as it was written, in any thread; raises if it cannot be read."""
        ...


class MemoryPage(NamedTuple):
    """A page in memory."""

    letters: tuple[bytes, ...]

    def read(self) -> bytes:
        return _array_head(len(self.letters)) + b"".join(self.letters)


class Pool(Protocol):
    """Knows which blocks are in memory, and pages out the least recently used."""

    def used(self, block: Block) -> None:
        """Record that this block is in memory and was just read or changed."""
        ...

    def forget(self, block: Block) -> None:
        """Free this block, which is no longer used. The pool may free it later, because freeing
        many blocks takes long.
        """
        ...


class Block:
    """Letters with neighbouring sequences, in order."""

    __slots__ = ("at_ms", "encoded_bytes", "letters", "newest_ms", "page", "sequences")

    def __init__(self) -> None:
        self.sequences: array[int] = array("Q")
        #: When each of them died.
        self.at_ms: array[int] = array("q")
        #: Each in MessagePack; None while the block is paged out.
        self.letters: list[bytes] | None = []
        #: A page with the same content as `letters`; None if they changed since.
        self.page: Page | None = None
        self.encoded_bytes = 0
        #: Upper bound of the times in `at_ms`.
        self.newest_ms = 0

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def memory_bytes(self) -> int:
        """Roughly the memory that paging it out would free."""
        if self.letters is None:
            return 0
        return self.encoded_bytes + HELD_BYTES * len(self.sequences)

    @property
    def is_full(self) -> bool:
        """Whether the block has reached a limit and accepts no further letter."""
        return len(self.sequences) >= BLOCK_LETTERS_MAX or self.encoded_bytes >= BLOCK_BYTES_MAX

    def index(self, sequence: int) -> int | None:
        """The index of this letter in the block; None if the block does not have it."""
        index = bisect_left(self.sequences, sequence)
        is_there = index < len(self.sequences) and self.sequences[index] == sequence
        return index if is_there else None

    def loaded(self) -> list[bytes]:
        """Its letters, read into memory if they were paged out; raises the errors of `Page.read`."""
        if self.letters is None:
            assert self.page is not None
            self.letters = [bytes(one) for one in _PARTS.decode(self.page.read())]
            assert len(self.letters) == len(self.sequences)
        return self.letters

    def page_out(self, page: Page) -> None:
        """Drop the letters from memory; `page` has the same content."""
        self.page, self.letters = page, None

    def content(self) -> Page:
        """Its letters as they are now; later changes of the block do not affect the page."""
        if self.letters is not None:
            return MemoryPage(tuple(self.letters))
        assert self.page is not None
        return self.page

    def put(self, sequence: int, encoded: bytes, at_ms: int) -> None:
        """Add a letter, or replace the one with this sequence; raises the errors of `Page.read`."""
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
        """Remove the letter at this index; raises the errors of `Page.read`."""
        self.encoded_bytes -= len(self.loaded().pop(index))
        del self.sequences[index], self.at_ms[index]
        self.page = None

    def cut(self, begin: int, end: int) -> Block:
        """Move the letters from index `begin` to before `end` into a new block."""
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

    Each second, retention asks for the first letter whose message it must keep. Each letter whose
    message may be deleted is checked only once.
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
        #: In order; each covers the sequences from its own in `_firsts` to before the next there.
        self._blocks: list[Block] = []
        self._firsts: list[int] = []
        self._count = 0
        #: Bytes of all letters, in memory or not.
        self.encoded_bytes = 0
        #: Retention need not keep the messages of letters with a lower sequence.
        self._needed_from = 0

    @property
    def memory_bytes(self) -> int:
        """Roughly the memory of the letters even when all blocks are paged out."""
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
        # Copied, because the encoder's result has spare capacity.
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
        """When this message died; None if it is not a dead letter. Reads no page."""
        found = self._find(sequence)
        return None if found is None else found[0].at_ms[found[1]]

    def changed_at_once(self, count_max: int) -> int:
        """How many letters to change at once: `count_max`, or a tenth if each may need a page."""
        return count_max if len(self._blocks) <= _BLOCKS_AT_ONCE else max(1, count_max // 10)

    def load(self, first: int, next_: int) -> None:
        """Load the blocks of this range, so that changing its letters reads no page.

        Raises the errors of `Page.read`, with nothing changed.
        """
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
        """Remove the letters in this range, or all from `first` on; a pool frees them later."""
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
        """A page for each block with its letters as they are now."""
        return tuple(block.content() for block in self._blocks)

    def add(self, page: Page, *, is_kept: bool = True) -> None:
        """Add the letters of a page after all others.

        With `is_kept` the page stays readable, so its block need not be written again. Raises
        `msgspec.MsgspecError` or `UnicodeDecodeError` for bytes that are not a page, `ValueError`
        if it is empty or a sequence is not higher than all before it, and the errors of
        `Page.read`.
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

        One call checks `LEAVING_MAX` letters. If it finds none, it returns the next one to check,
        and the next call continues there. Requires: from call to call `at_ms` never decreases, and
        no sequence leaves `without`.
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
        """Sequences from `first` on; skips blocks whose letters all died before `since_ms`."""
        for block in self._blocks[max(0, self._place(first)) :]:
            if since_ms is not None and block.newest_ms < since_ms:
                continue
            for sequence in block.sequences[bisect_left(block.sequences, first) :]:
                if next_ is not None and sequence >= next_:
                    return
                yield sequence

    def _place(self, sequence: int) -> int:
        """The place of the block that covers this sequence; -1 if all blocks begin after it."""
        return bisect_right(self._firsts, sequence) - 1

    def _find(self, sequence: int) -> tuple[Block, int] | None:
        place = self._place(sequence)
        if place < 0:
            return None
        block = self._blocks[place]
        index = block.index(sequence)
        return None if index is None else (block, index)

    def _block_for(self, sequence: int) -> Block:
        """The block for this sequence, created if needed, or split to make room."""
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
    """Decode the bytes of a page; raises `msgspec.MsgspecError` or `UnicodeDecodeError`."""
    return _PAGE.decode(page)


def _array_head(count: int) -> bytes:
    """The header of a MessagePack array, in its shortest form."""
    if count < 1 << 4:
        return bytes([0x90 | count])
    return b"\xdc" + count.to_bytes(2) if count < 1 << 16 else b"\xdd" + count.to_bytes(4)
