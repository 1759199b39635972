"""A publisher's delete waits for no row that a transaction of the application has not committed."""

from __future__ import annotations

import os
from functools import partial

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from qmq_client.outbox.committed.deletes import delete_by
from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.outbox.row import BatchOutcome
from qmq_client.outbox.table import DEFAULT_TABLES, create_tables
from tests.services.databases import Database

OUTBOX = DEFAULT_TABLES.outbox
INSERT = sa.insert(OUTBOX).values(
    subject="orders", record=b"", state=0, due_at_ms=2**50, attempts=0, created_at_ms=0
)


@pytest.mark.parametrize("count", [1, 5, 50, 600])
def test_S5_sent_rows_are_deleted_while_another_is_not_committed(
    a_server_database: Database, count: int
) -> None:
    """With the half of them, as optimizers then find the whole table the shorter way."""
    engine = a_server_database.engine()
    create_tables(engine)
    token = os.urandom(16)
    ids = [os.urandom(16) for _ in range(2 * count)]
    with engine.begin() as connection:
        rows = [{"message_id": one, "token": token} for one in ids]
        connection.execute(INSERT, rows)
    store = OutboxStore(engine)
    with engine.connect() as business:
        business.execute(INSERT, {"message_id": os.urandom(16), "token": token})
        assert store.delete_sent(ids[:count], token=token) == count
        assert store.delete_sent(ids[:count], token=token) == 0
        assert store.delete_sent(ids[count:], token=os.urandom(16)) == 0
        with engine.begin() as connection:
            left = connection.scalars(sa.select(OUTBOX.c.id)).all()
            assert delete_by(connection, OUTBOX.c.id, left[1:]) == count - 1
        business.rollback()
    store.close()


@pytest.mark.parametrize("is_as_claimed", [True, False])
@pytest.mark.parametrize("count", [1, 5, 50, 600])
def test_S5_claimed_rows_are_deleted_between_two_that_are_not_committed(
    a_server_database: Database, count: int, is_as_claimed: bool
) -> None:
    engine = a_server_database.engine()
    create_tables(engine)
    due = [{"message_id": os.urandom(16), "due_at_ms": 0} for _ in range(count)]
    store = OutboxStore(engine)
    token, another = os.urandom(16), os.urandom(16)
    with engine.connect() as before, engine.connect() as after:
        before.execute(INSERT, {"message_id": os.urandom(16), "token": token})
        with engine.begin() as connection:
            connection.execute(INSERT, due)
        after.execute(INSERT, {"message_id": os.urandom(16), "token": token})
        claimed = store.claim(token=token, limit=2 * count, lease_ms=60_000)
        assert len(claimed) == count
        sent = BatchOutcome(sent=tuple(row.message_id for row in claimed))
        settle = partial(store.settle, claimed=claimed if is_as_claimed else ())
        assert settle(sent, token=another) == 0
        assert settle(sent, token=token) == count
        after.rollback()
        before.rollback()
    store.close()


@pytest.mark.parametrize("tried", [390, 198], ids=["most", "half"])
def test_O2_O3_of_a_claim_exactly_the_sent_rows_are_deleted_in_whatever_pieces_they_are(
    a_server_database: Database, tried: int
) -> None:
    engine = a_server_database.engine()
    create_tables(engine)
    token = os.urandom(16)
    store = OutboxStore(engine)
    with engine.begin() as connection:
        rows = [{"message_id": os.urandom(16), "due_at_ms": 0} for _ in range(400)]
        connection.execute(INSERT, rows)
        gaps = sa.delete(OUTBOX).where(OUTBOX.c.id.in_([1, 120, 200, 202]))
        connection.execute(gaps)
    claimed = store.claim(token=token, limit=1000, lease_ms=60_000)
    taken_over, failed = claimed[150], claimed[250]
    with engine.begin() as connection:
        connection.execute(
            sa.update(OUTBOX)
            .where(OUTBOX.c.message_id == taken_over.message_id)
            .values(token=os.urandom(16))
        )
    assert len(claimed) == 396
    sent = [row.message_id for row in claimed[:tried] if row is not failed]
    outcome = BatchOutcome(sent=tuple(sent))
    assert store.settle(outcome, token=token, claimed=claimed) == len(sent) - 1
    left = {row.message_id for row in store.list_rows(limit=1000)}
    unsent = {row.message_id for row in claimed}.difference(sent)
    assert left == unsent | {taken_over.message_id}
    store.close()


def test_rows_of_a_claim_in_one_piece_are_deleted_in_as_many_statements_as_that_takes(
    a_server_database: Database,
) -> None:
    """Where a list would be cut into several: rows found one by one cost the server twice as much."""
    engine = a_server_database.engine()
    create_tables(engine)
    store = OutboxStore(engine)
    with engine.begin() as connection:
        connection.execute(
            INSERT, [{"message_id": os.urandom(16), "due_at_ms": 0} for _ in range(1_000)]
        )
    token = os.urandom(16)
    claimed = store.claim(token=token, limit=1_000, lease_ms=600_000)
    texts: list[str] = []
    event.listen(store._own.engine, "before_cursor_execute", lambda *given: texts.append(given[2]))
    sent = tuple(row.message_id for row in claimed)
    assert store.settle(BatchOutcome(sent=sent), token=token, claimed=claimed) == 1_000
    # MariaDB takes the last row alone, so that it looks at none behind it.
    deletes = len([text for text in texts if text.startswith("DELETE")])
    assert deletes <= {"postgresql": 1}.get(engine.dialect.name, 2)
    store.close()
