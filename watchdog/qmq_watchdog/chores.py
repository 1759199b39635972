"""Retention: rows that were kept for an audit, and ids of the inbox, whose time is over.

Small transactions, a bounded number of them at a time, each row by its own id: any number of
watchdogs may do this at once, at worst one deletes nothing. So nobody has to be elected for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import sqlalchemy as sa

from qmq_client.outbox.relay.deletes import delete_by
from qmq_watchdog.databases import Database

ROWS_PER_TRANSACTION: Final = 500
#: Transactions of one kind in one go; what is left waits for the next.
_TRANSACTIONS_MAX: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoreCounts:
    """What was deleted."""

    sent_purged: int = 0
    inbox_purged: int = 0
    #: More may be left.
    is_cut_short: bool = False


def do_chores(database: Database, is_stopped: Callable[[], bool] = lambda: False) -> ChoreCounts:
    """Delete what is over in this database; SQLAlchemy's errors pass through."""

    def purge_sent() -> int:
        return database.store.purge_sent(limit=ROWS_PER_TRANSACTION)

    # Always looked for: the setting may have been taken away when rows were kept already.
    sent = list(_batches(purge_sent, is_stopped))
    ids: list[int] = []
    if database.keep_inbox_ms is not None:
        ids = list(_batches(lambda: _purge_inbox(database), is_stopped))
    return ChoreCounts(
        sent_purged=sum(sent),
        inbox_purged=sum(ids),
        is_cut_short=any(each[-1:] == [ROWS_PER_TRANSACTION] for each in (sent, ids)),
    )


def _batches(batch: Callable[[], int], is_stopped: Callable[[], bool]) -> Iterator[int]:
    for _ in range(_TRANSACTIONS_MAX):
        count = batch()
        yield count
        if count < ROWS_PER_TRANSACTION or is_stopped():
            return


def _purge_inbox(database: Database) -> int:
    """One transaction: the oldest ids of all consumer groups, by the index on their time."""
    columns = database.inbox.c
    with database.store.write() as connection:
        is_over = columns.received_at_ms <= database.store.now_ms - database.keep_inbox_ms
        found = connection.execute(
            sa.select(columns.consumer_group, columns.message_id)
            .where(is_over)
            .order_by(columns.received_at_ms)
            .limit(ROWS_PER_TRANSACTION)
        ).all()
        return sum(
            delete_by(
                connection,
                columns.message_id,
                [row.message_id for row in rows],
                where={"consumer_group": group},
            )
            for group, rows in groupby(sorted(found), lambda row: row.consumer_group)
        )
