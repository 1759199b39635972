"""JSON from strangers: refused where parsers disagree or break.

Refused: another encoding than UTF-8 and byte order marks, lone surrogates, NaN and infinities,
numbers that are none to others, names given twice in one object, nesting beyond a bound. Depth is
found by scanning, not by catching the recursion that a deep text causes.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final, TypeVar

import msgspec

from qmq_client.wire.errors import InvalidMessageError, ProtocolError
from qmq_client.wire.names import shorten
from qmq_client.wire.requests import decode_json

#: Arrays and objects inside one another; far below every parser's own bound.
JSON_DEPTH_MAX: Final = 64

_STRUCTURE: Final = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', re.DOTALL)
_SURROGATE: Final = re.compile(rb"\\u[dD][89abAB]")
_OPENING: Final = (0x5B, 0x7B)
_CLOSING: Final = (0x5D, 0x7D)

T = TypeVar("T")


def read_json(data: bytes, kind: type[T]) -> T:
    """A value of type `kind`; raises `ProtocolError` or `InvalidMessageError`."""
    check_json(data)
    try:
        return decode_json(data, kind)
    except ProtocolError as error:
        if isinstance(error.__cause__, msgspec.ValidationError):
            raise InvalidMessageError(
                field="request",
                limit="the fields of this route",
                value=shorten(str(error.__cause__)),
                remedy="Compare the request with the documentation of the route.",
            ) from error
        raise


def check_json(data: bytes) -> None:
    """Raise `ProtocolError` for JSON that two parsers could read in two ways."""
    _check_depth(data)
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
        if _SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise ProtocolError("JSON: text is not UTF-8, or half of a surrogate pair") from error
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"JSON: {shorten(str(error))}") from error


def _check_depth(data: bytes) -> None:
    depth = 0
    for token in _STRUCTURE.finditer(data):
        first = data[token.start()]
        if first in _OPENING:
            depth += 1
            if depth > JSON_DEPTH_MAX:
                raise ProtocolError(
                    f"JSON: nested deeper than {JSON_DEPTH_MAX}", offset=token.start()
                )
        elif first in _CLOSING:
            depth -= 1


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"name {shorten(twice)} given twice")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {shorten(text)} is out of range")
    return value
