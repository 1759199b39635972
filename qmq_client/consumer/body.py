"""Bodies as the handler's parameter asks for them.

The decoder is made once per handler. A body that does not fit the type raises `ProtocolError`: the
message is rejected with that reason at once, since it would not fit at any later attempt either, and
a person finds it among the dead letters.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from typing import Any

import msgspec
import msgspec.inspect

from qmq_client.message import decode_body
from qmq_client.typed import json_decoder
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.record import BodyKind, Record

Decoder = Callable[[Record], Any]


def body_decoder(body_type: Any) -> Decoder:
    """A function from a record to its body; raises `TypeError` for a type nobody can decode."""
    if body_type in {Any, object}:
        return lambda record: decode_body(record.body_kind, record.body)
    if body_type is bytes:
        return lambda record: record.body
    members = _members(body_type)
    takes_bytes, takes_text = bytes in members, str in members
    decode_json = _json_decoder(body_type)
    name = getattr(body_type, "__name__", str(body_type))

    def decode(record: Record) -> Any:
        kind = record.body_kind
        if kind is BodyKind.JSON:
            return decode_json(record.body)
        if (takes_bytes and kind is BodyKind.BYTES) or (takes_text and kind is BodyKind.TEXT):
            return decode_body(kind, record.body)
        raise ProtocolError(f"body is {kind.name.lower()}, the handler asks for {name}")

    return decode


def _json_decoder(body_type: Any) -> Callable[[bytes], Any]:
    if hasattr(body_type, "model_validate_json"):  # a pydantic model
        return lambda body: decode_body(BodyKind.JSON, body, body_type)
    if _is_of_pydantic(body_type):
        return _pydantic_decoder(body_type)
    if isinstance(msgspec.inspect.type_info(body_type), msgspec.inspect.CustomType):
        raise TypeError(f"JSON cannot say what a {getattr(body_type, '__name__', body_type)} is")
    decode = json_decoder(body_type).decode

    def decode_json(body: bytes) -> Any:
        try:
            return decode(body)
        except (ValueError, TypeError, RecursionError, msgspec.MsgspecError) as error:
            raise ProtocolError(f"JSON body: {error}") from error

    return decode_json


def _is_of_pydantic(body_type: Any) -> bool:
    """Whether it is a dataclass that only pydantic can check, or made of its models."""
    if hasattr(body_type, "__pydantic_validator__"):
        return True
    return any(map(_is_of_pydantic, typing.get_args(body_type)))


def _pydantic_decoder(body_type: Any) -> Callable[[bytes], Any]:
    import pydantic  # installed: the type is of it

    validate = pydantic.TypeAdapter(body_type).validate_json

    def decode_json(body: bytes) -> Any:
        try:
            return validate(body)
        except (ValueError, TypeError, AssertionError, RecursionError) as error:
            raise ProtocolError(f"JSON body: {error}") from error

    return decode_json


def _members(body_type: Any) -> frozenset[Any]:
    if typing.get_origin(body_type) in {typing.Union, types.UnionType}:
        return frozenset(typing.get_args(body_type))
    return frozenset({body_type})
