"""Parts of the statements that note ids, the same on all databases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

from qmq_client.errors import AutocommitError, InboxRowLostError

#: Far below every database's limit of parameters, and, at 16 bytes each written as text, below the
#: smallest `max_allowed_packet` of MySQL.
IDS_PER_STATEMENT_MAX: Final = 500


class NoteTexts:
    """Statements about 1 … n ids of one group."""

    def __init__(self, table: str, *, placeholder: str, now_ms: str, ending: str = "") -> None:
        """Requires: `table` is quoted."""
        self._table = table
        self._placeholder = placeholder
        self._head = f"INSERT INTO {table} (consumer_group, message_id, received_at_ms) VALUES "
        self._row = f"({placeholder}, {placeholder}, {now_ms})"
        self._ending = ending
        #: INSERT of so many ids; its parameters are `pairs`.
        self.insert = lru_cache(maxsize=IDS_PER_STATEMENT_MAX)(self._insert)

    def _insert(self, count: int) -> str:
        return self._head + ", ".join([self._row] * count) + self._ending

    def find(self, count: int) -> str:
        """SELECT of those ids that are there; its parameters are the group and the ids."""
        places = ", ".join([self._placeholder] * count)
        return (
            f"SELECT message_id FROM {self._table} "
            f"WHERE consumer_group = {self._placeholder} AND message_id IN ({places})"
        )

    def refuse(self, message_ids: Sequence[bytes]) -> InboxRowLostError:
        """The error for ids that are not there although the database accepted their INSERT."""
        return InboxRowLostError(self._table, message_ids)


def pairs(group: str, message_ids: Sequence[bytes]) -> tuple[object, ...]:
    """The parameters of an INSERT: the group and the id for each of them."""
    return tuple(value for message_id in message_ids for value in (group, message_id))


def in_statements(message_ids: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """The ids in portions for one statement each."""
    for first in range(0, len(message_ids), IDS_PER_STATEMENT_MAX):
        yield message_ids[first : first + IDS_PER_STATEMENT_MAX]


def of_one_group(group: str | None, placeholder: str) -> tuple[str, tuple[str, ...]]:
    """A further condition of a purge and its parameters; nothing for all groups."""
    if group is None:
        return "", ()
    return f"AND consumer_group = {placeholder} ", (group,)


def autocommit_error() -> AutocommitError:
    """The error for a connection on which nothing can be rolled back."""
    return AutocommitError(
        "the inbox's connection commits every statement by itself; "
        "remove isolation_level='AUTOCOMMIT' from its engine"
    )
