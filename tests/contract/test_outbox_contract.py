"""What every outbox promises, asked of each of them: the databases, and the double for users' tests.

First of transactions, then of the rows that owners claim and settle.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.errors import AutocommitError, NoTransactionError
from qmq_client.message import Message
from qmq_client.outbox.row import BatchOutcome, FailedRow, ParkedRow
from qmq_client.outbox.table import DEFAULT_TABLES
from qmq_client.transactional import transaction, transactional
from qmq_client.wire.errors import InvalidMessageError
from qmq_watchdog.databases import Database
from tests.conftest import MakeDatabase
from tests.contract.outboxes import BUSINESS, KINDS, SUBJECT, Outbox, an_outbox
from tests.watchdog.rows import put_rows

ONE: Final = b"one owner's toke"
OTHER: Final = b"the other's toke"
LEASE_MS: Final = 60_000
ROWS: Final = DEFAULT_TABLES.outbox
NOTHING: Final[tuple[list[str], list[str]]] = ([], [])


@pytest.fixture(params=KINDS)
def outbox(request: pytest.FixtureRequest, make_database: MakeDatabase) -> Iterator[Outbox]:
    with an_outbox(request.param, make_database) as made:
        yield made


class AbandonError(Exception):
    """The application's own."""


# -- transactions


def test_S1_S2_a_message_goes_with_its_transaction(outbox: Outbox) -> None:
    with Session(outbox.engine) as session:
        outbox.write("committed", session)
        assert outbox.producer.flush().accepted == 0
        session.commit()
        outbox.write("rolled back", session)
        session.rollback()
        outbox.write("closed", session)
    assert outbox.outcome() == (["committed"], ["committed"])


def test_S4_an_error_in_the_block_takes_the_message_along(outbox: Outbox) -> None:

    def in_a_session() -> None:
        with Session(outbox.engine) as session, session.begin():
            outbox.write("a", session)
            raise AbandonError

    def in_core() -> None:
        with transaction(outbox.engine) as connection:
            outbox.write("b", connection)
            raise AbandonError

    for work in (in_a_session, in_core):
        with pytest.raises(AbandonError):
            work()
    assert outbox.outcome() == NOTHING


def test_S3_a_savepoint_keeps_or_drops_what_was_sent_inside_it(outbox: Outbox) -> None:
    with Session(outbox.engine) as session, session.begin():
        outbox.write("outside", session)
        with session.begin_nested():
            outbox.write("released", session)
            inner = session.begin_nested()
            outbox.write("undone inside", session)
            inner.rollback()
        undone = session.begin_nested()
        with session.begin_nested():
            outbox.write("released in what is undone", session)
        undone.rollback()
        session.execute(sa.text("SAVEPOINT by_text"))
        outbox.write("undone by text", session)
        session.execute(sa.text("ROLLBACK TO SAVEPOINT by_text"))
    assert outbox.outcome() == (["outside", "released"], ["outside", "released"])


def test_S3_a_session_that_has_joined_a_transaction_commits_nothing_by_itself(
    outbox: Outbox,
) -> None:
    for is_kept in (False, True):
        with outbox.engine.connect() as connection:
            outer = connection.begin()
            # SQLite's driver begins with the first change; a savepoint before it would commit by itself.
            connection.execute(sa.update(BUSINESS).values(label=BUSINESS.c.label))
            with Session(connection, join_transaction_mode="create_savepoint") as session:
                outbox.write(f"joined {is_kept}", session)
                session.commit()
            assert outbox.producer.flush().accepted == 0
            outer.commit() if is_kept else outer.rollback()
    assert outbox.outcome() == (["joined True"], ["joined True"])


def test_S1_a_send_finds_the_transaction_around_it(outbox: Outbox) -> None:
    @transactional(outbox.producer)
    def place(label: str) -> None:
        outbox.producer.send(Message(SUBJECT, label))

    place("decorated")
    with transaction(outbox.engine):
        outbox.producer.send(Message(SUBJECT, "core"))
    assert outbox.outcome() == ([], ["core", "decorated"])


def test_S8_a_send_without_a_transaction_is_refused_and_send_now_has_one(outbox: Outbox) -> None:
    with pytest.raises(NoTransactionError):
        outbox.producer.send(Message(SUBJECT, "lost"))
    with outbox.engine.connect() as connection:
        with pytest.raises(NoTransactionError):
            outbox.producer.send(Message(SUBJECT, "lost"), session=connection)
        assert not connection.in_transaction()
    outbox.producer.send_now(Message(SUBJECT, "now"))
    assert outbox.outcome() == ([], ["now"])


def test_S1_a_connection_that_commits_each_statement_is_refused(outbox: Outbox) -> None:
    engine = outbox.engine.execution_options(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sa.text("SELECT 1"))
        with pytest.raises(AutocommitError):
            outbox.producer.send(Message(SUBJECT, "lost"), session=connection)
    assert outbox.outcome() == NOTHING


def test_S7_of_several_messages_all_are_sent_or_none(outbox: Outbox) -> None:
    bad = Message(SUBJECT, {"set": object()})
    with Session(outbox.engine) as session, session.begin():
        with pytest.raises(InvalidMessageError):
            outbox.producer.send_many([Message(SUBJECT, "good"), bad], session=session)
        outbox.producer.send_many([Message(SUBJECT, f"{i}") for i in range(250)], session=session)
    assert outbox.outcome() == ([], sorted(f"{i}" for i in range(250)))


def test_S6_a_dedupe_key_makes_one_message_of_a_transaction_run_twice(outbox: Outbox) -> None:
    for _ in range(2):
        with Session(outbox.engine) as session, session.begin():
            paid = Message(SUBJECT, "paid", dedupe_key="order-17-paid")
            outbox.producer.send(paid, session=session)
        assert outbox.producer.flush().is_done
    assert outbox.outcome() == ([], ["paid"])


def test_a_message_is_taken_back_in_its_transaction_as_far_as_that_goes(outbox: Outbox) -> None:
    with Session(outbox.engine) as session, session.begin():
        outbox.write("kept", session)
        for label in ("taken back", "not after all"):
            message_id = outbox.write(label, session)
            savepoint = session.begin_nested()
            assert outbox.producer.cancel(message_id, session=session)
            savepoint.commit() if label == "taken back" else savepoint.rollback()
    rows, messages = outbox.outcome()
    assert len(rows) == 3
    assert messages == ["kept", "not after all"]


# -- rows


def left_behind(outbox: Outbox, count: int = 1, **options: Any) -> list[bytes]:
    """Rows of a process that died; due unless `due_in_ms` says otherwise."""
    return put_rows(
        Database(name="shop", store=outbox.store, engine=outbox.engine), count, **options
    )


def claimed(outbox: Outbox, token: bytes, limit: int = 100) -> list[bytes]:
    rows = outbox.store.claim(token=token, limit=limit, lease_ms=LEASE_MS)
    return [row.message_id for row in rows]


def stored(outbox: Outbox, *columns: sa.Column[Any]) -> list[Any]:
    with outbox.engine.connect() as connection:
        return list(connection.execute(sa.select(*columns).order_by(ROWS.c.id)).all())


def end_leases(outbox: Outbox) -> None:
    with outbox.engine.begin() as connection:
        connection.execute(sa.update(ROWS).values(due_at_ms=0))


def test_W1_W9_rows_are_claimed_when_they_are_due_in_the_order_of_their_storing(
    outbox: Outbox,
) -> None:
    ids = left_behind(outbox, 5)
    left_behind(outbox, 2, due_in_ms=LEASE_MS)
    assert claimed(outbox, ONE, limit=3) == ids[:3]
    assert claimed(outbox, ONE) == ids[3:]
    assert claimed(outbox, ONE) == []


@pytest.mark.parametrize("limit", [5, 100])
def test_W1_a_claim_ends_with_the_row_that_makes_its_records_large_enough(
    outbox: Outbox, limit: int
) -> None:
    """Large ones among small ones: no limit of rows says how much memory they take."""
    small = left_behind(outbox, 2, due_in_ms=-4_000)
    large = left_behind(outbox, 3, due_in_ms=-3_000, body=bytes(50_000))
    last = left_behind(outbox, 2, due_in_ms=-2_000)

    def claim(token: bytes) -> list[tuple[bytes, int]]:
        rows = outbox.store.claim(token=token, limit=limit, lease_ms=LEASE_MS, bytes_max=60_000)
        return [(row.message_id, len(row.record) // 10_000) for row in rows]

    assert claim(ONE) == [(id_, 0) for id_ in small] + [(id_, 5) for id_ in large[:2]]
    assert claim(OTHER) == [(large[2], 5), *((id_, 0) for id_ in last)]
    assert claim(OTHER) == []


def test_W1_a_claim_whose_records_are_exactly_as_large_as_asked_for_ends_there(
    outbox: Outbox,
) -> None:
    ids = left_behind(outbox, 4, body=bytes(50_000))
    (first,) = outbox.store.claim(token=ONE, limit=1, lease_ms=LEASE_MS)
    end_leases(outbox)
    rows = outbox.store.claim(
        token=OTHER, limit=100, lease_ms=LEASE_MS, bytes_max=2 * len(first.record)
    )
    assert len(rows) == 2
    assert {row.message_id for row in rows} <= set(ids)


def test_O3_W2_a_row_has_one_owner_until_its_lease_ends_and_a_late_owner_changes_nothing(
    outbox: Outbox,
) -> None:
    ids = left_behind(outbox, 3)
    assert claimed(outbox, ONE) == ids
    assert claimed(outbox, OTHER) == []
    end_leases(outbox)
    assert claimed(outbox, OTHER, limit=2) == ids[:2]
    assert outbox.store.delete_sent(ids, token=ONE) == 1, "what nobody has taken is still its own"
    late = BatchOutcome(
        failed=(FailedRow(message_id=ids[0], delay_ms=0, error="late"),),
        parked=(ParkedRow(message_id=ids[1], error="late"),),
    )
    assert outbox.store.settle(late, token=ONE) == 0
    assert outbox.store.delete_sent(ids, token=ONE, keep_ms=LEASE_MS) == 0
    assert outbox.store.reclaim(ids, token=ONE, lease_ms=LEASE_MS) == set()
    assert outbox.store.reclaim(ids, token=OTHER, lease_ms=LEASE_MS) == set(ids[:2])
    assert outbox.store.settle(BatchOutcome(sent=tuple(ids)), token=OTHER) == 2
    assert stored(outbox, ROWS.c.id) == []


def test_O6_O7_rows_are_given_back_for_later_or_parked_each_by_itself(outbox: Outbox) -> None:
    ids = left_behind(outbox, 4)
    assert claimed(outbox, ONE) == ids
    outcome = BatchOutcome(
        sent=(ids[0],),
        failed=(
            FailedRow(message_id=ids[1], delay_ms=0, error="again"),
            FailedRow(message_id=ids[2], delay_ms=LEASE_MS, error="not now", is_attempt=False),
        ),
        parked=(ParkedRow(message_id=ids[3], error="for a person"),),
    )
    assert outbox.store.settle(outcome, token=ONE) == 4
    assert stored(outbox, ROWS.c.attempts, ROWS.c.last_error, ROWS.c.token) == [
        (1, "again", None),
        (0, "not now", None),
        (1, "for a person", None),
    ]
    assert claimed(outbox, OTHER) == [ids[1]]
    counts = outbox.store.counts()
    assert (counts.live, counts.parked) == (2, 1)
    assert outbox.store.retry() == 1
    assert claimed(outbox, OTHER) == [ids[3]]


def test_rows_that_are_kept_for_an_audit_are_claimed_by_nobody_and_purged_in_time(
    outbox: Outbox,
) -> None:
    ids = left_behind(outbox, 2)
    assert claimed(outbox, ONE) == ids
    assert outbox.store.delete_sent(ids[:1], token=ONE, keep_ms=0) == 1
    assert outbox.store.delete_sent(ids[1:], token=ONE, keep_ms=LEASE_MS) == 1
    assert claimed(outbox, OTHER) == []
    assert outbox.store.oldest_unsent_age_ms() is None
    assert outbox.store.purge_sent() == 1
    assert stored(outbox, ROWS.c.message_id) == [(ids[1],)]


def test_W4_the_clock_counts_milliseconds_of_the_right_time_and_ages_begin_at_the_insert(
    outbox: Outbox,
) -> None:
    with outbox.engine.connect() as connection:
        now_ms = connection.scalar(sa.select(outbox.store.now_ms))
    assert isinstance(now_ms, int)
    assert abs(now_ms - SYSTEM_CLOCK.now_ms()) < LEASE_MS
    assert outbox.store.oldest_unsent_age_ms() is None
    left_behind(outbox)
    age_ms = outbox.store.oldest_unsent_age_ms()
    assert age_ms is not None
    assert 0 <= age_ms < LEASE_MS


def test_the_age_of_the_oldest_is_looked_for_among_the_first_thousand_that_fall_due(
    outbox: Outbox,
) -> None:
    """So it costs the same however many wait."""
    (old,) = left_behind(outbox, due_in_ms=2 * LEASE_MS)
    hour_ms = 3_600_000
    with outbox.engine.begin() as connection:
        made = ROWS.c.created_at_ms - hour_ms
        connection.execute(sa.update(ROWS).values(created_at_ms=made))
    first, *_ = left_behind(outbox, 1_000, due_in_ms=LEASE_MS)
    age_ms = outbox.store.oldest_unsent_age_ms()
    assert age_ms is not None
    assert age_ms < hour_ms
    with outbox.engine.begin() as connection:
        connection.execute(sa.delete(ROWS).where(ROWS.c.message_id == first))
    age_ms = outbox.store.oldest_unsent_age_ms()
    assert age_ms is not None
    assert age_ms >= hour_ms
    assert stored(outbox, ROWS.c.message_id)[0] == (old,)


def test_the_tables_are_looked_at_and_are_as_they_should_be(outbox: Outbox) -> None:
    outbox.store.check_schema()
