"""Records: round trips, every limit at its edge, and what no record may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq_client.wire.errors import (
    ChecksumError,
    EncodingError,
    InvalidMessageError,
    InvalidNameError,
    ProtocolError,
    TooLargeError,
)
from qmq_client.wire.limits import Limits
from qmq_client.wire.record import (
    RECORD_FIXED_BYTES,
    TIME_MAX_MS,
    BodyKind,
    Record,
    decode_record,
    encode_record,
    is_delayed_record,
    record_crc,
    record_message_id,
    verify_record,
)
from qmq_client.wire.record_parts import record_expires_at_ms, record_made_at_ms, record_tags
from tests.wire.hostile import examples, mutate, peak_bytes, records, reseal_record

PLAIN = Record(message_id=bytes(range(16)), subject="flight", body=b"body", born_at_ms=1)
GENEROUS = Limits(tags=64, headers=65_535, headers_bytes=65_535)


def plain(**values: Any) -> Record:
    """The plain record with some fields changed."""
    return msgspec.structs.replace(PLAIN, **values)


@examples(150)
@given(records())
def test_S9_every_record_decodes_to_what_was_encoded(record: Record) -> None:
    data = encode_record(record)
    assert decode_record(record.subject, data) == record
    verify_record(record.subject, data)
    assert record_message_id(data) == record.message_id
    assert is_delayed_record(data) is (record.due_at_ms is not None)
    assert record_expires_at_ms(data) == record.expires_at_ms
    made_at_ms = record.born_at_ms if record.due_at_ms is None else record.due_at_ms
    assert record_made_at_ms(data) == made_at_ms
    assert record_tags(data) == ",".join(record.tags).encode()
    assert len(data) >= RECORD_FIXED_BYTES + len(record.body)
    assert data.endswith(record.body)


def test_a_body_is_copied_once_and_not_at_all_when_the_record_is_too_large() -> None:
    record = plain(body=bytes(1024 * 1024))
    assert peak_bytes(lambda: encode_record(record)) < 1.5 * len(record.body)

    def refused() -> None:
        with pytest.raises(TooLargeError):
            encode_record(record, Limits(record_bytes=len(record.body)))

    assert peak_bytes(refused) < len(record.body) / 2


@examples(100)
@given(record=records(), source=st.randoms(use_true_random=False))
def test_S9_every_altered_bit_is_found(record: Record, source: Any) -> None:
    data = bytearray(encode_record(record))
    data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    with pytest.raises(ChecksumError):
        decode_record(record.subject, bytes(data))


@examples(150)
@given(record=records(), source=st.randoms(use_true_random=False))
def test_bytes_that_decode_are_the_only_bytes_of_their_record(record: Record, source: Any) -> None:
    data = reseal_record(record.subject, mutate(encode_record(record), source))
    try:
        decoded = decode_record(record.subject, data)
    except ProtocolError:
        return
    assert encode_record(decoded, GENEROUS) == data


def test_equal_content_of_one_id_has_one_checksum_and_other_content_another() -> None:
    assert record_crc(encode_record(plain())) == record_crc(encode_record(plain()))
    assert record_crc(encode_record(plain())) != record_crc(encode_record(plain(body=b"bodz")))
    assert record_crc(encode_record(plain())) != record_crc(encode_record(plain(subject="other")))


def headers_of(total_bytes: int) -> tuple[tuple[str, str], ...]:
    """Two headers that take this many bytes together."""
    return (("a", "x" * 100), ("b", "x" * (total_bytes - 100 - 2 * 4)))


SMALL = Limits(record_bytes=1000, tags=3, headers=4, headers_bytes=300)
#: What is at its limit, what is one over, and what the refusal says: field, limit, value.
EDGES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, str, str]]] = {
    "record": (
        {"body": bytes(1000 - 36)},
        {"body": bytes(1001 - 36)},
        ("message", "1000 bytes", "1001 bytes"),
    ),
    "record with a due time": (
        {"body": bytes(1000 - 44), "due_at_ms": 1},
        {"body": bytes(1001 - 44), "due_at_ms": 1},
        ("message", "1000 bytes", "1001 bytes"),
    ),
    "key": ({"key": "k" * 255}, {"key": "k" * 256}, ("key", "255 bytes of UTF-8", "256 bytes")),
    "key of wide letters": (
        {"key": "é" * 127 + "k"},
        {"key": "é" * 128},
        ("key", "255 bytes of UTF-8", "256 bytes"),
    ),
    "tags": (
        {"tags": ("a", "b", "c")},
        {"tags": ("a", "b", "c", "d")},
        ("tags", "3 tags", "4 tags"),
    ),
    "headers": (
        {"headers": tuple((name, "") for name in "abcd")},
        {"headers": tuple((name, "") for name in "abcde")},
        ("headers", "4 headers", "5 headers"),
    ),
    "headers together": (
        {"headers": headers_of(300)},
        {"headers": headers_of(301)},
        ("headers", "300 bytes in all", "301 bytes"),
    ),
    "one header": (
        {"headers": (("a", "x" * (300 - 4)),)},
        {"headers": (("a", "x" * 301),)},
        ("header a", "300 bytes", "301 bytes"),
    ),
}


@pytest.mark.parametrize("name", EDGES)
def test_what_is_exactly_at_its_limit_is_encoded(name: str) -> None:
    record = plain(**EDGES[name][0])
    assert decode_record(record.subject, encode_record(record, SMALL)) == record


@pytest.mark.parametrize("name", EDGES)
def test_what_is_one_over_its_limit_is_refused_by_name(name: str) -> None:
    _, values, said = EDGES[name]
    with pytest.raises(TooLargeError) as caught:
        encode_record(plain(**values), SMALL)
    error = caught.value
    assert (error.field, error.limit, error.value) == said
    assert error.remedy == "Make it smaller."
    assert error.code == "too_large"


def test_the_longest_record_of_the_default_limits_is_encoded() -> None:
    body = bytes(4 * 2**20 - 36)
    assert decode_record("flight", encode_record(plain(body=body))).body == body
    with pytest.raises(TooLargeError):
        encode_record(plain(body=body + b"x"))


def test_headers_of_64_kilobytes_are_encoded_where_the_limits_allow_them() -> None:
    record = plain(headers=(("a", "x" * (65_535 - 4)),))
    assert decode_record("flight", encode_record(record, GENEROUS)) == record
    with pytest.raises(TooLargeError):
        encode_record(plain(headers=(("a", "x" * (65_535 - 3)),)), GENEROUS)


def test_64_longest_tags_are_encoded_where_the_limits_allow_them() -> None:
    record = plain(tags=tuple(f"{count:0127d}" for count in range(64)))
    assert decode_record("flight", encode_record(record, GENEROUS)) == record


REFUSED: dict[str, tuple[dict[str, Any], type[InvalidMessageError], str]] = {
    "subject": ({"subject": "../flight"}, InvalidNameError, "subject"),
    "subject that is no text": ({"subject": ["flight"]}, InvalidNameError, "subject"),
    "short id": ({"message_id": bytes(15)}, InvalidMessageError, "message_id"),
    "long id": ({"message_id": bytes(17)}, InvalidMessageError, "message_id"),
    "empty key": ({"key": ""}, InvalidMessageError, "key"),
    "surrogate in the key": ({"key": "a\ud800"}, EncodingError, "key"),
    "NUL in the key": ({"key": "a\0b"}, InvalidMessageError, "key"),
    "key that is no text": ({"key": 5}, EncodingError, "key"),
    "tag": ({"tags": ("good", "not good")}, InvalidNameError, "tag"),
    "tag with a comma": ({"tags": ("a,b",)}, InvalidNameError, "tag"),
    "tag that is no text": ({"tags": (["a"],)}, InvalidNameError, "tag"),
    "header name": ({"headers": (("a b", ""),)}, InvalidNameError, "header name"),
    "empty header name": ({"headers": (("", "x"),)}, InvalidNameError, "header name"),
    "header name that is no text": ({"headers": ((5, "x"),)}, InvalidNameError, "header name"),
    "header twice": ({"headers": (("a", "1"), ("b", ""), ("a", "2"))}, InvalidMessageError, "headers"),
    "surrogate in a header": ({"headers": (("a", "\udfff"),)}, EncodingError, "header a"),
    "header that is no text": ({"headers": (("a", 5),)}, EncodingError, "header a"),
    "negative birth": ({"born_at_ms": -1}, InvalidMessageError, "born_at_ms"),
    "birth after 9999": ({"born_at_ms": TIME_MAX_MS + 1}, InvalidMessageError, "born_at_ms"),
    "negative due time": ({"due_at_ms": -1}, InvalidMessageError, "due_at_ms"),
    "due after 9999": ({"due_at_ms": 10**5000}, InvalidMessageError, "due_at_ms"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_S7_what_cannot_be_a_record_is_refused_by_field_and_kind(name: str) -> None:
    values, kind, field = REFUSED[name]
    with pytest.raises(InvalidMessageError) as caught:
        encode_record(plain(**values))
    error = caught.value
    assert type(error) is kind
    assert error.field == field
    assert error.limit
    assert error.value
    assert error.remedy.endswith(".")
    assert str(error).isprintable()


@pytest.mark.parametrize("field", ["born_at_ms", "due_at_ms"])
def test_times_reach_from_1970_to_the_end_of_9999(field: str) -> None:
    for time_ms in (0, TIME_MAX_MS):
        record = plain(**{field: time_ms})
        assert decode_record("flight", encode_record(record)) == record


def altered(change: Callable[[bytearray], None], **values: Any) -> bytes:
    """A record with some bytes changed and the checksum made right."""
    data = bytearray(encode_record(plain(**values)))
    change(data)
    return reseal_record("flight", bytes(data))


def setting(position: int, *values: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[position : position + len(values)] = bytes(values)

    return change


HEADERS = (("a", "1"), ("b", "2"))
NEVER_RECORDS: dict[str, tuple[bytes, str]] = {
    "unknown flag": (altered(setting(20, 0x10)), "flags 0x10"),
    "unknown body kind": (altered(setting(20, 3)), "flags 0x03"),
    "birth after 9999": (altered(setting(28, 0x80)), "beyond the year 9999"),
    "due after 9999": (altered(setting(36, 0x80), due_at_ms=1), "beyond the year 9999"),
    "expiry after 9999": (altered(setting(36, 0x80), expires_at_ms=1), "beyond the year 9999"),
    "no expiry": (altered(setting(20, 8), body=b"1234567"), "ends inside its expiry time"),
    "no due time": (altered(setting(20, 4), body=b"1234567"), "ends inside its due time"),
    "key over the end": (altered(setting(21, 5)), "ends before its body"),
    "tags over the end": (altered(setting(22, 0xFF, 0xFF)), "ends before its body"),
    "headers over the end": (altered(setting(24, 0, 5)), "ends before its body"),
    "header bytes without a header": (altered(setting(24, 0, 4)), "bytes after its headers"),
    "a header without bytes": (altered(setting(26, 0, 1)), "inside a header"),
    "a header where the record ends": (altered(setting(26, 0, 1), body=b""), "inside a header"),
    "one header over the end": (altered(setting(38, 9), headers=(("a", "1"),)), "inside a header"),
    "65,535 headers": (altered(setting(26, 0xFF, 0xFF), headers=HEADERS), "inside a header"),
    "header value over the end": (altered(setting(38, 9), headers=HEADERS), "inside a header"),
    "key with NUL": (altered(setting(36, 0), key="k"), "NUL"),
    "key that is not UTF-8": (altered(setting(36, 0xFF), key="k"), "not UTF-8"),
    "tag that is not UTF-8": (altered(setting(36, 0xFF), tags=("t",)), "not UTF-8"),
    "tag that is no name": (altered(setting(36, 0x20), tags=("t",)), "tag that is not a name"),
    "empty tag": (altered(setting(36, 0x2C), tags=("ta",)), "tag that is not a name"),
    "header name not UTF-8": (altered(setting(39, 0xFF), headers=HEADERS), "not UTF-8"),
    "header value not UTF-8": (altered(setting(40, 0xFF), headers=HEADERS), "not UTF-8"),
    "header name that is no name": (
        altered(setting(39, 0x20), headers=HEADERS),
        "invalid header name",
    ),
    "header twice": (altered(setting(39, 0x62), headers=HEADERS), "twice"),
}


@pytest.mark.parametrize("name", NEVER_RECORDS)
def test_bytes_with_a_right_checksum_that_are_no_record_are_refused(name: str) -> None:
    data, said = NEVER_RECORDS[name]
    verify_record("flight", data)
    with pytest.raises(ProtocolError, match=said) as caught:
        decode_record("flight", data)
    assert not isinstance(caught.value, ChecksumError)
    assert caught.value.offset is not None
    assert 0 <= caught.value.offset <= len(data)


@pytest.mark.parametrize("subject", ["", "..", "a\n", "x" * 128, "\ud800"])
def test_a_subject_that_is_no_name_makes_no_record(subject: str) -> None:
    with pytest.raises(ProtocolError, match="not a name"):
        decode_record(subject, encode_record(plain()))


def test_bytes_shorter_than_the_fixed_fields_are_no_record() -> None:
    for length in range(RECORD_FIXED_BYTES):
        with pytest.raises(ProtocolError, match="shorter than 36"):
            verify_record("flight", bytes(length))


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_a_body_in_a_buffer_is_copied_and_a_record_in_a_buffer_is_a_type_error(kind: Any) -> None:
    data = encode_record(plain(body=kind(b"body")))
    assert data == encode_record(plain())
    with pytest.raises(TypeError):
        decode_record("flight", kind(data))


def test_a_record_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        PLAIN.body = b"other"  # type: ignore[misc]  # the mistake


def test_a_body_kind_is_one_of_three() -> None:
    assert [(kind.name, kind.value) for kind in BodyKind] == [
        ("BYTES", 0),
        ("TEXT", 1),
        ("JSON", 2),
    ]
