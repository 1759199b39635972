"""Which savepoint a name in a statement means: databases differ in whether case counts."""

from __future__ import annotations

from typing import Final

_QUOTES: Final = '"`[]'


def folded_name(text: str) -> str:
    """Where case never counts: MySQL, MariaDB and SQLite."""
    return text.strip(_QUOTES).casefold()


def exact_name(text: str) -> str:
    """Where case counts within quotes: PostgreSQL."""
    return text.strip(_QUOTES) if text.startswith('"') else text.lower()
