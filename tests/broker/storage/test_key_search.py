"""Searches: newest first, limits, times, collisions, and what a bound leaves out is said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qmq_broker.storage.index import index_keys, key_index_file, key_search
from qmq_broker.storage.index.key_index_file import IndexFile, pack_entries
from qmq_broker.storage.index.key_search import TimeRange
from qmq_broker.storage.logs.frame_seek import LogRange
from tests.broker.storage.keyed import INDEXED, Keyed, check_answers


@pytest.fixture(params=[True, False], ids=["indexed", "not indexed"])
def world(request: pytest.FixtureRequest) -> Keyed:
    """Ten frames, a second apart, each with the key twice."""
    world = Keyed()
    for _ in range(10):
        world.send("k", "other", "k")
    if request.param:
        world.catch_up()
    return world


ALWAYS = TimeRange()


def sequences(world: Keyed, times: TimeRange = ALWAYS, count: int = 100) -> list[int]:
    return [one.sequence for one in world.store.search.by_key("orders", "k", times, count).found]


def test_the_newest_come_first_and_a_limit_keeps_them(world: Keyed) -> None:
    assert sequences(world)[:4] == [29, 27, 26, 24]
    assert len(sequences(world)) == 20
    result = world.store.search.by_key("orders", "k", TimeRange(), 3)
    assert [one.sequence for one in result.found] == [29, 27, 26]
    assert result.has_more
    assert not world.store.search.by_key("orders", "k", TimeRange(), 20).has_more


def test_a_time_range_is_half_open_and_exact_to_the_millisecond(world: Keyed) -> None:
    times = sorted({one.place.stored_at_ms for one in world.kept})
    for first in range(10):
        for after in range(first, 10):
            found = sequences(world, TimeRange(times[first], times[after]))
            assert len(found) == 2 * (after - first)
    assert len(sequences(world, TimeRange(times[3] + 1, times[5] + 1))) == 4
    assert not sequences(world, TimeRange(times[9] + 1, 2**62))
    assert not sequences(world, TimeRange(0, times[0]))


def test_a_time_range_is_exact_within_a_second_of_one_file() -> None:
    world = Keyed(options=replace(INDEXED, index_entries=1_000))
    for _ in range(30):
        world.send("k")
        world.clock.pass_ms(-900)
    world.catch_up()
    assert len(world.store.index.files()) == 1
    times = [one.place.stored_at_ms for one in world.kept]
    for first in range(30):
        for after in (first, first + 1, min(29, first + 7), 29):
            found = sequences(world, TimeRange(times[first], times[after % 30]))
            assert found == list(range(after % 30 - 1, first - 1, -1))


def test_another_subject_or_key_is_not_found(world: Keyed) -> None:
    for subject, key in (("invoices", "k"), ("orders", "kk"), ("orders", "K"), ("orders", "b" * 9)):
        result = world.store.search.by_key(subject, key, TimeRange(), 10)
        assert (result.found, result.is_complete) == ([], True)
    assert not world.store.search.by_id(bytes(16), 10).found


def test_what_is_not_durable_is_not_found() -> None:
    world = Keyed()
    (kept,) = world.send("a")
    world.catch_up()
    end = world.store.durable_offset
    assert world.store.search.by_id(kept.message_id, 10).next_offset == end


def test_equal_hashes_are_told_apart_by_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (index_keys, key_search):
        monkeypatch.setattr(module, "key_hash", lambda subject, key: 7)
        monkeypatch.setattr(module, "id_hash", lambda instance, counter: 7)
    monkeypatch.setattr(index_keys, "crc32c", lambda data, seed=0: 7)
    monkeypatch.setattr(key_index_file, "id_hash", lambda instance, counter: 7)
    world = Keyed()
    for keys in (("a", "b"), ("c",), ("a", None), ("b", "d")):
        world.send(*keys)
    world.catch_up()
    check_answers(world.store, world.kept)


def test_hashes_wrap_at_the_end_of_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def near_the_end(instance: int, counter: int) -> int:
        return (2**32 - 3 + counter) % 2**32

    for module in (key_index_file, key_search):
        monkeypatch.setattr(module, "id_hash", near_the_end)
    world = Keyed(options=replace(INDEXED, index_entries=28))
    world.send(*(None,) * 20)
    world.catch_up()
    check_answers(world.store, world.kept)


def test_what_a_bound_leaves_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Keyed()
    for _ in range(20):
        world.send("k", room=100)
    monkeypatch.setattr(key_search, "LOOKED_THROUGH_BYTES_MAX", 1_000)
    result = world.store.search.by_key("orders", "k", TimeRange(), 100)
    assert not result.is_complete
    assert result.unsearched_bytes > 0
    numbers = [one.sequence for one in result.found]
    assert numbers == list(range(19, 19 - len(numbers), -1))  # the newest
    assert 0 < len(numbers) < 20
    world.catch_up()
    check_answers(world.store, world.kept)


def test_a_time_range_narrows_what_is_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Keyed()
    for _ in range(20):
        world.send("k", room=100)
    monkeypatch.setattr(key_search, "LOOKED_THROUGH_BYTES_MAX", 1_000)
    at_ms = world.kept[2].place.stored_at_ms
    result = world.store.search.by_key("orders", "k", TimeRange(at_ms, at_ms + 1), 100)
    assert [one.sequence for one in result.found] == [2]
    assert result.is_complete


@pytest.mark.parametrize("bound", ["ENTRIES_MAX", "FRAME_BYTES_MAX"])
def test_a_search_that_reaches_a_bound_says_so(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Keyed(options=replace(INDEXED, index_entries=1_000))
    for _ in range(20):
        world.send("k")
    world.catch_up()
    monkeypatch.setattr(key_search, bound, 5)
    result = world.store.search.by_key("orders", "k", TimeRange(), 100)
    assert len(result.found) < 20
    assert not result.is_complete


def test_a_result_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Keyed()
    for _ in range(5):
        world.send("k", room=500)
    monkeypatch.setattr(key_search, "FOUND_BYTES_MAX", 1_200)
    result = world.store.search.by_key("orders", "k", TimeRange(), 100)
    assert (len(result.found), result.has_more) == (2, True)


def test_entries_that_form_a_circle_end_a_search() -> None:
    world = Keyed(options=replace(INDEXED, index_entries=1_000))
    for _ in range(4):
        world.send("k")
    world.catch_up()
    (file,) = world.store.index.files()
    assert isinstance(file, IndexFile)
    file._tail[:] = b"".join(
        pack_entries([1], [number], offset=88, seconds=0) for number in (8, 1, 2, 3, 4, 5, 6, 7)
    )
    assert not world.store.search.by_key("orders", "k", TimeRange(), 10).is_complete
    world.catch_up()
    check_answers(world.store, world.kept)


def test_a_damaged_frame_hides_no_other_from_index_and_search() -> None:
    world = Keyed(options=replace(INDEXED, segment_bytes=65_536))
    for _ in range(20):
        world.send("k")
    lost = world.kept.pop(7)
    world.hurt(lost.place.physical_offset + 40)
    result = world.store.search.by_key("orders", "k", TimeRange(), 100)
    assert [one.sequence for one in result.found] == [*range(19, 7, -1), *range(6, -1, -1)]
    assert 0 < result.unsearched_bytes < 200
    world.catch_up()
    check_answers(world.store, world.kept)


def test_a_frame_damaged_after_it_was_indexed_is_not_passed_over_in_silence() -> None:
    world = Keyed()
    for _ in range(3):
        world.send("k")
    world.catch_up()
    lost = world.kept.pop(1)
    world.hurt(lost.place.physical_offset + 40)
    result = world.store.search.by_id(lost.message_id, 10)
    assert (result.found, result.is_complete) == ([], False)
    assert world.store.search.by_id(world.kept[0].message_id, 10).is_complete


def test_a_file_that_is_given_up_under_a_search_leaves_a_doubt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = Keyed()
    for _ in range(10):
        world.send("k")
    world.catch_up()
    index = world.store.index
    cover = index.cover

    def given_up_meanwhile(within: LogRange) -> tuple[list[IndexFile], list[LogRange]]:
        found = cover(within)
        for file in index.files():
            index._remove(file)
        return found

    monkeypatch.setattr(index, "cover", given_up_meanwhile)
    for one in world.kept:
        result = world.store.search.by_id(one.message_id, 10)
        assert result.found == [one.place] or not result.is_complete


def test_an_index_that_was_given_up_for_good_leaves_everything_to_be_looked_through() -> None:
    world = Keyed()
    for _ in range(10):
        world.send("k")
    world.catch_up()
    world.store.index._turn_off("planted")
    check_answers(world.store, world.kept)
    world.catch_up()
    check_answers(world.store, world.kept)
