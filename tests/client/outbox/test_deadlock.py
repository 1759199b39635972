"""A transaction that was undone to break a deadlock is done again; nothing else is."""

from __future__ import annotations

import psycopg
import pymysql
import pytest
import sqlalchemy as sa

from qmq_client.outbox.database.deadlock import TRIES_MAX, repeat_when_undone

DEADLOCKS = {
    "mysql": pymysql.err.OperationalError(1213, "Deadlock found"),
    "postgresql": psycopg.errors.DeadlockDetected("deadlock detected"),
    "serialization": psycopg.errors.SerializationFailure("could not serialize"),
}


class Transaction:
    """Fails so often, and then returns 7."""

    def __init__(self, origin: Exception, failures: int) -> None:
        self.tries = 0
        self._error = sa.exc.OperationalError("UPDATE", None, origin)
        self._failures = failures

    def __call__(self) -> int:
        self.tries += 1
        if self.tries <= self._failures:
            raise self._error
        return 7


@pytest.mark.parametrize("kind", DEADLOCKS)
def test_a_transaction_that_a_deadlock_undid_is_repeated(kind: str) -> None:
    transaction = Transaction(DEADLOCKS[kind], failures=TRIES_MAX - 1)
    assert repeat_when_undone(transaction) == 7
    assert transaction.tries == TRIES_MAX


def test_W8_deadlocks_without_end_are_an_error_in_the_end() -> None:
    transaction = Transaction(DEADLOCKS["mysql"], failures=100)
    with pytest.raises(sa.exc.OperationalError):
        repeat_when_undone(transaction)
    assert transaction.tries == TRIES_MAX


def test_other_errors_are_not_repeated() -> None:
    transaction = Transaction(pymysql.err.OperationalError(1205, "Lock wait timeout"), failures=1)
    with pytest.raises(sa.exc.OperationalError):
        repeat_when_undone(transaction)
    assert transaction.tries == 1
