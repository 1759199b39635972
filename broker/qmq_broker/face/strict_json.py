"""Untrusted JSON: bounded in depth and number of values, then decoded once into a typed struct.

A scan checks the bounds before anything is decoded, so a deep text causes no recursion. The scan is
linear and works in slices, so in a thread it never holds the interpreter for long. msgspec refuses
encodings other than UTF-8, byte order marks, lone surrogates, NaN and numbers out of range. It does
not check the content of a `msgspec.Raw`: decode such a value with `decode_json`.
"""

from __future__ import annotations

import re
from array import array
from itertools import accumulate
from typing import Final, TypeVar

import msgspec

from qmq_client.wire.errors import InvalidMessageError, ProtocolError, TooLargeError
from qmq_client.wire.requests import decode_json
from qmq_client.wire.shown import shorten

#: Nested arrays and objects; far below every parser's own bound.
JSON_DEPTH_MAX: Final = 64
#: Most values and names in one request, counted by brackets, commas and colons. The parser creates
#: an object for each in one call, during which no other thread runs. A request of 10,000 messages
#: with all fields has 180,000.
JSON_VALUES_MAX: Final = 200_000

_SLICE_BYTES: Final = 64 * 1024
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
#: An opening bracket is one level more, a closing one is one less (255 is -1 as a signed byte).
_STEPS: Final = bytes.maketrans(b"[{]}", bytes((1, 1, 255, 255)))
_FIELD: Final = re.compile(r"field `(.*)`")
_PATH_CHARACTERS_MAX: Final = 60

T = TypeVar("T")


def read_json(data: bytes, kind: type[T]) -> T:
    """Decode a value of type `kind`.

    Raises `ProtocolError` for bad JSON, `TooLargeError` for too many values, and
    `InvalidMessageError` if it is not of this type.
    """
    _check_shape(data)
    try:
        return decode_json(data, kind)
    except ProtocolError as error:
        if isinstance(error.__cause__, msgspec.ValidationError):
            raise _not_of_form(str(error.__cause__)) from error
        raise


def _not_of_form(reason: str) -> InvalidMessageError:
    """The error for a value of another type: msgspec's text, with the path of the field."""
    what, _, place = reason.partition(" - at `$")
    name = _FIELD.search(what)
    path = place.rstrip("`") + (f".{name[1]}" if name is not None else "")
    return InvalidMessageError(
        field=_short_path(path.removeprefix(".")) or "request",
        limit="the schema of this route in GET /openapi.json",
        value=shorten(what),
        remedy="Compare the request with that schema.",
    )


def _short_path(path: str) -> str:
    """A path of fields, or nothing if it is too long: names in it may come from the sender."""
    return path if path.isascii() and len(path) <= _PATH_CHARACTERS_MAX else ""


def _check_shape(data: bytes) -> None:
    """Raise for too many levels or values; characters inside strings do not count."""
    brackets = data.count(b"[") + data.count(b"{")
    most = brackets + data.count(b",") + data.count(b":")
    if brackets <= JSON_DEPTH_MAX and most <= JSON_VALUES_MAX:
        return
    # Without escapes, every quote begins or ends a string
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    is_inside, depth, values = False, 0, 0
    for first in range(0, len(plain), _SLICE_BYTES):
        parts = plain[first : first + _SLICE_BYTES].split(b'"')
        outside = b"".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0
        steps = array("b", outside.translate(_STEPS, _NO_BRACKETS))
        levels = list(accumulate(steps, initial=depth))
        depth = levels[-1]
        if max(levels) > JSON_DEPTH_MAX:
            raise ProtocolError(
                f"JSON is nested deeper than {JSON_DEPTH_MAX} levels: send it flatter, or as a frame"
            )
        values += steps.count(1) + outside.count(b",") + outside.count(b":")
        if values > JSON_VALUES_MAX:
            raise TooLargeError(
                field="request",
                limit=f"{JSON_VALUES_MAX} values and names in JSON",
                value=f"more than {JSON_VALUES_MAX}",
                remedy="Send several requests, frames instead of JSON, or the body as body_base64.",
            )
