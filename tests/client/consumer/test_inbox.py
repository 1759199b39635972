"""Effects once: the inbox row, the business change and what is sent are one transaction."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import StaticPool

from qmq_client.consumer import Consumers, consumer
from qmq_client.errors import (
    AutocommitError,
    ConfigurationError,
    InboxTransactionError,
)
from qmq_client.inbox import Inbox
from qmq_client.message import Message
from qmq_client.outbox.table import create_tables, make_tables
from qmq_client.testing import drain
from tests.client.consumer.kit import GROUP, SUBJECT, WAIT_S, Bench
from tests.client.consumer.shop import count_of, make_engine, rows_in_inbox
from tests.services.databases import Database

SECOND = 1_000


def tallying(engine: sa.Engine, **settings: Any) -> Callable[..., Any]:
    @consumer(SUBJECT, group=GROUP, inbox=sessionmaker(engine), **settings)
    def handler(body: Any, session: Session) -> None:
        session.execute(sa.text("UPDATE tally SET n = n + 1"))

    return handler


def delivered_again(bench: Bench, consumers: Consumers) -> None:
    """Let every lease and backoff end, so that whatever is not acked comes again."""
    for _ in range(4):
        bench.clock.advance(60 * SECOND)
        drain(consumers)


def test_C5_an_effect_and_its_inbox_row_are_there_together(bench: Bench, engine: sa.Engine) -> None:
    ids = bench.put(*range(3))
    bench.drain(tallying(engine))
    assert count_of(engine) == 3
    assert rows_in_inbox(engine) == {(GROUP, bytes.fromhex(one)) for one in ids}
    assert bench.broker.lag(SUBJECT, GROUP) == 0


def test_F30_C5_a_message_whose_ack_was_lost_is_acked_again_without_its_effect(
    bench: Bench, engine: sa.Engine
) -> None:
    bench.put(1)
    consumers = bench.consumers(tallying(engine))
    member = consumers.members[0]
    member.pull_once(is_blocking=False)
    member.work_once(is_blocking=False)
    member.ledger.drain()  # the process dies with its outcomes
    again = bench.consumers(tallying(engine))
    delivered_again(bench, again)
    assert count_of(engine) == 1
    assert bench.broker.lag(SUBJECT, GROUP) == 0
    assert bench.counters(again)["duplicates"] == 1


@pytest.mark.parametrize("batch_size", [1, 100])
def test_C5_a_message_stored_twice_has_one_effect(
    bench: Bench, engine: sa.Engine, batch_size: int
) -> None:
    seen: list[Any] = []

    def handle(bodies: Any, session: Session) -> None:
        count = 1
        if isinstance(bodies, list):
            count = len(bodies)
        seen.append(bodies)
        session.execute(sa.text("UPDATE tally SET n = n + :count"), {"count": count})

    handle.__annotations__["bodies"] = int if batch_size == 1 else list[int]
    handler = consumer(SUBJECT, group=GROUP, inbox=sessionmaker(engine), batch_size=batch_size)(
        handle
    )
    message = Message(SUBJECT, 5, message_id="ab" * 16)
    bench.broker.put(message, Message(SUBJECT, 6))
    bench.broker._crc_by_id.clear()  # the dedupe window has passed
    bench.broker.put(message)
    bench.drain(handler)
    assert count_of(engine) == 2
    assert bench.broker.lag(SUBJECT, GROUP) == 0


def test_C5_two_groups_have_an_effect_each(bench: Bench, engine: sa.Engine) -> None:
    bench.put(1)
    for group in ("one", "two"):

        @consumer(SUBJECT, group=group, inbox=engine)
        def handler(body: Any, session: Session) -> None:
            session.execute(sa.text("UPDATE tally SET n = n + 1"))

        bench.drain(handler)
    assert count_of(engine) == 2


def test_C5_a_failed_handler_leaves_neither_effect_nor_inbox_row(
    bench: Bench, engine: sa.Engine
) -> None:
    calls: list[int] = []

    @consumer(SUBJECT, group=GROUP, inbox=sessionmaker(engine))
    def handler(body: Any, session: Session) -> None:
        session.execute(sa.text("UPDATE tally SET n = n + 1"))
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("no")

    bench.put(1)
    consumers = bench.consumers(handler)
    drain(consumers)
    assert (count_of(engine), rows_in_inbox(engine)) == (0, set())
    delivered_again(bench, consumers)
    assert count_of(engine) == 1
    assert len(calls) == 2


def test_C2_a_message_is_not_acked_when_its_commit_fails(bench: Bench, engine: sa.Engine) -> None:
    calls: list[int] = []

    def fail_first(_: Any) -> None:
        if len(calls) == 1:
            raise sa.exc.OperationalError("COMMIT", {}, ValueError("disk full"))

    factory = sessionmaker(engine)
    sa.event.listen(factory, "before_commit", fail_first)

    @consumer(SUBJECT, group=GROUP, inbox=factory)
    def handler(body: Any, session: Session) -> None:
        session.execute(sa.text("UPDATE tally SET n = n + 1"))
        calls.append(1)

    bench.put(1)
    consumers = bench.consumers(handler)
    drain(consumers)
    assert count_of(engine) == 0
    assert bench.broker.lag(SUBJECT, GROUP) == 1
    delivered_again(bench, consumers)
    assert count_of(engine) == 1
    assert bench.broker.lag(SUBJECT, GROUP) == 0


@pytest.mark.parametrize("ending", ["commit", "rollback", "close"])
def test_a_handler_that_ends_the_transaction_itself_is_reported_and_has_its_effect_at_most_once(
    bench: Bench, engine: sa.Engine, ending: str
) -> None:
    @consumer(SUBJECT, group=GROUP, inbox=sessionmaker(engine), max_attempts=2)
    def handler(body: Any, session: Session) -> None:
        session.execute(sa.text("UPDATE tally SET n = n + 1"))
        getattr(session, ending)()

    bench.put(1)
    consumers = bench.consumers(handler)
    drain(consumers)
    assert bench.counters(consumers)["nacked"] == 1
    delivered_again(bench, consumers)
    assert count_of(engine) <= 1


def test_savepoints_inside_a_handler_are_its_own(bench: Bench, engine: sa.Engine) -> None:
    @consumer(SUBJECT, group=GROUP, inbox=sessionmaker(engine))
    def handler(body: Any, session: Session) -> None:
        session.execute(sa.text("UPDATE tally SET n = n + 1"))
        savepoint = session.begin_nested()
        session.execute(sa.text("UPDATE tally SET n = n + 100"))
        savepoint.rollback()
        with session.begin_nested():
            session.execute(sa.text("UPDATE tally SET n = n + 10"))

    bench.put(1)
    bench.drain(handler)
    assert count_of(engine) == 11


def test_an_async_handler_may_use_the_inboxs_session(bench: Bench, engine: sa.Engine) -> None:
    @consumer(SUBJECT, group=GROUP, inbox=sessionmaker(engine))
    async def handler(body: Any, session: Session) -> None:
        session.execute(sa.text("UPDATE tally SET n = n + 1"))

    bench.put(1, 2)
    bench.drain(handler)
    assert count_of(engine) == 2


def test_F32_C5_two_consumers_with_the_same_message_at_the_same_time_have_one_effect(
    bench: Bench, engine: sa.Engine
) -> None:
    inbox = Inbox(engine, group=GROUP)
    together = threading.Barrier(8)
    effects: list[bool] = []

    def attempt() -> None:
        together.wait(WAIT_S)
        for number in range(25):
            with inbox.open([number.to_bytes(16)]) as work:
                if work.new:
                    work.session.execute(sa.text("UPDATE tally SET n = n + 1"))
                    effects.append(True)

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert (count_of(engine), len(effects)) == (25, 25)


def test_C5_many_workers_never_meet_a_locked_database(
    bench: Bench, sqlite_database: Database
) -> None:
    """Each reads before it writes, which a deferred transaction would not survive."""
    engine = make_engine(sqlite_database.url)
    done = threading.Semaphore(0)

    @consumer(SUBJECT, group=GROUP, concurrency=8, inbox=sessionmaker(engine))
    def handler(body: Any, session: Session) -> None:
        n = session.execute(sa.text("SELECT n FROM tally")).scalar_one()
        session.execute(sa.text("UPDATE tally SET n = :n"), {"n": n + 1})
        done.release()

    bench.put(*range(200))
    with Consumers([handler], bench.transport) as consumers:
        for _ in range(200):
            assert done.acquire(timeout=WAIT_S)
    assert count_of(engine) == 200
    assert bench.counters(consumers).get("nacked", 0) == 0
    engine.dispose()


def test_a_connection_that_commits_by_itself_is_refused(bench: Bench, engine: sa.Engine) -> None:
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
    with pytest.raises(AutocommitError):
        bench.consumers(tallying(autocommit)).start()


def test_an_engine_that_begins_by_itself_is_taken_as_it_is(bench: Bench, tmp_path: Path) -> None:
    engine = make_engine(f"sqlite:///{tmp_path}/own.db", begins_by_itself=True)
    bench.put(1, 2)
    bench.drain(tallying(engine))
    assert count_of(engine) == 2
    engine.dispose()


def test_in_memory_the_workers_take_turns(bench: Bench) -> None:
    engine = sa.create_engine(
        "sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False}
    )
    make_engine(None, engine=engine)
    done = threading.Semaphore(0)

    @consumer(SUBJECT, group=GROUP, concurrency=4, inbox=engine)
    def handler(body: Any, session: Session) -> None:
        session.execute(sa.text("UPDATE tally SET n = n + 1"))
        done.release()

    bench.put(*range(50))
    with Consumers([handler], bench.transport):
        for _ in range(50):
            assert done.acquire(timeout=WAIT_S)
    assert count_of(engine) == 50
    engine.dispose()


def test_an_unknown_database_is_refused_by_name(bench: Bench) -> None:
    engine = sa.create_engine("mssql+pymssql://nowhere", module=sqlite3)
    with pytest.raises(ConfigurationError, match="mssql"):
        Inbox(engine, group=GROUP)


def test_the_open_block_rolls_back_and_says_so(engine: sa.Engine) -> None:
    inbox = Inbox(engine, group=GROUP)

    def commit_inside() -> None:
        with inbox.open([bytes(16)]) as work:
            work.session.commit()

    with pytest.raises(InboxTransactionError):
        commit_inside()


def test_purging_forgets_old_ids_of_its_own_group_in_small_transactions(
    engine: sa.Engine,
) -> None:
    mine, other = Inbox(engine, group="mine"), Inbox(engine, group="other")
    for inbox in (mine, other):
        with inbox.open([number.to_bytes(16) for number in range(2_500)]) as work:
            assert len(work.new) == 2_500
    assert mine.purge(timedelta(hours=1)) == 0
    with engine.begin() as connection:
        connection.execute(
            sa.text("UPDATE qmq_inbox SET received_at_ms = received_at_ms - 7200000")
        )
    assert mine.purge(timedelta(hours=3)) == 0
    assert mine.purge(timedelta(hours=1), rows_max=100) == 100
    assert mine.purge(timedelta(hours=1)) == 2_400
    assert {group for group, _ in rows_in_inbox(engine)} == {"other"}


def test_C5_an_inbox_may_be_in_tables_of_other_names(bench: Bench, engine: sa.Engine) -> None:
    tables = make_tables(sa.MetaData(), prefix="messages_")
    create_tables(engine, tables)

    @consumer(SUBJECT, group=GROUP, inbox=Inbox(engine, group=GROUP, tables=tables))
    def handler(body: Any, session: Session) -> None:
        session.execute(sa.text("UPDATE tally SET n = n + 1"))

    bench.put(1)
    bench.drain(handler)
    with engine.connect() as connection:
        noted = connection.scalar(sa.text("SELECT COUNT(*) FROM messages_inbox"))
    assert (count_of(engine), noted, rows_in_inbox(engine)) == (1, 1, set())


@pytest.mark.parametrize(("older_than", "rows_max"), [(timedelta(-1), None), (timedelta(1), 0)])
def test_a_purge_that_cannot_be_meant_is_refused(
    engine: sa.Engine, older_than: timedelta, rows_max: int | None
) -> None:
    with pytest.raises(ConfigurationError):
        Inbox(engine, group=GROUP).purge(older_than, rows_max=rows_max)
