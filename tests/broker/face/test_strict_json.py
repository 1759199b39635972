"""JSON from untrusted clients: bounded before it is decoded, refused by the path of the field."""

from __future__ import annotations

import json
from typing import Annotated

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq_broker.face.strict_json import JSON_DEPTH_MAX, JSON_VALUES_MAX, read_json
from qmq_client.wire.errors import InvalidMessageError, ProtocolError, TooLargeError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
)  # fmt: skip


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    size: Annotated[int, msgspec.Meta(ge=1)]


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    parts: list[Inner]


@pytest.mark.parametrize(
    ("request_text", "field"),
    [
        ('{"parts": [{"size": 0}]}', "parts[0].size"),
        ('{"parts": [{"size": 1}, {"size": "1"}]}', "parts[1].size"),
        ('{"parts": [{}]}', "parts[0].size"),
        ('{"parts": [{"size": 1, "colour": 1}]}', "parts[0].colour"),
        ('{"parts": 1}', "parts"),
        ("{}", "parts"),
        ("[]", "request"),
        ('{"%s": 1}' % ("x" * 100), "request"),
    ],
)
def test_S7_what_is_not_of_the_form_is_refused_by_the_path_of_its_field(
    request_text: str, field: str
) -> None:
    with pytest.raises(InvalidMessageError) as refused:
        read_json(request_text.encode(), Outer)
    assert refused.value.field == field
    assert "GET /openapi.json" in refused.value.limit


@given(VALUES, st.booleans())
def test_ordinary_json_passes(value: object, is_ascii: bool) -> None:
    read_json(json.dumps(value, ensure_ascii=is_ascii).encode(), object)


@given(st.binary() | st.text().map(lambda text: text.encode(errors="surrogatepass")))
def test_any_bytes_pass_or_are_a_protocol_error(data: bytes) -> None:
    try:
        read_json(data, object)
    except ProtocolError:
        return
    json.loads(data)


@pytest.mark.parametrize("pair", [b"[]", b'{"a":}'])
def test_nesting_is_refused_just_above_the_bound(pair: bytes) -> None:
    opening, closing = pair[:-1], pair[-1:]
    read_json(opening * JSON_DEPTH_MAX + b"1" + closing * JSON_DEPTH_MAX, object)
    deep = JSON_DEPTH_MAX + 1
    with pytest.raises(ProtocolError, match="nested deeper"):
        read_json(opening * deep + b"1" + closing * deep, object)


def test_brackets_in_texts_are_no_nesting() -> None:
    read_json(json.dumps(["[" * 1000, '\\"{' * 1000, "]"]).encode(), object)
    read_json(b"[" + b"[],{}," * 1000 + b"0]", object)


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 2_000_000,
        b'{"a":' * 400_000,
        b"[]" * 1_000_000,
        b'"' + b"\\" * 1_999_999,
        b'"\\' * 1_000_000,
        b"[[]," * 500_000,
    ],
    ids=["lists", "objects", "pairs", "one long text", "texts", "a wide list"],
)
def test_two_megabytes_of_malice_cost_little(data: bytes) -> None:
    with pytest.raises((ProtocolError, TooLargeError)):
        read_json(data, object)


@pytest.mark.parametrize(
    ("value", "brackets"),
    [(b"1", 0), (b"[]", 1), (b"{}", 1), (b'"a,b:"', 0), (b'"[{"', 0), (rb'"\\"', 0), (rb'"\""', 0)],
)
def test_values_are_refused_just_above_the_bound(value: bytes, brackets: int) -> None:
    most = JSON_VALUES_MAX // (1 + brackets)
    read_json(b"[" + b",".join([value] * most) + b"]", object)
    with pytest.raises(TooLargeError) as refused:
        read_json(b"[" + b",".join([value] * (most + 1)) + b"]", object)
    assert "body_base64" in refused.value.remedy


def test_names_count_as_values_do() -> None:
    """A parser reads an object of a hundred thousand names in one go."""
    names = [b'"%d":1' % number for number in range(JSON_VALUES_MAX // 2 + 1)]
    read_json(b"{" + b",".join(names[:-1]) + b"}", object)
    with pytest.raises(TooLargeError):
        read_json(b"{" + b",".join(names) + b"}", object)


def test_commas_and_brackets_in_texts_are_no_values() -> None:
    read_json(json.dumps([",[{" * 600_000, '\\"' * 1_000, ",[{" * 100]).encode(), object)
