"""Which rows a person means, and which columns are read of each; parts of statements for `store.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from qmq_client.outbox.row import ROW_FILTER_IDS_MAX, RowFilter


def stored_rows(outbox: sa.Table) -> sa.Select[Any]:
    """The columns of `StoredRow`; within each state the rows that are due first come first."""
    columns = outbox.c
    return sa.select(
        # As bytes, so that a damaged one does not hide the others.
        sa.cast(columns.message_id, sa.LargeBinary()).label("message_id"),
        columns.subject,
        columns.ordering_key,
        columns.state,
        columns.attempts,
        columns.last_error,
        columns.created_at_ms,
        columns.due_at_ms,
        columns.token.is_not(None).label("is_owned"),
        sa.func.length(columns.record).label("record_bytes"),
    ).order_by(columns.state, columns.due_at_ms)


def conditions(
    outbox: sa.Table,
    now_ms: sa.ColumnElement[int],
    chosen: RowFilter,
    *,
    state: int | None,
    is_due: bool,
) -> Iterator[sa.ColumnElement[bool]]:
    """Everything that a row must fulfil; any state if `state` is None."""
    columns = outbox.c
    if state is not None:
        yield columns.state == state
    if is_due:
        yield columns.due_at_ms <= now_ms
    if chosen.message_ids is not None:
        yield columns.message_id.in_(chosen.message_ids[:ROW_FILTER_IDS_MAX])
    if chosen.subject:
        yield columns.subject == chosen.subject
    if chosen.error:
        yield columns.last_error.contains(chosen.error, autoescape=True)
    if chosen.older_than_ms:
        yield columns.created_at_ms <= now_ms - chosen.older_than_ms
