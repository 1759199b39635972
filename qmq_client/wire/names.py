"""The grammar of names: subjects, groups, consumers, tags and header names.

One anchored ASCII pattern for all: a letter, digit or underscore, then letters, digits, `_`, `.`
and `-`, at most 127 bytes. `\\Z` rather than `$`, because `$` lets a trailing newline through.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from qmq_client.wire.errors import InvalidNameError
from qmq_client.wire.limits import NAME_BYTES_MAX
from qmq_client.wire.shown import shorten

#: Prefix of the broker's internal subjects: clients neither send to them nor pull from them.
OWN_PREFIX: Final = "_qmq."
#: Subject of the copies for long retries.
COPIES: Final = "_qmq.copies"
NAME_PATTERN: Final = rf"[A-Za-z0-9_][A-Za-z0-9_.\-]{{0,{NAME_BYTES_MAX - 1}}}"
_NAME: Final = re.compile(rf"{NAME_PATTERN}\Z")
#: Size of the cache. The same subjects, tags and header names occur in every message.
_NAMES_KEPT_MAX: Final = 4096


def is_name(text: object) -> bool:
    """Whether `text` is a valid name."""
    # Check the length first, so that texts of megabytes never enter the cache.
    return isinstance(text, str) and len(text) <= NAME_BYTES_MAX and _matches(text)


@lru_cache(maxsize=_NAMES_KEPT_MAX)
def _matches(text: str) -> bool:
    return _NAME.match(text) is not None


def check_name(text: object, *, field: str) -> str:
    """Return `text` if it is a valid name; otherwise raise `InvalidNameError` for `field`."""
    if isinstance(text, str) and len(text) <= NAME_BYTES_MAX and _matches(text):
        return text
    raise InvalidNameError(
        field=field,
        limit=f"1 to {NAME_BYTES_MAX} characters of A-Z a-z 0-9 _ . -, not starting with . or -",
        value=shorten(text),
        remedy=f"Choose another {field}.",
    )


def check_not_own(subject: str) -> None:
    """Raise `InvalidNameError` if the subject is one of the broker's own."""
    if subject.startswith(OWN_PREFIX):
        raise InvalidNameError(
            field="subject",
            limit=f"names that do not begin with '{OWN_PREFIX}'",
            value=shorten(subject),
            remedy="Choose another subject: these are the broker's own.",
        )
