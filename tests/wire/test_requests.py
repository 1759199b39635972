"""Requests and answers: both encodings, their ranges, and texts that no encoding can say."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq_client.wire.errors import EncodingError, ProtocolError
from qmq_client.wire.frame import FrameKind, build_frame
from qmq_client.wire.requests import (
    CONTROL_BYTES_MAX,
    ErrorAnswer,
    Extend,
    Nack,
    PullRequest,
    Reject,
    SendAnswer,
    SettleAnswer,
    Settlement,
    SettleRequest,
    decode_control,
    decode_json,
    decode_msgpack,
    encode_control,
    encode_json,
    sized_part,
)
from tests.golden.version_1 import CONTROLS
from tests.wire.hostile import examples

NUMBERS = st.integers(0, 2**63 - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
RANGES = st.tuples(NUMBERS, NUMBERS)
SETTLEMENTS = st.lists(
    st.builds(
        Settlement,
        token=NUMBERS,
        acks=st.lists(RANGES, max_size=3).map(tuple),
        nacks=st.lists(
            st.builds(Nack, range=RANGES, delay_ms=st.none() | NUMBERS, error=TEXTS), max_size=2
        ).map(tuple),
        rejects=st.lists(st.builds(Reject, range=RANGES, reason=TEXTS), max_size=2).map(tuple),
        extends=st.lists(st.builds(Extend, range=RANGES, lease_ms=NUMBERS), max_size=2).map(tuple),
    ),
    max_size=3,
).map(tuple)
VALUES = st.one_of(
    st.builds(
        PullRequest, subject=TEXTS, group=TEXTS, consumer=TEXTS, wait_ms=NUMBERS, settlements=SETTLEMENTS
    ),
    st.builds(
        SettleRequest, subject=TEXTS, group=TEXTS, consumer=TEXTS, settlements=SETTLEMENTS
    ),
    st.builds(SettleAnswer, settled=NUMBERS),
    st.builds(ErrorAnswer, code=TEXTS, message=TEXTS, field=TEXTS, message_id=TEXTS),
)  # fmt: skip


@examples(100)
@given(VALUES)
def test_every_request_and_answer_reads_back_in_both_encodings(value: msgspec.Struct) -> None:
    assert decode_control(encode_control(value), type(value)) == value
    assert decode_json(encode_json(value), type(value)) == value


@pytest.mark.parametrize("name", CONTROLS)
def test_both_encodings_say_the_same(name: str) -> None:
    value = CONTROLS[name]
    assert decode_json(encode_json(value), type(value)) == decode_control(
        encode_control(value), type(value)
    )


@pytest.mark.parametrize("value", [0, 2**63 - 1])
def test_a_number_may_be_at_either_end(value: int) -> None:
    request = PullRequest(subject="a", group="b", consumer="c", wait_ms=value)
    assert decode_control(encode_control(request), PullRequest) == request
    assert decode_json(encode_json(request), PullRequest) == request


@pytest.mark.parametrize("value", [-1, 2**63, 2**64 - 1])
def test_a_number_over_either_end_is_refused(value: int) -> None:
    request = PullRequest(subject="a", group="b", consumer="c", wait_ms=value)
    with pytest.raises(ProtocolError, match=r"\$\.wait_ms"):
        decode_control(encode_control(request), PullRequest)
    with pytest.raises(ProtocolError, match=r"\$\.wait_ms"):
        decode_json(encode_json(request), PullRequest)


@pytest.mark.parametrize(
    "kind", [PullRequest, SettleRequest, Settlement, Nack, Reject, Extend], ids=lambda kind: kind.__name__
)  # fmt: skip
def test_a_request_with_a_field_that_nobody_knows_is_refused(kind: type[msgspec.Struct]) -> None:
    with pytest.raises(ProtocolError, match="unknown field `spelling`"):
        decode_json(b'{"spelling":1}', kind)
    with pytest.raises(ProtocolError, match="unknown field `spelling`"):
        decode_msgpack(msgspec.msgpack.encode({"spelling": 1}), kind)


@pytest.mark.parametrize("kind", [SendAnswer, SettleAnswer, ErrorAnswer])
def test_an_answer_may_have_fields_that_an_older_client_does_not_know(
    kind: type[msgspec.Struct],
) -> None:
    value = next(each for each in CONTROLS.values() if isinstance(each, kind))
    newer = msgspec.to_builtins(value) | {"new": [1, {"deep": None}]}
    assert decode_json(msgspec.json.encode(newer), kind) == value
    assert decode_msgpack(msgspec.msgpack.encode(newer), kind) == value


def test_a_bottomless_answer_is_refused_in_both_encodings() -> None:
    depth = 100_000
    with pytest.raises(ProtocolError, match="JSON"):
        decode_json(b'{"new":' + b"[" * depth + b"]" * depth + b"}", SettleAnswer)
    with pytest.raises(ProtocolError, match="MessagePack"):
        decode_msgpack(b"\x81\xa3new" + b"\x91" * depth + b"\x90", SettleAnswer)


def test_a_text_with_a_lone_surrogate_is_refused_by_type_in_both_encodings() -> None:
    for encode in (encode_control, encode_json):
        with pytest.raises(EncodingError) as caught:
            encode(ErrorAnswer(code="a", message="bad \udcff name"))
        error = caught.value
        assert error.field == "ErrorAnswer"
        assert error.remedy == "Remove lone surrogates."
        assert str(error).replace("…", "").isascii()


def test_a_control_frame_is_as_long_as_its_limit_and_not_longer() -> None:
    fits = ErrorAnswer(code="a", message="x" * (CONTROL_BYTES_MAX - 100))
    data = encode_control(fits)
    assert decode_control(data, ErrorAnswer) == fits
    rest = CONTROL_BYTES_MAX - len(data)
    whole = ErrorAnswer(code="a", message="x" * (CONTROL_BYTES_MAX - 100 + rest))
    assert len(encode_control(whole)) == CONTROL_BYTES_MAX
    assert decode_control(encode_control(whole), ErrorAnswer) == whole
    over = encode_control(ErrorAnswer(code="a", message=whole.message + "x" * 8))
    with pytest.raises(ProtocolError, match=f"over the limit of {CONTROL_BYTES_MAX}"):
        decode_control(over, ErrorAnswer)


@pytest.mark.parametrize("kind", set(FrameKind) - {FrameKind.CONTROL, FrameKind.PADDING})
def test_a_frame_of_another_kind_is_no_request(kind: FrameKind) -> None:
    with pytest.raises(ProtocolError, match=f"of kind {kind.name} is not a request"):
        decode_control(build_frame(kind, b""), PullRequest)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "ends inside a length"),
        (struct.pack(">I", 5) + b"abcd", "inside a part of 5 bytes"),
        (struct.pack(">I", 2**32 - 1), "inside a part of 4294967295 bytes"),
        (struct.pack(">I", 0), "MessagePack"),
        (struct.pack(">I", 1) + b"\xc1", "MessagePack"),
        (struct.pack(">I", 1) + b"\xc0", "MessagePack"),
        (struct.pack(">I", 3) + b"\x81\xa1\xff", "MessagePack"),
        (struct.pack(">I", 5) + b"\xdd\xff\xff\xff\xff", "MessagePack"),
        (struct.pack(">I", 5) + b"\xdf\xff\xff\xff\xff", "MessagePack"),
        (struct.pack(">I", 10_000) + b"\x91" * 10_000, "MessagePack"),
    ],
)
def test_a_control_frame_with_a_right_checksum_that_is_no_request_is_refused(
    body: bytes, said: str
) -> None:
    with pytest.raises(ProtocolError, match=said):
        decode_control(build_frame(FrameKind.CONTROL, body), PullRequest)


def test_a_part_ends_where_its_length_says() -> None:
    data = b"??" + struct.pack(">I", 3) + b"abcdef"
    assert sized_part(data, 2) == b"abc"
    assert sized_part(struct.pack(">I", 0), 0) == b""
    for position in (len(data) - 3, len(data), len(data) + 100):
        with pytest.raises(ProtocolError, match="inside a length"):
            sized_part(data, position)
