"""Pieces of the statements that note ids, the same on all databases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

from qmq_client.errors import AutocommitError

#: Far from every database's limit of parameters, and with 16 bytes each, written as text, from the
#: smallest `max_allowed_packet` of MySQL.
IDS_PER_STATEMENT_MAX: Final = 500


class InsertTexts:
    """INSERT statements of 1 … n ids with the parameters group and id for each of them."""

    def __init__(self, table: str, *, placeholder: str, now_ms: str, ending: str = "") -> None:
        """Requires: `table` is quoted."""
        self._head = f"INSERT INTO {table} (consumer_group, message_id, received_at_ms) VALUES "
        self._row = f"({placeholder}, {placeholder}, {now_ms})"
        self._ending = ending
        self.text = lru_cache(maxsize=IDS_PER_STATEMENT_MAX)(self._make_text)

    def _make_text(self, count: int) -> str:
        return self._head + ", ".join([self._row] * count) + self._ending


def parameters(group: str, message_ids: Sequence[bytes]) -> tuple[object, ...]:
    """What `InsertTexts` wants for these ids."""
    return tuple(value for message_id in message_ids for value in (group, message_id))


def in_statements(message_ids: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """The ids as many at a time as one statement takes."""
    for first in range(0, len(message_ids), IDS_PER_STATEMENT_MAX):
        yield message_ids[first : first + IDS_PER_STATEMENT_MAX]


def of_one_group(group: str | None, placeholder: str) -> tuple[str, tuple[str, ...]]:
    """A further condition of a purge and its parameters; nothing for all groups."""
    if group is None:
        return "", ()
    return f"AND consumer_group = {placeholder} ", (group,)


def autocommit_error() -> AutocommitError:
    """The error for a connection on which nothing can be undone."""
    return AutocommitError(
        "the inbox's connection commits every statement by itself; "
        "remove isolation_level='AUTOCOMMIT' from its engine"
    )
