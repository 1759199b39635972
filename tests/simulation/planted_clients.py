"""Bugs of applications' side: producer, outbox, watchdog, consumer, inbox. As in `planted_broker.py`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
import sqlalchemy as sa

from qmq_client import message
from qmq_client.consumer import work
from qmq_client.consumer.delivery import ACKED, Received
from qmq_client.consumer.work import Calls, Work
from qmq_client.errors import HandlerTimeoutError
from qmq_client.inbox.dialect import Noted
from qmq_client.inbox.sqlite import SqliteInboxDialect
from qmq_client.message import Message
from qmq_client.outbox.row import OutboxRow
from qmq_client.producer import Producer
from qmq_client.publishing import publish, publisher
from qmq_client.publishing.ordering import OrderedBatch
from qmq_client.publishing.publisher import Publisher
from qmq_watchdog import sweep


def what_a_busy_broker_refuses_is_taken_for_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def put_off(self: publish._Batch, rows: Sequence[OutboxRow], error: str) -> None:
        self.sent += [row.message_id for row in rows]
        self.unreachable = False

    monkeypatch.setattr(publish._Batch, "put_off", put_off)


def hints_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Publisher, "_there", lambda _, batch, __: batch)


def rows_pass_earlier_ones_of_their_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def order_batch(rows: Sequence[OutboxRow], *_: Any, **__: Any) -> OrderedBatch:
        return OrderedBatch(ready=list(rows))

    monkeypatch.setattr(publisher, "order_batch", order_batch)
    monkeypatch.setattr(sweep, "order_batch", order_batch)


def the_inbox_commits_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    insert = SqliteInboxDialect.insert

    def insert_and_commit(
        self: SqliteInboxDialect, connection: sa.Connection, group: str, ids: Sequence[bytes]
    ) -> Noted:
        noted = insert(self, connection, group, ids)
        driver: Any = connection.connection.driver_connection
        driver.commit()
        driver.execute("BEGIN IMMEDIATE")
        driver.execute("SAVEPOINT qmq_inbox")
        return noted

    monkeypatch.setattr(SqliteInboxDialect, "insert", insert_and_commit)


def outcomes_are_noted_before_the_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Work._run

    def ack_and_run(self: Work, batch: Sequence[Received], now_s: float) -> int | None:
        self.note(batch, ACKED)
        return run(self, batch, now_s)

    monkeypatch.setattr(Work, "_run", ack_and_run)


def sends_outside_a_transaction_are_not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(self: Producer, messages: Sequence[Message]) -> list[str]:
        with self.engine.connect() as connection, connection.begin() as transaction:
            sent = list(self.send_many(messages, session=connection))
            transaction.rollback()
        return sent

    monkeypatch.setattr(Producer, "send_now_many", send)


def dedupe_keys_make_no_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = count(2**100)
    monkeypatch.setattr(message, "dedupe_message_id", lambda *_: next(drawn).to_bytes(16))


def what_is_settled_by_hand_is_acked_with_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Work, "_note_outcomes", lambda self, *_: None)


def the_inbox_keeps_what_was_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_not_done", lambda decoded: [])


def cancelled_handlers_count_as_done(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = Calls._inside

    async def inside_and_well(self: Calls, decoded: Any, session: Any) -> None:
        with suppress(HandlerTimeoutError):
            await inside(self, decoded, session)

    monkeypatch.setattr(Calls, "_inside", inside_and_well)
