"""JSON from strangers: refused where parsers disagree or break.

Refused: encodings other than UTF-8, byte order marks, lone surrogates, NaN and infinities, numbers
that other parsers reject, duplicate names in one object, nesting beyond a bound. Depth is found by
scanning, not by catching the recursion that a deep text causes.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final, TypeVar

import msgspec

from qmq_client.wire.errors import InvalidMessageError, ProtocolError
from qmq_client.wire.requests import decode_json
from qmq_client.wire.shown import shorten

#: Nested arrays and objects; far below every parser's own bound.
JSON_DEPTH_MAX: Final = 64

_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_FIELD: Final = re.compile(r"field `(.*)`")
_PATH_CHARACTERS_MAX: Final = 60
_SURROGATE: Final = re.compile(rb"\\u[dD][89abAB]")

T = TypeVar("T")


def read_json(data: bytes, kind: type[T]) -> T:
    """A value of type `kind`; raises `ProtocolError` or `InvalidMessageError`."""
    check_json(data)
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
    """Remove innermost pairs of brackets, level by level, until there were too many levels."""
    if data.count(b"[") + data.count(b"{") <= JSON_DEPTH_MAX:
        return
    brackets = _STRING.sub(b"", data).translate(None, _NO_BRACKETS)
    for _ in range(JSON_DEPTH_MAX):
        inner = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if len(inner) == len(brackets):
            break
        brackets = inner
    # The rest is deeper, or never closed: neither is worth a parser's stack
    if brackets.count(b"[") + brackets.count(b"{") > 0:
        raise ProtocolError(f"JSON: nested deeper than {JSON_DEPTH_MAX}, or never closed")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"name {shorten(name)} given twice")
            seen.add(name)
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {shorten(text)} is out of range")
    return value
