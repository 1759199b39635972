"""What a textual statement may do to the transaction it is in.

There are three kinds. *Plain* ones change or read rows and leave the transaction alone.
*Savepoints* are made, released or rolled back to by name. *All others* are unknown: COMMIT,
ROLLBACK AND CHAIN, DDL on MySQL, a procedure with a ROLLBACK in its error handler, several
statements in one text. Only what is surely plain counts as plain; a mistake in the other direction
costs a statement, not a message.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple

#: Statements whose kind is cached, and the longest that is: a megabyte at most in all.
_STATEMENTS_KEPT_MAX: Final = 512
_KEPT_CHARACTERS_MAX: Final = 2_000
_GAP: Final = r"(?:\s|--[^\n]*\n|/\*(?!!).*?\*/)*"
_PLAIN: Final = re.compile(
    _GAP + r"\(?(?:SELECT|INSERT|UPDATE|DELETE|WITH|VALUES|MERGE|REPLACE|SHOW|EXPLAIN|PRAGMA"
    r"|SET\s+LOCAL)\b",
    re.IGNORECASE | re.DOTALL,
)
_SAVEPOINT: Final = re.compile(
    _GAP + r"(?P<verb>SAVEPOINT|RELEASE(?:\s+SAVEPOINT)?"
    r"|ROLLBACK(?:\s+(?:TRANSACTION|WORK))?\s+TO(?:\s+SAVEPOINT)?)\s+"
    r"(?P<name>\w+|\"[^\"]+\"|`[^`]+`|\[[^\]]+\])\s*;?\s*",
    re.IGNORECASE | re.DOTALL,
)
#: A second statement in a text, or what looks like one.
_MORE: Final = re.compile(r";\s*\S")


class SavepointText(NamedTuple):
    """A savepoint by text: SAVEPOINT, RELEASE or ROLLBACK, and its name as it is written."""

    verb: str
    name: str


def is_plain(statement: str) -> bool:
    """Whether this surely leaves the transaction and its savepoints alone."""
    if len(statement) <= _KEPT_CHARACTERS_MAX:
        return _is_plain_kept(statement)
    return _is_plain(statement)


def _is_plain(statement: str) -> bool:
    return _PLAIN.match(statement) is not None and _MORE.search(statement) is None


#: An application has few statements and repeats them again and again.
_is_plain_kept: Final = lru_cache(maxsize=_STATEMENTS_KEPT_MAX)(_is_plain)


def savepoint_text(statement: str) -> SavepointText | None:
    """What this does to a savepoint, if that is all it does."""
    found = _SAVEPOINT.fullmatch(statement)
    if found is None:
        return None
    verb = found["verb"].split()[0].upper()
    return SavepointText(verb, found["name"])
