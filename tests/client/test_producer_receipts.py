"""Receipts tell what became of a message, whatever became of it, and cost nobody else anything."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client.errors import NoTransactionError, OutboxError
from qmq_client.message import Message
from qmq_client.options import ProducerOptions
from qmq_client.producer import Producer
from qmq_client.publishing.receipts import Receipt, SendOutcome
from qmq_client.transactional import transaction
from tests.client.world import SUBJECT, World, a_world
from tests.services.databases import Database

DEADLINE_S = 60.0


@pytest.fixture
def world(tmp_path: Path, a_database: Database) -> Iterator[World]:
    with a_world(tmp_path, database=a_database) as made:
        yield made


def send(world: World, session: Any, body: str = "x") -> Receipt:
    return world.producer.receipt(world.send(body, session), session=session)


def test_a_receipt_is_open_until_the_broker_has_the_message(world: World) -> None:
    with Session(world.sync_engine) as session, session.begin():
        receipt = send(world, session)
        assert receipt is world.producer.receipt(receipt.message_id, session=session)
    assert (receipt.outcome, receipt.wait(0.0)) == (None, None)
    assert "open" in repr(receipt)
    assert world.producer.flush()
    assert (receipt.outcome, receipt.wait(0.0), receipt.error) == (
        SendOutcome.ACCEPTED,
        SendOutcome.ACCEPTED,
        "",
    )


def test_the_session_may_be_left_out_as_for_a_send(world: World) -> None:
    with transaction(world.sync_engine):
        receipt = world.producer.receipt(world.send("x"))
    world.producer.flush()
    assert receipt.outcome is SendOutcome.ACCEPTED


def roll_back(session: Session) -> None:
    session.rollback()


def close(session: Session) -> None:
    session.close()


def roll_back_the_connection(session: Session) -> None:
    session.connection().rollback()
    session.close()


@pytest.mark.parametrize("end", [roll_back, close, roll_back_the_connection])
def test_a_receipt_knows_of_the_rollback(world: World, end: Callable[[Session], None]) -> None:
    with Session(world.sync_engine) as session:
        receipt = send(world, session)
        end(session)
    assert world.producer.flush()
    assert receipt.wait(0.0) is SendOutcome.ROLLED_BACK


def test_a_message_that_is_sent_again_after_a_rollback_has_another_receipt(world: World) -> None:
    receipts = []
    for _ in range(2):
        with Session(world.sync_engine) as session:
            message_id = world.send("x", session, dedupe_key="order-17")
            receipts.append(world.producer.receipt(message_id, session=session))
            if len(receipts) == 2:
                session.commit()
        assert world.producer.flush()
    assert [receipt.outcome for receipt in receipts] == [
        SendOutcome.ROLLED_BACK,
        SendOutcome.ACCEPTED,
    ]


def test_a_receipt_knows_of_the_savepoint(world: World) -> None:
    with Session(world.sync_engine) as session, session.begin():
        kept = send(world, session)
        savepoint = session.begin_nested()
        undone = send(world, session)
        savepoint.rollback()
        assert (kept.outcome, undone.outcome) == (None, None)  # the database decides at the end
    world.producer.flush()
    assert (kept.outcome, undone.outcome) == (SendOutcome.ACCEPTED, SendOutcome.ROLLED_BACK)


def test_a_receipt_knows_of_a_commit_that_the_database_refused(world: World) -> None:
    receipts: list[Receipt] = []

    def order() -> None:
        with Session(world.sync_engine) as session, session.begin():
            receipts.append(send(world, session))
            session.execute(sa.text("INSERT INTO business_order (id, label) VALUES (1, 'a')"))
            session.execute(sa.text("INSERT INTO business_order (id, label) VALUES (1, 'a')"))

    with pytest.raises(sa.exc.IntegrityError):
        order()
    gc.collect()  # the error's frames may have held the note
    assert receipts[0].outcome is SendOutcome.ROLLED_BACK


def test_a_parked_message_has_its_reason_on_the_receipt(world: World) -> None:
    with Session(world.sync_engine) as session, session.begin():
        receipt = send(world, session)
    world.broker.faults.refused_ids = {receipt.message_id}
    world.producer.flush()
    assert receipt.outcome is SendOutcome.PARKED
    assert "refused by a fault" in receipt.error


def test_what_falls_to_the_watchdog_is_reported(tmp_path: Path) -> None:
    with a_world(tmp_path, queue_messages=1) as world:
        world.broker.faults.is_unreachable = True
        receipts = []
        for _ in range(2):
            with Session(world.sync_engine) as session, session.begin():
                receipts.append(send(world, session))
        assert [receipt.outcome for receipt in receipts] == [
            None,
            SendOutcome.LEFT,
        ]  # the queue was full
        world.producer.flush()
        assert receipts[0].outcome is SendOutcome.LEFT
        assert "no connection" in receipts[0].error
        with Session(world.sync_engine) as session, session.begin():
            last = send(world, session)
        world.producer.close(0.0)
        assert last.outcome is SendOutcome.LEFT


def test_a_receipt_is_asked_for_in_the_transaction_of_its_message(world: World) -> None:
    other = world.make_producer()
    with Session(world.sync_engine) as session, session.begin():
        message_id = world.send("x", session)
        with pytest.raises(NoTransactionError, match="between the send and the commit"):
            other.receipt(message_id, session=session)
    with pytest.raises(NoTransactionError):
        world.producer.receipt(message_id)
    with Session(world.sync_engine) as session, pytest.raises(NoTransactionError):
        world.producer.receipt(message_id, session=session)
    other.close()


def test_receipts_that_nobody_holds_are_gone_and_those_held_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qmq_client.publishing.receipts.RECEIPTS_MAX", 3)
    with a_world(tmp_path) as world, Session(world.sync_engine) as session, session.begin():
        for _ in range(10):
            send(world, session)
        held = [send(world, session) for _ in range(3)]
        with pytest.raises(OutboxError, match="3 receipts are open"):
            send(world, session)
        assert [receipt.outcome for receipt in held] == [None] * 3


def test_another_thread_waits_for_the_publishers_thread(world: World) -> None:
    outcomes: list[SendOutcome | None] = []
    with Producer(world.sync_engine, world.transport, options=ProducerOptions()) as producer:
        with Session(world.sync_engine) as session, session.begin():
            message_id = producer.send(Message(SUBJECT, "x"), session=session)
            receipt = producer.receipt(message_id, session=session)
            waiter = threading.Thread(target=lambda: outcomes.append(receipt.wait(DEADLINE_S)))
            waiter.start()
        waiter.join(DEADLINE_S)
    assert outcomes == [SendOutcome.ACCEPTED]


def test_a_receipt_is_awaited_and_a_cancelled_wait_spoils_nothing(world: World) -> None:
    async def main() -> tuple[SendOutcome, SendOutcome]:
        with Session(world.sync_engine) as session, session.begin():
            receipt = send(world, session)
        impatient = asyncio.ensure_future(wait(receipt))
        await asyncio.sleep(0)
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        await world.producer.flush_async()
        async with asyncio.timeout(DEADLINE_S):
            return await receipt, await receipt

    async def wait(receipt: Receipt) -> SendOutcome:
        return await receipt

    assert asyncio.run(main()) == (SendOutcome.ACCEPTED, SendOutcome.ACCEPTED)


def test_S10_receipts_of_the_parent_stay_open_in_the_child(tmp_path: Path) -> None:
    with a_world(tmp_path) as world:
        with Session(world.sync_engine) as session, session.begin():
            receipt = send(world, session)
        child = os.fork()
        if child == 0:
            world.producer.flush(0.0)
            gc.collect()
            os._exit(0 if receipt.outcome is None else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert world.producer.flush()
        assert receipt.outcome is SendOutcome.ACCEPTED
