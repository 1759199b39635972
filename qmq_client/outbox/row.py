"""An outbox row for the code that publishes it, and the outcome of a batch of rows.

Values only; the statements that read and write them are in `store.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from qmq_client.wire.message_id import format_message_id


# One is made for each message; a struct takes a fifth of a dataclass's time.
class OutboxRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the outbox whose message is to be sent."""

    #: 16 bytes.
    message_id: bytes
    subject: str
    ordering_key: str | None
    #: The finished wire record; never encoded again.
    record: bytes
    #: Whether the id is derived from a dedupe key, so that the row may already exist as the same message. Set on rows
    #: that are sent, not on rows that are read.
    is_repeatable: bool = False
    #: Attempts that failed so far.
    attempts: int = 0
    #: Row number of a claimed row: a way to find it, not its identity.
    number: int | None = None


_NAMED_IDS_MAX: Final = 5


def ids_text(rows: Sequence[OutboxRow]) -> str:
    """The ids of messages as a text for errors and the log."""
    shown = ", ".join(format_message_id(row.message_id) for row in rows[:_NAMED_IDS_MAX])
    more = len(rows) - _NAMED_IDS_MAX
    return f"message {shown}{f' and {more} more' if more > 0 else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRow:
    """A committed row, as found before the send."""

    message_id: bytes
    #: LIVE, PARKED or SENT of `table.py`.
    state: int
    #: The owner's token; None without an owner.
    token: bytes | None
    #: Whether other processes may claim it by now.
    is_due: bool
    #: The last error; empty if it was not tried.
    error: str
    #: None if it was not requested.
    record: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRow:
    """One row for a listing, without the record."""

    message_id: bytes
    subject: str
    ordering_key: str | None
    #: LIVE, PARKED or SENT of `table.py`.
    state: int
    attempts: int
    last_error: str | None
    created_at_ms: int
    due_at_ms: int
    #: Whether it has a token.
    is_owned: bool
    record_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFilter:
    """A choice of rows: those that fulfil every condition given; all rows without one."""

    #: None for any; at most `ROW_FILTER_IDS_MAX`.
    message_ids: Sequence[bytes] | None = None
    #: Exactly this subject; empty for any.
    subject: str = ""
    #: Text that the row's last error contains; empty for any, also for none.
    error: str = ""
    #: Rows that were stored longer ago than this, by the database's clock.
    older_than_ms: int = 0


ALL_ROWS: Final = RowFilter()
#: Ids in one filter: far below every database's limit of parameters.
ROW_FILTER_IDS_MAX: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxCounts:
    """Numbers of rows; counted up to a limit, if one was given."""

    #: Not yet accepted, due or not.
    live: int
    #: Live and free to be claimed by anyone.
    due: int
    parked: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRow:
    """This row is to be tried again after `delay_ms`."""

    message_id: bytes
    delay_ms: int
    error: str
    #: Whether the attempt counts; it does not if no broker was reachable.
    is_attempt: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ParkedRow:
    """This row is to be parked for a person."""

    message_id: bytes
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOutcome:
    """The outcome of each row of a batch: it is in exactly one of the three tuples."""

    #: Accepted rows: an answer named their frame.
    sent: tuple[bytes, ...] = ()
    failed: tuple[FailedRow, ...] = ()
    parked: tuple[ParkedRow, ...] = ()
    #: The broker gave no answer, or accepts nothing now; further requests would fail in the same way.
    unreachable: bool = False
    #: The pause that the broker requested; 0 if none.
    retry_after_s: float = 0.0
    #: Requests that were made for this batch.
    requests: int = 0
