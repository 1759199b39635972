"""An asynchronous transaction that is interrupted at each place where Python runs signal handlers.

Messages that are sent before it has begun on the database are noted; they move into the transaction when
it begins, and are written and handed over inside its `commit`. What a signal handler raises there comes
out of the event loop, or the application catches it and goes on. In both cases a message arrives if and
only if its business row is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession

import qmq_client
from qmq_client.message import Message
from qmq_client.publishing.receipts import Fate, Receipt
from tests.client.test_interrupted_producer import DEADLINE_S, fail
from tests.client.world import SUBJECT, Order, World, a_world
from tests.kit.interrupting import at_each_look
from tests.services.databases import Database

#: Not the closing of connections, in which drivers leave threads behind.
WITHIN: Final = tuple(
    str(Path(qmq_client.__file__).parent / name)
    for name in ("producer.py", "outbox/transaction", "publishing")
)
#: A connection whose loop has ended says so where it is collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Shop:
    """A new producer on a world's engine, and one order."""

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self._label = str(number)
        self._producer = world.make_producer()
        self._receipt: Receipt | None = None

    def send(self, session: AsyncSession) -> None:
        message_id = self._producer.send(Message(SUBJECT, self._label), session=session)
        self._receipt = self._producer.receipt(message_id, session=session)

    async def order(self) -> None:
        """The commit is the first that the database hears of it."""
        async with AsyncSession(self._world.engine) as session, session.begin():
            self.send(session)
            session.add(Order(label=self._label))

    async def order_in_spite_of_all(self) -> None:
        """The database hears of it before, and what is raised there is caught."""
        async with AsyncSession(self._world.engine) as session, session.begin():
            self.send(session)
            with suppress(KeyboardInterrupt):
                await session.connection()
            session.add(Order(label=self._label))

    async def order_late(self) -> None:
        """The same, and the message is sent behind it."""
        async with AsyncSession(self._world.engine) as session, session.begin():
            with suppress(KeyboardInterrupt):
                await session.connection()
            self.send(session)
            session.add(Order(label=self._label))

    def check(self, place: str) -> None:
        """The message is at the broker or in the outbox if the row is there, and the receipt agrees."""
        assert self._producer.flush(DEADLINE_S).is_done, place
        is_ordered = self._label in self._world.committed_orders()
        is_sent = self._label in self._world.sent()
        is_left = self._world.change("DELETE FROM qmq_outbox") == 1  # and nobody holds a lock
        assert is_ordered == (is_sent or is_left), place
        fate = None if self._receipt is None else self._receipt.fate
        assert fate is not Fate.ACCEPTED or is_sent, place
        assert fate is not Fate.ROLLED_BACK or not is_ordered, place
        self._producer.close(DEADLINE_S)


Ordering = Callable[[Shop], Coroutine[Any, Any, None]]


def test_S1_S2_S11_a_signal_that_raises_in_an_asynchronous_commit_leaves_all_or_nothing(
    tmp_path: Path, a_database: Database
) -> None:
    walk(Shop.order, tmp_path, a_database)


@pytest.mark.parametrize("order", [Shop.order_in_spite_of_all, Shop.order_late])
def test_S1_S2_S11_a_transaction_that_goes_on_after_a_signal_in_its_first_statement_loses_no_message(
    tmp_path: Path, sqlite_database: Database, order: Ordering
) -> None:
    walk(order, tmp_path, sqlite_database)


def walk(order: Ordering, folder: Path, database: Database) -> None:
    # A connection is of the loop that opened it.
    options = {"poolclass": sa.NullPool}
    with a_world(folder, database=database, is_async=True, engine_options=options) as world:
        for interruption in at_each_look(fail, within=WITHIN):
            shop = Shop(world, interruption.at)
            # Whatever a session makes of it; an IntegrityError would be a message stored twice.
            with suppress(KeyboardInterrupt, sa.exc.InvalidRequestError):
                interruption.around(lambda: asyncio.run(order(shop)))  # noqa: B023  # called at once
            shop.check(interruption.place)
    assert interruption.at > 100
