"""Deletes a row that is not sent yet, in the application's transaction."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

from qmq_client.outbox.database.dialect import dialect_of
from qmq_client.outbox.table import AS_NAMED, LIVE, PARKED

#: How long after a row's due time its owner's last request may still arrive: twice the longest wait for an answer.
UNDER_WAY_MS: Final = 60_000


def delete_unsent(
    connection: sa.Connection,
    outbox: sa.Table,
    message_id: bytes,
    *,
    own: bytes | None,
    is_at_broker: bool,
) -> bool:
    """Delete this row unless a process may be sending it; returns whether it was deleted.

    `own`: the token it was written with if that was in this transaction, so that no other process has seen it.
    With `is_at_broker` it deletes any row: an owner that is still sending finds its row gone, like
    after an expired claim.
    """
    columns = outbox.c
    now_ms = sa.literal_column(dialect_of(connection.engine).now_ms, sa.BigInteger())
    is_left = columns.due_at_ms <= now_ms - UNDER_WAY_MS
    is_free = sa.true() if is_at_broker else columns.token.is_(None) | is_left
    deleted = connection.execute(
        sa.delete(outbox).where(
            columns.message_id == message_id,
            columns.state.in_((LIVE, PARKED)),
            is_free if own is None else columns.token == own,
        ),
        execution_options=AS_NAMED,
    )
    return deleted.rowcount > 0
