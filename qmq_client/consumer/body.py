"""Bodies as the handler's parameter asks for them.

The decoder is made once per handler. A body that does not fit the type raises `ProtocolError`: the
message is rejected with that reason at once, since it would not fit at any later attempt either, and
a person finds it among the dead letters.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

import msgspec
import msgspec.inspect

from qmq_client.message import decode_body, not_decoded
from qmq_client.typed import json_decoder
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.record import BodyKind, Record

Decoder = Callable[[Record], Any]


def body_decoder(body_type: Any) -> Decoder:
    """A function from a record to its body; raises `TypeError` for a type nobody can decode."""
    plain = plain_type(body_type)
    if plain in {Any, object}:
        return lambda record: decode_body(record.body_kind, record.body)
    if plain is bytes:
        return lambda record: record.body
    takes_bytes = bytes in map(plain_type, _members(plain))
    takes_text = str in _members(body_type)
    decode_json = _json_decoder(body_type)
    name = getattr(body_type, "__name__", str(body_type))

    def decode(record: Record) -> Any:
        kind = record.body_kind
        if kind is BodyKind.JSON:
            return decode_json(record.body)
        if (takes_bytes and kind is BodyKind.BYTES) or (takes_text and kind is BodyKind.TEXT):
            return decode_body(kind, record.body)
        wrong = f"body is {kind.name.lower()}, the handler asks for {name}"
        if kind is BodyKind.BYTES:
            raise ProtocolError(wrong)
        # An enum of texts, a UUID: what JSON has as a text may have been sent as one.
        try:
            return decode_json(msgspec.json.encode(decode_body(kind, record.body)))
        except ProtocolError as error:
            raise ProtocolError(f"{wrong}: {error}") from None

    return decode


def plain_type(annotation: Any) -> Any:
    """What is behind `Annotated`, a `NewType` or an alias of `type`."""
    while True:
        if typing.get_origin(annotation) is typing.Annotated:
            annotation = typing.get_args(annotation)[0]
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        elif type(annotation).__name__ == "TypeAliasType":  # since Python 3.12
            annotation = annotation.__value__
        else:
            return annotation


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
            raise not_decoded(error) from None

    return decode_json


def _is_of_pydantic(body_type: Any, around: tuple[Any, ...] = ()) -> bool:
    """Whether only pydantic can check it: by its rules, as a dataclass of its own, or made of its models."""
    if hasattr(body_type, "__pydantic_validator__"):
        return True
    if any(map(_is_rule_of_pydantic, getattr(body_type, "__metadata__", ()))):
        return True
    plain = plain_type(body_type)
    if plain in around:  # a type that contains itself
        return False
    return any(_is_of_pydantic(part, (*around, plain)) for part in _parts(plain))


def _parts(plain: Any) -> tuple[Any, ...]:
    """What it is made of."""
    made_of = typing.get_args(plain)
    if not made_of and (is_dataclass(plain) or hasattr(plain, "__required_keys__")):
        made_of = tuple(typing.get_type_hints(plain, include_extras=True).values())
    return made_of


def _is_rule_of_pydantic(metadata: Any) -> bool:
    return type(metadata).__module__.partition(".")[0] == "pydantic"


def _pydantic_decoder(body_type: Any) -> Callable[[bytes], Any]:
    import pydantic  # installed: the type is of it

    try:
        validate = pydantic.TypeAdapter(body_type).validate_json
    except pydantic.errors.PydanticUserError as error:
        raise TypeError(str(error)) from error

    def decode_json(body: bytes) -> Any:
        try:
            return validate(body)
        except (ValueError, TypeError, AssertionError, RecursionError) as error:
            raise not_decoded(error) from None

    return decode_json


def _members(body_type: Any) -> frozenset[Any]:
    if typing.get_origin(body_type) in {typing.Union, types.UnionType}:
        return frozenset(typing.get_args(body_type))
    return frozenset({body_type})
