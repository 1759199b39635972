"""Untrusted JSON: bounded in depth and number of values, then decoded once into a typed struct.

The bounds are found by scanning before anything is decoded, not by catching the recursion that a deep text causes.
The scan is linear and takes its text in slices: in a thread it never holds the interpreter for long. msgspec refuses
encodings other than UTF-8, byte order marks, lone surrogates, NaN and numbers out of range. It passes over a
`msgspec.Raw`: read such a value with `decode_json`.
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
#: Values and names of one request, counted by what stands next to them: a parser makes an object of each in one go,
#: and lets no other thread run meanwhile. A request of 10,000 messages with all fields has 180,000.
JSON_VALUES_MAX: Final = 200_000

_SLICE_BYTES: Final = 64 * 1024
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
#: An opening bracket is one level more, a closing one is one less (255 is -1 as a signed byte).
_STEPS: Final = bytes.maketrans(b"[{]}", bytes((1, 1, 255, 255)))
_FIELD: Final = re.compile(r"field `(.*)`")
_PATH_CHARACTERS_MAX: Final = 60

T = TypeVar("T")


def read_json(data: bytes, kind: type[T]) -> T:
    """A value of type `kind`; raises `ProtocolError` or `InvalidMessageError`, of which `TooLargeError` is one."""
    _check_shape(data)
    try:
        return decode_json(data, kind)
    except ProtocolError as error:
        if isinstance(error.__cause__, msgspec.ValidationError):
            raise _not_of_form(str(error.__cause__)) from error
        raise


def _not_of_form(reason: str) -> InvalidMessageError:
    """What msgspec says, with the path of the field in the request."""
    what, _, place = reason.partition(" - at `$")
    name = _FIELD.search(what)
    path = place.rstrip("`") + (f".{name[1]}" if name is not None else "")
    return InvalidMessageError(
        field=_short_path(path.removeprefix(".")) or "request",
        limit="what GET /openapi.json says of this route",
        value=shorten(what),
        remedy="Compare the request with it.",
    )


def _short_path(path: str) -> str:
    """A path of fields, bounded: names in it may come from the sender."""
    return path if path.isascii() and len(path) <= _PATH_CHARACTERS_MAX else ""


def _check_shape(data: bytes) -> None:
    """Refuse too many levels and too many values, wherever they are outside of strings."""
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
            raise ProtocolError(f"JSON: nested deeper than {JSON_DEPTH_MAX}")
        values += steps.count(1) + outside.count(b",") + outside.count(b":")
        if values > JSON_VALUES_MAX:
            raise TooLargeError(
                field="request",
                limit=f"{JSON_VALUES_MAX} values and names in JSON",
                value=f"more than {JSON_VALUES_MAX}",
                remedy="Send several requests, frames instead of JSON, or the body as body_base64.",
            )
