"""The grammar of names: subjects, groups, consumers, tags and header names.

One anchored ASCII pattern for all: a letter, digit or underscore, then letters, digits, `_`, `.`
and `-`, at most 127 bytes. `\\Z` rather than `$`, because `$` lets a trailing newline through.
"""

from __future__ import annotations

import re
from typing import Final

from qmq_client.wire.errors import InvalidNameError
from qmq_client.wire.limits import NAME_BYTES_MAX

_NAME: Final = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.\-]{{0,{NAME_BYTES_MAX - 1}}}\Z")
_SHOWN_CHARACTERS_MAX: Final = 60


def is_name(text: object) -> bool:
    """Whether `text` is a valid name."""
    return isinstance(text, str) and _NAME.match(text) is not None


def check_name(text: object, *, field: str) -> str:
    """Return `text` when it is a valid name, else raise `InvalidNameError` naming `field`."""
    if isinstance(text, str) and _NAME.match(text) is not None:
        return text
    raise InvalidNameError(
        field=field,
        limit=f"1 to {NAME_BYTES_MAX} of A-Z a-z 0-9 _ . -, not starting with . or -",
        value=shorten(text),
        remedy=f"Choose another {field}.",
    )


def shorten(value: object) -> str:
    """A printable, bounded form of any value for an error text; control characters escaped."""
    text = ascii(value)
    if len(text) <= _SHOWN_CHARACTERS_MAX:
        return text
    return f"{text[:_SHOWN_CHARACTERS_MAX]}… ({len(text)} characters)"
