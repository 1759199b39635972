"""Messages: every body comes back as it was given or as JSON has it, or is refused before any SQL."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import json
import math
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq_client.json_body import LEVELS_MAX
from qmq_client.message import (
    Message,
    decode_body,
    encode_body,
    message_to_record,
    record_to_message,
)
from qmq_client.wire.errors import EncodingError, InvalidMessageError, ProtocolError
from qmq_client.wire.record import (
    TIME_MAX_MS,
    BodyKind,
    Record,
    decode_record,
    encode_record,
)
from tests.wire.hostile import examples, records

NEW_ID = bytes(range(16))

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    max_leaves=20,
)  # fmt: skip


def through(body: Any, body_type: Any = Any) -> Any:
    """The body as the handler gets it."""
    record = message_to_record(Message("flight", body), new_id=NEW_ID, now_ms=1)
    data = encode_record(record)
    return record_to_message(decode_record("flight", data), body_type).body


@examples(120)
@given(st.binary() | JSON_VALUES)
def test_S9_bytes_text_and_json_values_come_back_equal(body: Any) -> None:
    back = through(body)
    assert back == body
    assert type(back) is type(body)


def test_S9_text_and_bytes_that_look_like_json_come_back_as_they_were() -> None:
    for body in ('{"a": 1}', "null", "NaN", b'{"a":1}', b"null", "", b"", "\0", "\ufeff", "\r\n"):
        back = through(body)
        assert back == body
        assert type(back) is type(body)


@pytest.mark.parametrize(
    "body", [bytearray(b"abc"), memoryview(b"abc"), memoryview(b"aXbXcX")[::2]]
)
def test_a_buffer_is_sent_as_its_bytes(body: Any) -> None:
    assert through(body) == b"abc"


@dataclasses.dataclass
class Leg:
    origin: str
    minutes: int | None = None


class Flight(msgspec.Struct):
    number: int
    legs: list[Leg] = []


class ModelLike:
    """What the codec uses of a pydantic model."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def model_dump_json(self) -> str:
        return json.dumps(self.values, default=str).replace("NaN", "null")

    def model_dump(self) -> dict[Any, Any]:
        return self.values

    @classmethod
    def model_validate_json(cls, data: bytes) -> ModelLike:
        values = json.loads(data)
        if "number" not in values:
            raise ValueError("number is missing")
        return cls(**values)


def test_a_dataclass_comes_back_typed_or_as_its_json() -> None:
    assert through(Leg("EWR")) == {"origin": "EWR", "minutes": None}
    assert through(Leg("EWR", 9), Leg) == Leg("EWR", 9)


def test_a_struct_comes_back_typed_or_as_its_json() -> None:
    assert through(Flight(1545, [Leg("EWR")]), Flight) == Flight(1545, [Leg("EWR")])
    assert through(Flight(1545)) == {"number": 1545, "legs": []}


def test_a_pydantic_like_model_comes_back_through_its_own_methods() -> None:
    back = through(ModelLike(number=1545, gate=None), ModelLike)
    assert isinstance(back, ModelLike)
    assert back.values == {"number": 1545, "gate": None}


def test_a_model_with_null_and_keys_that_json_dumps_refuses_is_sent() -> None:
    class Keyed(ModelLike):
        def model_dump_json(self) -> str:
            return '{"00000000-0000-0000-0000-000000000001":null}'

        def model_dump(self) -> dict[Any, Any]:
            return {uuid.UUID(int=1): None}

    assert through(Keyed()) == {"00000000-0000-0000-0000-000000000001": None}
    assert through({uuid.UUID(int=1): None}) == {"00000000-0000-0000-0000-000000000001": None}


class Severity(enum.Enum):
    SEVERE = "severe"
    FIRST_OF_2013 = "2013-01-01"


class Bags(msgspec.Struct):
    counts: dict[Any, int]


@pytest.mark.parametrize(
    ("body", "as_json"),
    [
        ((1, 2), [1, 2]),
        ({3}, [3]),
        ({1: "a", 2.5: "b"}, {"1": "a", "2.5": "b"}),
        ({1: "a", "2": {"1": "b"}}, {"1": "a", "2": {"1": "b"}}),
        ({datetime.date(2013, 1, 1): 1}, {"2013-01-01": 1}),
        (Severity.SEVERE, "severe"),
        (decimal.Decimal("1.10"), "1.10"),
        (uuid.UUID(int=5), "00000000-0000-0000-0000-000000000005"),
        (datetime.datetime(2013, 1, 1, tzinfo=datetime.UTC), "2013-01-01T00:00:00Z"),
        ({"a": b"\xff"}, {"a": "/w=="}),
        ({"note": "null and void"}, {"note": "null and void"}),
        (10**4000, 10**4000),
        (2**64, 2**64),
        (-(2**63) - 1, -(2**63) - 1),
        (-0.0, -0.0),
        (1e308, 1e308),
        (5e-324, 5e-324),
    ],
    ids=lambda value: repr(value)[:24] if not isinstance(value, int) else "int",
)
def test_what_json_can_say_comes_back_as_json_has_it(body: Any, as_json: Any) -> None:
    assert through(body) == as_json


def nested(depth: int, make: Callable[[Any], Any] = lambda inner: [inner], *, leaf: Any = 1) -> Any:
    body: Any = leaf
    for _ in range(depth):
        body = make(body)
    return body


@pytest.mark.parametrize("leaf", [1, "2013-01-01", datetime.date(2013, 1, 1)])
def test_as_many_levels_as_are_allowed_come_back(leaf: Any) -> None:
    assert through(nested(LEVELS_MAX, leaf=leaf)) == nested(LEVELS_MAX, leaf=through([leaf])[0])


class Silent:
    def model_dump_json(self) -> str:
        raise ValueError("no")


LOOP: list[Any] = []
LOOP.append(LOOP)

NOT_ENCODABLE: dict[str, Any] = {
    "surrogate": "a\ud800",
    "surrogate within": {"a": ["\udfff"]},
    "surrogate as key": {"\ud800": 1},
    "NaN": math.nan,
    "infinity": math.inf,
    "NaN within": {"a": [1, {"b": (2, math.nan)}]},
    "NaN in a set": {math.nan},
    "infinity beside null": [None, -math.inf],
    "NaN in a dataclass": Leg("EWR", math.nan),  # type: ignore[arg-type]  # the mistake
    "NaN in a model": ModelLike(number=math.nan),
    "object": object(),
    "function": nested,
    "class": Leg,
    "exception": ValueError("a"),
    "generator": (each for each in "ab"),
    "range": range(3),
    "complex": 1j,
    "int of 5,000 digits": 10**5000,
    "int subclass": type("Count", (int,), {})(5),
    "tuple as key": {(1, 2): 3},
    "None as key": {None: 3},
    "bool as key": {True: 3},
    "number and text as one name": {1: "a", "1": "b"},
    "one name twice within": [{"a": ({"b": {0.5: 1, "0.5": 2}},)}],
    "one name twice by two types": {datetime.date(2013, 1, 1): 1, Severity.FIRST_OF_2013: 2},
    "one name twice in a struct": Bags({17: 1, "17": 2}),
    "loop": LOOP,
    "nest of lists": nested(LEVELS_MAX + 1),
    "nest of dicts": nested(LEVELS_MAX + 1, lambda inner: {"a": inner}),
    "bottomless nest": nested(100_000),
    "model that refuses": Silent(),
    "ellipsis": ...,
}


@pytest.mark.parametrize("name", NOT_ENCODABLE)
def test_S7_a_body_that_cannot_be_encoded_is_refused_by_type(name: str) -> None:
    with pytest.raises(EncodingError) as caught:
        encode_body(NOT_ENCODABLE[name])
    error = caught.value
    assert error.field == "body"
    assert error.limit == "bytes, text, or a value that JSON can express"
    assert error.value.startswith(type(NOT_ENCODABLE[name]).__name__)
    assert len(error.value) < 200
    assert error.remedy == "Convert it to one of these before the send."
    assert error.code == "not_encodable"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "subject": ({"subject": "../a"}, "subject"),
    "no subject": ({"subject": None}, "subject"),
    "subject of bytes": ({"subject": b"flight"}, "subject"),
    "key": ({"key": "k" * 256}, "key"),
    "key that is no text": ({"key": 5}, "key"),
    "key of bytes": ({"key": b"k"}, "key"),
    "tags that are none": ({"tags": None}, "tags"),
    "tags that are a number": ({"tags": 5}, "tags"),
    "tag": ({"tags": ["a b"]}, "tag"),
    "tag that is no text": ({"tags": [5]}, "tag"),
    "headers that are none": ({"headers": None}, "headers"),
    "headers as pairs": ({"headers": [("a", "b")]}, "headers"),
    "header name": ({"headers": {"a b": "c"}}, "header name"),
    "header name that is no text": ({"headers": {5: "c"}}, "header name"),
    "header value": ({"headers": {"a": 5}}, "header a"),
    "id": ({"message_id": "xyz"}, "message_id"),
    "id of bytes": ({"message_id": bytes(16)}, "message_id"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_S7_a_message_that_breaks_a_rule_is_refused_by_field(name: str) -> None:
    values, field = REFUSED[name]
    message = Message(**({"subject": "flight"} | values))
    with pytest.raises(InvalidMessageError) as caught:
        encode_record(message_to_record(message, new_id=NEW_ID, now_ms=1))
    assert caught.value.field == field
    assert caught.value.limit
    assert caught.value.value
    assert caught.value.remedy


def test_one_tag_may_be_given_as_text() -> None:
    message = Message("flight", tags="severe")  # type: ignore[arg-type]  # allowed all the same
    assert message_to_record(message, new_id=NEW_ID, now_ms=1).tags == ("severe",)


def test_a_message_has_the_new_id_unless_it_brings_one() -> None:
    assert message_to_record(Message("a"), new_id=NEW_ID, now_ms=1).message_id == NEW_ID
    own = Message("a", message_id="f" * 32)
    assert message_to_record(own, new_id=NEW_ID, now_ms=1).message_id == b"\xff" * 16


@examples(100)
@given(records())
def test_every_record_makes_a_message_or_a_protocol_error(record: Record) -> None:
    try:
        message = record_to_message(record)
    except ProtocolError:
        assert record.body_kind is not BodyKind.BYTES
        return
    assert message.message_id == record.message_id.hex()
    assert (message.subject, message.key, message.tags) == (record.subject, record.key, record.tags)
    assert tuple(message.headers.items()) == record.headers
    assert message.born_at is not None
    assert (message.born_at - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)) / datetime.timedelta(
        milliseconds=1
    ) == record.born_at_ms  # fmt: skip


@pytest.mark.parametrize(
    ("born_at_ms", "text"),
    [
        (0, "1970-01-01T00:00:00+00:00"),
        (1_357_034_220_001, "2013-01-01T09:57:00.001000+00:00"),
        (TIME_MAX_MS, "9999-12-31T23:59:59.999000+00:00"),
    ],
)
def test_the_birth_is_exact_to_the_millisecond_in_utc(born_at_ms: int, text: str) -> None:
    record = message_to_record(Message("a"), new_id=NEW_ID, now_ms=born_at_ms)
    born_at = record_to_message(decode_record("a", encode_record(record))).born_at
    assert born_at is not None
    assert born_at.isoformat() == text


@pytest.mark.parametrize(
    ("kind", "body", "body_type"),
    [
        (BodyKind.TEXT, b"\xff", Any),
        (BodyKind.JSON, b"", Any),
        (BodyKind.JSON, b"\xff", Any),
        (BodyKind.JSON, b"{", Any),
        (BodyKind.JSON, b"{}{}", Any),
        (BodyKind.JSON, b"NaN", Any),
        (BodyKind.JSON, b'"\\ud800"', Any),
        (BodyKind.JSON, b"9" * 5000, Any),
        (BodyKind.JSON, b"1e400", Any),
        (BodyKind.JSON, b"[" * 100_000, Any),
        (BodyKind.JSON, b"[" * 100_000 + b"]" * 100_000, Any),
        (BodyKind.JSON, b'{"origin":5}', Leg),
        (BodyKind.JSON, b"{}", Flight),
        (BodyKind.JSON, b"{}", ModelLike),
        (BodyKind.JSON, b"{", ModelLike),
    ],
)
def test_a_body_that_is_not_what_it_says_is_a_protocol_error(
    kind: BodyKind, body: bytes, body_type: Any
) -> None:
    with pytest.raises(ProtocolError):
        decode_body(kind, body, body_type)


@examples(100)
@given(
    kind=st.sampled_from(BodyKind),
    body=st.binary(max_size=60),
    body_type=st.sampled_from([Any, Leg, int, str]),
)
def test_any_bytes_make_a_body_or_a_protocol_error(
    kind: BodyKind, body: bytes, body_type: Any
) -> None:  # fmt: skip
    try:
        decode_body(kind, body, body_type)
    except ProtocolError:
        assert kind is not BodyKind.BYTES


def test_a_message_is_a_value() -> None:
    message = Message("flight", {"a": 1}, key="k")
    assert message == Message("flight", {"a": 1}, key="k")
    with pytest.raises(AttributeError):
        message.key = "other"  # type: ignore[misc]  # the mistake


def test_a_message_is_shown_by_what_was_given_and_the_beginning_of_its_body() -> None:
    shown = "Message('flight', {'a': 1}, key='k', tags=('t',), delay=4)"
    assert repr(Message("flight", {"a": 1}, key="k", tags=("t",), delay=4)) == shown
    assert repr(Message("flight")) == "Message('flight', b'')"
    for body, end in (
        (bytes(4_000_000), " (4000000 in all))"),
        ("x" * 4_000_000, " (4000000 in all))"),
        ([1] * 1_000_000, " (3000000 characters))"),
    ):
        text = repr(Message("flight", body))
        assert text.endswith(end)
        assert len(text) < 5_000


@pytest.mark.parametrize("value", [{"a": 1}, "text", None])
def test_what_is_no_message_is_refused_with_what_to_give(value: Any) -> None:
    with pytest.raises(InvalidMessageError, match=r"Give Message\(subject, body\)"):
        message_to_record(value, new_id=NEW_ID, now_ms=1)


def test_a_copy_has_the_changes_and_what_it_was_made_from_stays() -> None:
    received = record_to_message(
        message_to_record(Message("a", {"n": 1}, key="k", tags=("t",)), new_id=NEW_ID, now_ms=5)
    )
    copy = received.replace(subject="b", message_id=None)
    assert (copy.subject, copy.message_id) == ("b", None)
    assert (copy.body, copy.key, copy.tags) == ({"n": 1}, "k", ("t",))
    assert (received.subject, received.message_id) == ("a", NEW_ID.hex())
    assert type(copy) is Message
    with pytest.raises(TypeError, match="bodi"):
        received.replace(bodi=b"")
