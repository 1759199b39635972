"""Queries the unsent rows of ordering keys, in commit order.

The query runs before each batch with ordered rows, so it must be cheap if few rows wait, and a key
with very many waiting rows must not hide those of another. Without an ORDER BY every database finds
the keys by the index `(ordering_key, id)`; with one and a limit, some prefer to walk through the
whole table by its number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

import sqlalchemy as sa

from qmq_client.outbox.database.own_connections import OwnConnections
from qmq_client.outbox.table import AS_NAMED, LIVE, ORDER_LOCKS, PARKED

#: Rows that one query may read; a key with more is queried alone, and only its first rows are read.
WAITING_ROWS_MAX: Final = 10_000
_PAIRS_PER_QUERY_MAX: Final = 250

_Pair = tuple[str, str]


def waiting_ids(
    connection: sa.Connection, outbox: sa.Table, pairs: Sequence[_Pair]
) -> dict[_Pair, list[bytes]]:
    """For each subject and ordering key, the message ids of its live and parked rows, by row id.

    A list may be cut short if very many rows wait; ids not in it come later than those in it.
    """
    waiting: dict[_Pair, list[bytes]] = {pair: [] for pair in pairs}
    groups = deque(_groups(list(waiting)))
    while groups:
        group = groups.popleft()
        if len(group) == 1:
            waiting[group[0]] = _first_of(connection, outbox, group[0])
            continue
        found = _all_of(connection, outbox, group)
        if found is None:
            middle = len(group) // 2
            groups += (group[:middle], group[middle:])
            continue
        for _, subject, key, message_id in sorted(found):
            if (subject, key) in waiting:
                waiting[subject, key].append(bytes(message_id))
    return waiting


def _groups(pairs: list[_Pair]) -> Iterator[list[_Pair]]:
    for first in range(0, len(pairs), _PAIRS_PER_QUERY_MAX):
        yield pairs[first : first + _PAIRS_PER_QUERY_MAX]


def _all_of(
    connection: sa.Connection, outbox: sa.Table, pairs: list[_Pair]
) -> list[tuple[Any, ...]] | None:
    """Row id, subject, key and message id of the rows of these pairs; None if there are too many.

    Matches every subject with every key: the caller picks the requested pairs.
    """
    columns = outbox.c
    query = (
        sa.select(columns.id, columns.subject, columns.ordering_key, columns.message_id)
        .where(
            columns.ordering_key.in_({key for _, key in pairs}),
            columns.subject.in_({subject for subject, _ in pairs}),
            columns.state.in_((LIVE, PARKED)),
        )
        .limit(WAITING_ROWS_MAX + 1)
    )
    found = [(id_, *rest) for id_, *rest in connection.execute(query)]
    return None if len(found) > WAITING_ROWS_MAX else found


def _first_of(connection: sa.Connection, outbox: sa.Table, pair: _Pair) -> list[bytes]:
    columns = outbox.c
    query = (
        sa.select(columns.message_id)
        .where(
            columns.ordering_key == pair[1],
            columns.subject == pair[0],
            columns.state.in_((LIVE, PARKED)),
        )
        .order_by(columns.id)
        .limit(WAITING_ROWS_MAX)
    )
    return [bytes(message_id) for message_id in connection.scalars(query)]


def fill_order_locks(own: OwnConnections, order_lock: sa.Table) -> None:
    """Create the missing rows of the lock table; any number of processes at once."""
    missing = missing_locks(own.read(lambda connection: _locks(connection, order_lock)))
    if missing:
        rows = [{"slot": each} for each in missing]
        # A row that another process inserts at the same moment is not an error.
        with suppress(sa.exc.IntegrityError):
            own.write(lambda connection: connection.execute(sa.insert(order_lock), rows))


def has_order_locks(connection: sa.Connection, order_lock: sa.Table) -> bool:
    """Whether the lock table has all rows."""
    return not missing_locks(_locks(connection, order_lock))


def missing_locks(found: set[int]) -> list[int]:
    """The slots without a row, given those that have one."""
    return sorted(set(range(ORDER_LOCKS)).difference(found))


def _locks(connection: sa.Connection, order_lock: sa.Table) -> set[int]:
    return set(connection.scalars(sa.select(order_lock.c.slot), execution_options=AS_NAMED))
