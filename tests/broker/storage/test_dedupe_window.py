from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq_broker.storage.ids.runs import (
    IdRun,
    SubjectIds,
    _dense_run,
    id_runs,
    scanned_ids,
    subject_ids,
)
from qmq_broker.storage.ids.window import Added, DedupeWindow, RunColumns
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import MessageFrame, build_message_frame, parse_message_frame
from qmq_client.wire.message_id import MessageIds, split_message_id
from qmq_client.wire.record import Record, encode_record


def frame_of(ids: list[tuple[int, int]]) -> MessageFrame:
    """A frame with these ids, spread over two subjects."""
    records: dict[str, list[bytes]] = {}
    for number, (instance, counter) in enumerate(ids):
        message_id = instance.to_bytes(8, "big") + counter.to_bytes(8, "big")
        subject = "ab"[number % 2]
        record = Record(message_id=message_id, subject=subject, body=b"", born_at_ms=1)
        records.setdefault(subject, []).append(encode_record(record))
    frame = parse_message_frame(build_message_frame(records))
    assert sorted(map(split_message_id, frame.message_ids())) == sorted(ids)
    return frame


def runs_of(ids: list[tuple[int, int]]) -> list[IdRun]:
    return id_runs(frame_of(ids))


def one_run(first: int, after: int, subject: str = "a") -> SubjectIds:
    return {subject: [IdRun(1, first, after)]}


def expanded(runs: Iterable[IdRun]) -> list[tuple[int, int]]:
    return [
        (run.instance, counter)
        for run in runs
        for counter in range(run.first_counter, run.next_counter)
    ]


COUNTERS = st.integers(0, 12) | st.integers(2**64 - 6, 2**64 - 1)
IDS = st.lists(st.tuples(st.sampled_from([0, 1, 2, 2**64 - 1]), COUNTERS), min_size=1, max_size=40)


@given(IDS)
def test_the_runs_of_a_frame_are_its_ids(ids: list[tuple[int, int]]) -> None:
    assert sorted(expanded(runs_of(ids))) == sorted(ids)


def test_a_dense_frame_is_one_run_in_any_order() -> None:
    ids = [(5, counter) for counter in range(100, 164)]
    assert runs_of(ids) == [IdRun(5, 100, 164)]
    random.Random(3).shuffle(ids)
    assert runs_of(ids) == [IdRun(5, 100, 164)]


@pytest.mark.parametrize("bits", [16, 24, 32, 56])
@pytest.mark.parametrize("before", [1, 255, 300])
def test_a_run_continues_where_a_byte_of_the_counter_is_full(bits: int, before: int) -> None:
    first = 2**bits - before
    assert runs_of([(5, first + number) for number in range(600)]) == [IdRun(5, first, first + 600)]
    broken = [(5, first + number) for number in range(600) if number != before]
    assert runs_of(broken) == [IdRun(5, first, 2**bits), IdRun(5, 2**bits + 1, first + 600)]


def test_a_run_ends_with_the_last_counter() -> None:
    assert runs_of([(7, 2**64 - 2), (7, 2**64 - 1), (8, 0)]) == [
        IdRun(7, 2**64 - 2, 2**64),
        IdRun(8, 0, 1),
    ]


HIGH_OR_LOW = st.integers(0, 20) | st.integers(2**64 - 10, 2**64 - 1)


SENT = st.tuples(st.sampled_from("ab"), st.integers(0, 3), HIGH_OR_LOW)


def sorted_runs(messages: Iterable[tuple[str, int, int]]) -> SubjectIds:
    ids: dict[str, list[IdRun]] = {}
    for subject, instance, counter in sorted(messages):
        ids.setdefault(subject, []).append(IdRun(instance, counter, counter + 1))
    return ids


@given(st.lists(st.sets(SENT, min_size=1), max_size=20))
def test_the_window_knows_what_a_dictionary_would(frames: list[set[tuple[str, int, int]]]) -> None:
    window = DedupeWindow(ids_max=10**6, age_ms=10**6)
    model: dict[tuple[str, int, int], int] = {}
    for offset, messages in enumerate(frames, start=1):
        found = {
            (subject, *one): place
            for subject, run, place in window.find(sorted_runs(messages))
            for one in expanded([run])
        }
        assert found == {one: model[one] for one in messages if one in model}
        new = messages - model.keys()
        if new:
            window.add(sorted_runs(new), offset=offset, stored_at_ms=offset)
            model.update(dict.fromkeys(new, offset))
    assert window.ids == len(model)


@given(IDS)
def test_the_runs_of_a_frame_by_subject_are_its_ids(ids: list[tuple[int, int]]) -> None:
    frame = frame_of(ids)
    expected: dict[str, list[tuple[int, int]]] = {}
    for number, one in enumerate(ids):
        expected.setdefault("ab"[number % 2], []).append(one)
    found = subject_ids(frame)
    assert {subject: sorted(expanded(runs)) for subject, runs in found.items()} == {
        subject: sorted(some) for subject, some in expected.items()
    }
    assert scanned_ids(frame.header, frame.data) == found


def test_an_id_is_known_under_its_own_subject_alone() -> None:
    window = DedupeWindow(ids_max=100, age_ms=1_000)
    window.add(one_run(0, 10, "orders"), offset=7, stored_at_ms=0)
    assert window.find(one_run(0, 10, "bills")) == []
    window.add(one_run(5, 15, "bills"), offset=8, stored_at_ms=0)
    assert window.find(one_run(5, 10, "orders")) == [("orders", IdRun(1, 5, 10), 7)]
    assert window.find(one_run(5, 10, "bills")) == [("bills", IdRun(1, 5, 10), 8)]
    assert window.ids == 20


def test_at_least_the_newest_ids_are_known_and_the_oldest_leave() -> None:
    window = DedupeWindow(ids_max=800, age_ms=10**9)
    for number in range(1_000):
        window.add(one_run(number * 10, number * 10 + 10), offset=number, stored_at_ms=1)
    assert 800 <= window.ids <= 1_000
    found = window.find(one_run(9_200, 10_000))
    assert sorted(one for _, run, _ in found for one in expanded([run])) == [
        (1, counter) for counter in range(9_200, 10_000)
    ]
    assert window.find(one_run(0, 8_900)) == []
    assert window.first_offset is not None
    assert 890 <= window.first_offset <= 920


def test_no_more_ids_are_known_than_the_bound_when_generations_end_at_it() -> None:
    window = DedupeWindow(ids_max=8, age_ms=10_000)
    for number in range(20):
        window.add(one_run(number, number + 1), offset=number, stored_at_ms=0)
        assert window.ids == min(number + 1, 8)
        assert bool(window.find(one_run(0, 1))) == (number < 8)


def test_ids_are_known_for_their_time_and_leave_after_it() -> None:
    window = DedupeWindow(ids_max=10**9, age_ms=8_000)
    for second in range(100):
        window.add(one_run(second, second + 1), offset=second, stored_at_ms=second * 1000)
    assert len(window.find(one_run(91, 100))) == 9
    assert window.find(one_run(0, 88)) == []


def test_B7_the_last_ids_of_a_generation_are_known_for_their_time_too() -> None:
    window = DedupeWindow(ids_max=1_000, age_ms=800)
    for offset, stored_at_ms in enumerate((0, 99, 850)):
        window.add(one_run(offset, offset + 1), offset=offset, stored_at_ms=stored_at_ms)
    assert window.find(one_run(1, 2)), "751 ms old"
    window.add(one_run(3, 4), offset=3, stored_at_ms=900)
    assert not window.find(one_run(1, 2))


def test_a_window_of_nothing_knows_nothing() -> None:
    window = DedupeWindow(ids_max=0, age_ms=1)
    window.add(one_run(0, 9), offset=1, stored_at_ms=1)
    assert window.find(one_run(0, 9)) == []
    assert window.first_offset is None


@pytest.mark.parametrize("count", [1, 2, 63, 64, 200])
@pytest.mark.parametrize("kind", ["equal lengths", "other lengths", "two subjects", "hashed ids"])
def test_the_ids_of_a_scanned_frame_are_those_of_a_parsed_one(count: int, kind: str) -> None:
    rng = random.Random(count)
    ids = [
        MessageIds(rng.getrandbits(64)).next_id() if kind == "hashed ids" else one
        for one in itertools.islice(iter(MessageIds(7).next_id, None), count)
    ]
    records = [
        encode_record(
            Record(
                message_id=one,
                subject="orders",
                body=bytes(10 if kind == "equal lengths" else rng.randint(0, 40)),
                born_at_ms=1,
            )
        )
        for one in ids
    ]
    runs = {"orders": records}
    if kind == "two subjects" and count > 1:
        runs = {"orders": records[1::2], "Invoices": records[::2]}
    frame = parse_message_frame(build_message_frame(runs))
    expected = sorted(int.from_bytes(one) for one in ids)
    found = id_runs(frame)
    assert [
        run.instance << 64 | counter
        for run in sorted(found)
        for counter in range(run.first_counter, run.next_counter)
    ] == expected
    assert scanned_ids(frame.header, frame.data) == subject_ids(frame)


@pytest.mark.parametrize("count", [2, 255, 257, 700])
def test_ids_are_told_to_be_one_run_by_their_columns(count: int) -> None:
    for first in (0, 200, 2**16 - count, 2**40 + 255, 2**64 - count):
        ids = MessageIds(9, first_counter=first)
        data = b"".join(ids.next_id() for _ in range(count))
        assert _dense_run(data, 0, 16, count) == IdRun(9, first, first + count)
        for spoilt in random.Random(first).sample(range(len(data)), 30):
            other = bytearray(data)
            other[spoilt] ^= 0x40
            assert _dense_run(bytes(other), 0, 16, count) is None


def test_a_scanned_frame_that_is_none_is_a_protocol_error() -> None:
    record = encode_record(Record(message_id=bytes(16), subject="a", body=b"", born_at_ms=1))
    frame = parse_message_frame(build_message_frame({"a": [record, record]}))
    for length in range(frame.header.head_bytes, frame.positions[0]):
        with pytest.raises(ProtocolError):
            scanned_ids(frame.header, frame.data[:length])


def test_B7_a_window_that_is_restored_has_forgotten_what_the_one_before_had() -> None:
    added: list[Added] = []
    before = DedupeWindow(ids_max=16, age_ms=1_000_000)
    before.on_added = added.append
    for number in range(40):
        before.add(one_run(number, number + 1), offset=100 * number, stored_at_ms=number)
    restored = DedupeWindow(ids_max=16, age_ms=1_000_000)
    for one in added:
        (run,) = one.ids["a"]
        counters = array("Q", [run.first_counter])
        columns = RunColumns(array("Q", [1]), counters, counters, array("Q", [one.offset]))
        restored.restore(one.era, {"a": columns}, last_stored_at_ms=one.stored_at_ms)
    assert (restored.ids, restored.first_offset) == (before.ids, before.first_offset)
    assert before.ids < 40
