"""Repeats a transaction that the database undid to break a deadlock.

On MySQL and MariaDB a claim and another process's settlement may lock an index and its rows in
opposite order. Both are short, complete transactions that name their token, so the one that was
undone is simply repeated. Otherwise its rows would wait for the end of a lease, and be sent twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import sqlalchemy as sa

from qmq_client.outbox.database.dialect import error_code

#: After each one another transaction succeeded, so this many in a row are not a coincidence.
TRIES_MAX: Final = 5
#: MySQL: deadlock, and the same within a batch of statements. PostgreSQL: deadlock, serialization failure.
_DEADLOCKS: Final = (1213, 1614, "40P01", "40001")
_Result = TypeVar("_Result")


def repeat_when_undone(transaction: Callable[[], _Result]) -> _Result:
    """Run a complete transaction, and repeat it if it was undone to break a deadlock.

    Requires: it leaves nothing behind when it fails.
    """
    for _ in range(TRIES_MAX - 1):
        try:
            return transaction()
        except sa.exc.DBAPIError as error:
            if not _is_deadlock(error):
                raise
    return transaction()


def _is_deadlock(error: sa.exc.DBAPIError) -> bool:
    return error_code(error.orig) in _DEADLOCKS
