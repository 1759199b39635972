"""The first dead letter that retention waits for: found without looking at the others."""

from __future__ import annotations

import random

import msgspec
import pytest

from qmq_broker.service.delivery.needed_log import first_needed
from qmq_client.group import dead_letters
from qmq_client.group.dead_letters import (
    BLOCK_BYTES,
    BLOCK_BYTES_MAX,
    BLOCK_LETTERS_MAX,
    LEAVING_MAX,
    LETTER_BYTES,
    REJECTED,
    Block,
    DeadLetter,
    DeadLetters,
    Page,
)
from qmq_client.group.state import GroupState

COUNT = 10_000


class Counted(DeadLetters):
    """Counts how many of its letters were looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    def died_ms(self, sequence: int) -> int | None:
        self.looks += 1
        return super().died_ms(sequence)


def letter(sequence: int, at_ms: int, error: str = "") -> DeadLetter:
    return DeadLetter(sequence=sequence, attempts=1, reason=REJECTED, error=error, at_ms=at_ms)


def test_retention_looks_at_few_dead_letters_however_many_there_are() -> None:
    state = GroupState(subject="orders", group="billing", first_sequence=COUNT, max_attempts=1)
    dead = state.dead = Counted()
    for sequence in range(COUNT):
        dead[sequence] = letter(sequence, at_ms=sequence)
    asked = range(0, COUNT, 100)
    assert [first_needed(state, since_ms) for since_ms in asked] == list(asked)
    assert dead.looks <= COUNT + len(asked), "each letter leaves once"
    dead.looks = 0
    for _ in range(100):
        assert first_needed(state, asked[-1]) == asked[-1]
    assert dead.looks <= 100


def test_very_many_dead_letters_leave_a_part_at_a_time_and_hold_retention_until_then() -> None:
    dead, since_ms = Counted(), 10
    for sequence in range(2 * LEAVING_MAX + 1):  # in each block some that died late, and are copied
        dead[sequence] = letter(sequence, at_ms=since_ms if sequence % 1_000 == 0 else 0)
    dead[2 * LEAVING_MAX] = letter(2 * LEAVING_MAX, at_ms=since_ms)
    copied = range(0, 2 * LEAVING_MAX, 1_000)
    found = [dead.first_since(since_ms, without=copied) for _ in range(3)]
    assert found == [LEAVING_MAX, 2 * LEAVING_MAX, 2 * LEAVING_MAX]
    assert dead.looks <= 2 * LEAVING_MAX + 1


def test_blocks_of_which_all_died_before_are_not_looked_through() -> None:
    dead = Counted()
    for sequence in range(10 * BLOCK_LETTERS_MAX):
        dead[sequence] = letter(sequence, at_ms=sequence)
    wanted = 9 * BLOCK_LETTERS_MAX + 7
    assert dead.first_since(wanted, without=()) == wanted
    assert dead.looks < BLOCK_LETTERS_MAX


def test_the_first_dead_letter_is_that_of_all_that_are_looked_through() -> None:
    rng = random.Random(7)
    dead, copies, since_ms = DeadLetters(), set[int](), 0
    for now_ms in range(5_000):
        sequence = rng.randrange(100)
        if rng.random() < 0.6:
            dead[sequence] = letter(sequence, now_ms)
        elif sequence in dead and sequence not in copies:
            del dead[sequence]
        if rng.random() < 0.01:
            copies.add(sequence)
        since_ms = max(since_ms, now_ms - rng.randrange(50, 200))
        wanted = [one for one, its in dead.items() if its.at_ms >= since_ms]
        wanted = [one for one in wanted if one not in copies]
        assert dead.first_since(since_ms, without=copies) == min(wanted, default=None)


def test_what_is_replayed_and_dies_again_takes_no_more_room_each_time() -> None:
    dead = DeadLetters()
    dead[0] = letter(0, at_ms=0)
    for now_ms in range(COUNT):
        dead[1] = letter(1, now_ms)
        assert dead.first_since(0, without=()) == 0
        del dead[1]
    assert dead.memory_bytes < BLOCK_BYTES + 2 * LETTER_BYTES


class Pages:
    """Keeps pages as a broker keeps files of them; each is read as often as it is needed."""

    def __init__(self) -> None:
        self.reads = 0

    def write(self, content: bytes) -> _Page:
        return _Page(self, content)


class _Page:
    def __init__(self, pages: Pages, content: bytes) -> None:
        self._pages, self._content = pages, content

    def read(self) -> bytes:
        self._pages.reads += 1
        return self._content


class Pool:
    """Keeps no block in memory, or one that it draws."""

    def __init__(self, pages: Pages, rng: random.Random) -> None:
        self._pages, self._rng = pages, rng
        self.blocks: set[Block] = set()

    def used(self, block: Block) -> None:
        self.blocks.add(block)
        if self._rng.random() < 0.8:
            self.page_out()

    def forget(self, block: Block) -> None:
        self.blocks.discard(block)

    def page_out(self) -> None:
        for block in self.blocks:
            block.page_out(block.page or self._pages.write(block.content().read()))
        self.blocks.clear()


@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_blocks_hold_what_a_table_would(
    seed: int, is_paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "BLOCK_LETTERS_MAX", 5)
    rng = random.Random(seed)
    pool = Pool(Pages(), rng) if is_paged else None
    dead, table = DeadLetters(pool), dict[int, DeadLetter]()
    taken: list[tuple[tuple[Page, ...], dict[int, DeadLetter]]] = []
    for now_ms in range(1_500):
        sequence, draw = rng.randrange(300), rng.random()
        if draw < 0.7:
            dead[sequence] = table[sequence] = letter(sequence, now_ms, "x" * rng.randrange(9))
        elif draw < 0.97:
            assert (sequence in dead) == (sequence in table)
            if sequence in table:
                assert dead.pop(sequence) == table.pop(sequence)
        elif draw < 0.98:
            taken.append((dead.contents(), dict(table)))
        elif draw < 0.99:
            dead.forget(sequence)
            table = {one: its for one, its in table.items() if one < sequence}
        else:
            end = sequence + rng.randrange(60)
            dead.forget(sequence, end)
            table = {one: its for one, its in table.items() if not sequence <= one < end}
        first, next_ = rng.randrange(300), rng.randrange(301)
        wanted = sorted(one for one in table if first <= one < next_)
        assert dead.between(first, next_) == wanted
        assert dead.between(first, next_, 3) == wanted[:3]
        assert dead.count(first, next_) == len(wanted)
        assert len(dead) == len(table)
        assert dead.next_sequence == max(table, default=-1) + 1
        assert dead.died_ms(first) == (table[first].at_ms if first in table else None)
        assert dead.get(first) == table.get(first)
    assert dict(dead) == table
    assert dead.encoded_bytes == sum(len(msgspec.msgpack.encode(one)) for one in table.values())
    assert taken
    for contents, as_it_was in taken:
        again = DeadLetters(pool)
        for content in contents:
            again.add(content)
        assert dict(again) == as_it_was
    assert (pool is None) or pool._pages.reads


def test_what_retention_and_listings_ask_reads_no_page() -> None:
    pages = Pages()
    pool = Pool(pages, random.Random(1))
    dead = DeadLetters(pool)
    for sequence in range(COUNT):
        dead[sequence] = letter(sequence, at_ms=sequence)
    pool.page_out()
    pages.reads = 0
    assert dead.first_since(COUNT // 2, without=()) == COUNT // 2
    assert dead.count(7, COUNT) == COUNT - 7
    assert dead.between(COUNT // 2, COUNT, 3) == [COUNT // 2, COUNT // 2 + 1, COUNT // 2 + 2]
    assert (COUNT in dead, COUNT - 1 in dead) == (False, True)
    dead.forget(BLOCK_LETTERS_MAX, COUNT // 2 * BLOCK_LETTERS_MAX)
    dead.forget(0)
    assert not pages.reads


def test_a_block_of_long_letters_has_few_of_them() -> None:
    dead = DeadLetters()
    for sequence in (*range(0, 200, 2), *range(1, 200, 2)):
        dead[sequence] = letter(sequence, 0)
    for sequence in range(200):
        dead[sequence] = letter(sequence, 0, "x" * (BLOCK_BYTES_MAX // 4))
    pages = [content.read() for content in dead.contents()]
    assert max(map(len, pages)) <= 2 * BLOCK_BYTES_MAX
    assert list(dead) == list(range(200))
