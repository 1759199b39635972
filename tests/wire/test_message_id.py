"""Message ids: dense, sixteen bytes, one text for each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq_client.wire.errors import InvalidMessageError
from qmq_client.wire.message_id import (
    DEDUPE_MARKER,
    INSTANCE_MAX,
    MESSAGE_ID_BYTES,
    MessageIds,
    dedupe_message_id,
    format_message_id,
    instance_of,
    is_dedupe_id,
    parse_message_id,
    split_message_id,
)
from tests.wire.hostile import examples


def test_ids_of_one_instance_are_dense_from_zero() -> None:
    ids = MessageIds(77)
    made = [ids.next_id() for _ in range(1000)]
    assert [split_message_id(each) for each in made] == [(77, count) for count in range(1000)]
    assert made == sorted(made)
    assert {len(each) for each in made} == {MESSAGE_ID_BYTES}


def test_ids_may_begin_at_another_counter_and_reach_the_last() -> None:
    ids = MessageIds(INSTANCE_MAX, first_counter=2**64 - 1)
    assert ids.next_id() == b"\xff" * 16


@pytest.mark.parametrize("instance", [-1, 2**64, 2**128])
def test_an_instance_that_is_no_unsigned_64_bit_number_is_refused(instance: int) -> None:
    with pytest.raises(ValueError, match="not an unsigned 64-bit number"):
        MessageIds(instance)


@examples(100)
@given(st.binary(min_size=16, max_size=16))
def test_an_id_reads_back_from_its_text(message_id: bytes) -> None:
    text = format_message_id(message_id)
    assert len(text) == 32
    assert parse_message_id(text) == message_id


@pytest.mark.parametrize(
    "text",
    [
        "", "0" * 31, "0" * 33, "A" * 32, "g" * 32, "0" * 32 + "\n", "\n" + "0" * 31, " " + "0" * 31,
        "0x" + "0" * 30, "0" * 31 + "٣", "０" * 32, "0" * 16 + "-" + "0" * 15, None, 0, 10**31,
        10**5000, b"0" * 32, bytes(16), ["0"] * 32,
    ],
    ids=lambda value: repr(value)[:20] if not isinstance(value, int) else "int",
)  # fmt: skip
def test_what_is_no_id_is_refused_with_field_limit_value_and_remedy(text: object) -> None:
    with pytest.raises(InvalidMessageError) as caught:
        parse_message_id(text)
    error = caught.value
    assert error.field == "message_id"
    assert error.limit == "32 lower-case hex digits"
    assert error.remedy == "Copy it from a receipt, a log line or `qmq outbox list`."
    assert len(error.value) < 360


def test_a_dedupe_id_is_the_marker_and_the_hash_of_subject_and_key() -> None:
    made = dedupe_message_id("order.placed", "order-17-paid")
    assert made.hex() == "ded056e3f3a236a7ace5cfdd136743f5"
    assert is_dedupe_id(made)
    assert made == dedupe_message_id("order.placed", "order-17-paid")


def test_subject_and_dedupe_key_do_not_run_into_each_other() -> None:
    pairs = [("a", "bc"), ("ab", "c"), ("a", "b.c"), ("a.b", "c"), ("a", "BC"), ("A", "bc")]
    assert len({dedupe_message_id(subject, key) for subject, key in pairs}) == len(pairs)


@examples(200)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_no_random_instance_begins_with_the_marker_of_dedupe_ids(bits: int, counter: int) -> None:
    marked = int.from_bytes(DEDUPE_MARKER) << 48 | bits >> 16
    for given_bits in (bits, marked):
        made = MessageIds(instance_of(given_bits), first_counter=counter).next_id()
        assert not is_dedupe_id(made)
    assert instance_of(7) == 7
