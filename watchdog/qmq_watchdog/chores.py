"""Retention: deletes expired rows that were kept for an audit, and expired ids of the inbox.

Small transactions, a bounded number of them at a time. Any number of watchdogs may do this
together; at worst one of them deletes nothing. So nobody has to be elected for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from qmq_client.inbox.dialect import inbox_dialect
from qmq_client.outbox.database.deadlock import repeat_when_undone
from qmq_watchdog.databases import Database

ROWS_PER_TRANSACTION: Final = 500
#: Transactions of one kind in one pass; the rest waits for the next.
_TRANSACTIONS_MAX: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoreCounts:
    """What was deleted."""

    sent_purged: int = 0
    inbox_purged: int = 0
    #: Whether more may be left.
    is_cut_short: bool = False


def do_chores(database: Database, is_stopped: Callable[[], bool] = lambda: False) -> ChoreCounts:
    """Delete what has expired in this database; SQLAlchemy's errors pass through."""

    def purge_sent() -> int:
        return database.store.purge_sent(limit=ROWS_PER_TRANSACTION)

    # Always checked: the setting may have been removed while rows were already kept
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
        count = repeat_when_undone(batch)  # a consumer may be noting the same ids at the same time
        yield count
        if count < ROWS_PER_TRANSACTION or is_stopped():
            return


def _purge_inbox(database: Database) -> int:
    """One transaction: the oldest ids of all consumer groups."""
    older_than_ms = database.keep_inbox_ms
    assert older_than_ms is not None, "asked by the caller"
    inbox = inbox_dialect(database.engine, database.inbox)
    return database.store.write(
        lambda connection: inbox.purge(
            connection, None, older_than_ms=older_than_ms, limit=ROWS_PER_TRANSACTION
        )
    )
