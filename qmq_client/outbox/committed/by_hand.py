"""What a person does to all chosen rows at once, in short transactions, and with an end.

Rows come back while others are still being changed: what is retried may be parked anew by the next
sweep. So rows are gone through once, by their numbers, up to the last that was there at the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import sqlalchemy as sa

from qmq_client.outbox.committed.deletes import chunks
from qmq_client.outbox.database.own_connections import OwnConnections

#: Rows of one transaction.
CHANGED_ROWS_MAX: Final = 10_000


def change_by_hand(
    own: OwnConnections,
    change: sa.Update | sa.Delete,
    conditions: Sequence[sa.ColumnElement[bool]],
    *,
    state: int,
    rows_max: int = CHANGED_ROWS_MAX,
) -> int:
    """Change the rows in `state` that fulfil these conditions, `rows_max` at a time; how many.

    Requires: `change` names the state, and conditions of its own if it has any; somebody may have
    had a row between its choice and its change.
    """
    outbox: Any = change.table
    number, changed = outbox.c.id, 0
    chosen = sa.select(number).where(outbox.c.state == state, *conditions)
    greatest = chosen.with_only_columns(sa.func.max(number))
    passed, last = 0, own.read(lambda connection: connection.scalar(greatest)) or 0
    while passed < last:
        ahead = chosen.where(number > passed, number <= last).order_by(number).limit(rows_max)

        def step(
            connection: sa.Connection, ahead: sa.Select[Any] = ahead
        ) -> tuple[Sequence[int], int]:
            numbers = connection.scalars(ahead).all()
            return numbers, sum(
                connection.execute(change.where(number.in_(some))).rowcount
                for some in chunks(numbers)
            )

        numbers, count = own.write(step)
        changed += count
        passed = numbers[-1] if numbers else last
    return changed
