"""The tag hash: a Bloom signature that never misses a tag."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq_client.wire.checksum import crc32c
from qmq_client.wire.record import (
    Record,
    encode_record,
    joined_tags_hash,
    record_tag_hash,
    record_tag_hashes,
    tag_hash,
)
from tests.wire.hostile import NAMES, examples, records


def test_no_tags_have_hash_zero() -> None:
    assert tag_hash(()) == 0
    assert record_tag_hash(encode_record(record_with_tags(()))) == 0


@examples(80)
@given(NAMES)
def test_one_tag_sets_one_or_two_bits_of_64(tag: str) -> None:
    value = tag_hash([tag.encode()])
    assert 0 < value < 2**64
    assert value.bit_count() in {1, 2}
    crc = crc32c(tag.encode())
    assert value == 1 << crc % 64 | 1 << crc // 64 % 64


@examples(80)
@given(st.lists(NAMES, max_size=16))
def test_the_hash_of_several_tags_holds_that_of_each(tags: list[str]) -> None:
    whole = tag_hash(tag.encode() for tag in tags)
    parts = [tag_hash([tag.encode()]) for tag in tags]
    assert all(part & whole == part for part in parts)
    assert whole.bit_count() <= 2 * len(set(tags))
    assert whole == tag_hash(tag.encode() for tag in reversed(tags))


@examples(80)
@given(records())
def test_the_hash_read_from_a_record_is_that_of_its_tags(record: Record) -> None:
    expected = tag_hash(tag.encode() for tag in record.tags)
    assert record_tag_hash(encode_record(record)) == expected
    if record.tags:
        assert joined_tags_hash(",".join(record.tags).encode()) == expected


def test_different_tags_mostly_differ() -> None:
    hashes = {tag_hash([f"tag{count}".encode()]) for count in range(1000)}
    assert len(hashes) > 700  # 64 + 64·63/2 = 2,080 signatures; 793 is what chance gives


def record_with_tags(tags: tuple[str, ...]) -> Record:
    return Record(message_id=bytes(16), subject="a", body=b"", tags=tags, born_at_ms=0)


@pytest.mark.parametrize("due_at_ms", [None, 7])
@pytest.mark.parametrize("key", [None, "order-17"])
@pytest.mark.parametrize("tags", [(), ("red", "tin"), ("of-one-length",), ("blue",)])
def test_the_hashes_of_many_records_are_those_of_each(
    tags: tuple[str, ...], key: str | None, due_at_ms: int | None
) -> None:
    alike = [
        encode_record(Record(bytes(16), "s", body, 1, key=key, tags=each, due_at_ms=due_at_ms))
        for body in (b"", b"longer")
        for each in (tags, tags[::-1])
    ]
    others = [encode_record(record_with_tags(("a",))), encode_record(record_with_tags(()))]
    for records_ in (alike, alike[:1], alike + others, others):
        assert record_tag_hashes(records_) == [record_tag_hash(each) for each in records_]
