"""What a producer says of a message is read from its row: parked, kept, gone, or never committed."""

from __future__ import annotations

import gc
import logging
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client.message import Message
from qmq_client.outbox.table import PARKED
from qmq_client.publishing.receipts import SendOutcome
from tests.client.world import OUTBOX, SUBJECT, World, a_world
from tests.services.databases import Database

KEY = "order-17"
KEYS = 100
RUNS = 10
THREADS = 4
DEADLINE_S = 60.0


@pytest.fixture
def world(tmp_path: Path, a_database: Database) -> Iterator[World]:
    with a_world(tmp_path, database=a_database) as made:
        yield made


def test_O7_a_repeat_of_a_parked_message_is_told_to_wait_for_a_person(world: World) -> None:
    world.producer.send_now(Message(SUBJECT, "first", dedupe_key=KEY))
    world.change(f"UPDATE {OUTBOX} SET state = {PARKED}, token = NULL, last_error = 'HTTP 413'")
    with Session(world.sync_engine) as session, session.begin():
        message_id = world.send("again", session, dedupe_key=KEY)
        receipt = world.producer.receipt(message_id, session=session)
    flushed = world.producer.flush()
    assert (receipt.outcome, receipt.error) == (SendOutcome.PARKED, "HTTP 413")
    assert not flushed


def test_O7_a_repeat_of_a_message_that_is_kept_for_an_audit_was_accepted(tmp_path: Path) -> None:
    with a_world(tmp_path, keep_sent_s=3600) as world:
        for _ in range(2):
            with Session(world.engine) as session, session.begin():
                message_id = world.send("x", session, dedupe_key=KEY)
                receipt = world.producer.receipt(message_id, session=session)
            assert world.producer.flush()
            assert receipt.outcome is SendOutcome.ACCEPTED
        assert world.sent() == ["x"]


def test_S1_a_cancelled_message_was_not_committed(world: World) -> None:
    with Session(world.sync_engine) as session, session.begin():
        message_id = world.send("x", session)
        receipt = world.producer.receipt(message_id, session=session)
        assert world.producer.cancel(message_id, session=session)
    assert world.producer.flush()
    assert (receipt.outcome, world.sent()) == (SendOutcome.ROLLED_BACK, [])


@pytest.mark.parametrize("end", ["close", "collect"])
def test_S4_messages_of_a_session_that_nobody_ended_are_named_in_the_log(
    world: World, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    session = Session(world.sync_engine)
    message_id = world.send("x", session)
    with caplog.at_level(logging.INFO, "qmq.producer"):
        if end == "close":
            session.close()
        del session
        gc.collect()
    assert message_id in caplog.text
    assert world.producer.flush()
    assert (world.sent(), world.stored_ids()) == ([], set())


def test_S4_an_error_on_the_way_out_of_a_session_is_not_told_twice(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def place() -> None:
        with Session(world.sync_engine) as session:
            world.send("x", session)
            raise KeyError(SUBJECT)

    with caplog.at_level(logging.WARNING, "qmq.producer"), pytest.raises(KeyError):
        place()
    assert caplog.text == ""


def test_O2_accepted_rows_that_are_not_there_to_be_deleted_are_counted_and_logged(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with Session(world.sync_engine) as session, session.begin():
        for body in "ab":
            world.send(body, session)
    publisher = world.producer._publisher
    publisher.step(0.0)
    assert publisher.stats.sent == 2
    world.change(
        f"DELETE FROM {OUTBOX} WHERE id = (SELECT max(id) FROM (SELECT id FROM {OUTBOX}) AS x)"
    )
    with caplog.at_level(logging.WARNING, "qmq.publisher"):
        assert world.producer.flush()
    assert world.producer.stats.not_deleted == 1
    assert "1 of 2 accepted rows no longer existed" in caplog.text


@pytest.mark.parametrize("is_ordered", [False, True], ids=["plain", "order by key"])
def test_S6_transactions_that_send_the_same_dedupe_keys_in_any_order_do_not_deadlock(
    tmp_path: Path, a_server_database: Database, is_ordered: bool
) -> None:
    errors: Counter[str] = Counter()
    with a_world(tmp_path, database=a_server_database, order_by_key=is_ordered) as world:

        def work(seed: int) -> None:
            lot = random.Random(seed)
            for number in range(RUNS):
                keys = [f"{number}-{key}" for key in range(KEYS)]
                lot.shuffle(keys)
                messages = [Message(SUBJECT, key, key=key, dedupe_key=key) for key in keys]
                try:
                    with Session(world.sync_engine) as session, session.begin():
                        world.producer.send_many(messages, session=session)
                except sa.exc.DBAPIError as error:
                    errors[str(error.orig)] += 1

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert errors == Counter()
        assert len(world.stored_ids()) == RUNS * KEYS
