"""The criteria and the result of a claim, independent of the database.

There are two claims: of due rows, oldest due first; and of the followers of an ordering key, in
commit order, when the rows before them have just been sent. Followers were returned with a later
due time, so they are claimed before it. They have no owner, so their token is empty.

A claim ends with the row at which its records reach the requested size: the sizes are unknown
before the rows are read, and a thousand records may not fit in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, NamedTuple

from qmq_client.outbox.row import OutboxRow
from qmq_client.outbox.table import LIVE

#: Total bytes of records in one claim; its last row may exceed that.
CLAIM_BYTES_MAX: Final = 32 * 1024 * 1024
row_id: Final = itemgetter(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimTerms:
    """The size and duration of a claim."""

    token: bytes
    #: Rows; fewer if their records reach `bytes_max`.
    limit: int
    lease_ms: int
    #: Ordering keys whose followers are wanted; if empty, rows that are due.
    keys: Sequence[str] = ()
    bytes_max: int = CLAIM_BYTES_MAX


class Wanted(NamedTuple):
    """The WHERE of a claim, its parameters, and the column that orders the rows."""

    where: str
    parameters: tuple[str, ...]
    order: str

    @property
    def text(self) -> str:
        """The text after WHERE."""
        return f"{self.where} ORDER BY {self.order}"

    def fitting(self, sized_rows: str, bytes_max: int) -> str:
        """A query for the ids of rows that fit, from a query of `id`, `due_at_ms`, `record_bytes`."""
        return (
            "SELECT id FROM (SELECT id, sum(record_bytes) OVER "
            f"(ORDER BY {self.order} ROWS UNBOUNDED PRECEDING) - record_bytes AS before_bytes "
            f"FROM {sized_rows} AS sized) AS summed WHERE before_bytes < {bytes_max:d}"
        )


def wanted_rows(now_ms: str, keys: Sequence[str], places: Iterator[str]) -> Wanted:
    """Rows that are due or, with `keys`, rows of these ordering keys without an owner."""
    if not keys:
        return Wanted(f"state = {LIVE} AND due_at_ms <= {now_ms}", (), "due_at_ms")
    some = ", ".join(next(places) for _ in keys)
    where = f"state = {LIVE} AND token IS NULL AND ordering_key IN ({some})"
    return Wanted(where, tuple(keys), "id")


def as_outbox_rows(found: Sequence[Any]) -> list[OutboxRow]:
    """Claimed rows in the order in which they were stored."""
    return [
        OutboxRow(
            message_id=bytes(message_id),  # some drivers return a view
            subject=subject,
            ordering_key=ordering_key,
            record=bytes(record),
            attempts=attempts,
            number=number,
        )
        for number, message_id, subject, ordering_key, record, attempts in sorted(found, key=row_id)
    ]
