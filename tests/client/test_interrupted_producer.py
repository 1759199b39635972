"""A producer whose work is interrupted at each place where Python runs signal handlers.

What a handler raises (Ctrl-C, `SystemExit` of a server that stops) comes out in the middle of a send, a
commit, a flush; a handler that sends finds the producer half through something. In both cases the
producer works afterwards: no lock stays taken, one thread at most steps the publisher, and messages
arrive if and only if their transactions committed. Collected garbage is the same kind of visitor.
"""

from __future__ import annotations

import concurrent.futures
import gc
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

import qmq_client
from qmq_client.message import Message
from qmq_client.options import ProducerOptions
from qmq_client.outbox.row import Ending, OutboxRow
from qmq_client.outbox.transaction.handoff import HandoffQueue, HandOver
from qmq_client.producer import Producer
from qmq_client.publishing.receipts import Fate, Receipt, Receipts
from qmq_client.testing import MemoryBroker, MemoryTransport
from qmq_client.wire.requests import SendAnswer
from tests.client.publishing import publisher_threads
from tests.client.world import SUBJECT, Order, World, add
from tests.kit.interrupting import Interruption, at_each_look
from tests.kit.waiting import wait_for

DEADLINE_S: Final = 60.0
PLACES: Final = (
    "ids.py",
    "producer.py",
    "signal_flag.py",
    "thread_start.py",
    "outbox",
    "publishing",
)
#: Conditions and threads are written in Python, and interrupted as well.
WITHIN: Final = (
    *(str(Path(qmq_client.__file__).with_name(name)) for name in PLACES),
    threading.__file__,
)
#: What is raised in the callback of a weak reference is only reported: Python has nowhere to raise it.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("collected_at_the_end"),
]
#: Visitors that are at work.
visits: Final[list[str]] = []


@pytest.fixture(autouse=True)
def ended_threads() -> Iterator[None]:
    """No work leaves a thread, also none that is listed and never ran."""
    yield
    wait_for(lambda: not publisher_threads(), publisher_threads)


class Steppers(MemoryTransport):
    """Notes which threads send."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.threads: set[int] = set()

    def send(self, frame: bytes) -> SendAnswer:
        self.threads.add(threading.get_ident())
        return super().send(frame)


class Shop:
    """A new producer on a world's engine, and transactions that are its alone."""

    def __init__(self, world: World, name: int, *, background: bool) -> None:
        self._world = world
        self._name = name
        self.transport = Steppers(world.broker)
        options = ProducerOptions(background=background, delete_delay_ms=0)
        self.producer = Producer(world.engine, self.transport, options=options)
        self.receipts: dict[str, Receipt] = {}

    def order(self, label: str, dedupe_key: str | None = None) -> None:
        """A business row and its message."""
        body = f"{self._name} {label}"
        with Session(self._world.engine) as session, session.begin():
            session.add(Order(label=body))
            message_id = self.producer.send(
                Message(SUBJECT, body, dedupe_key=dedupe_key), session=session
            )
            self.receipts[body] = self.producer.receipt(message_id, session=session)

    def try_order(self, label: str) -> None:
        """The same, of a visitor in the middle of a transaction that may have locked the database."""
        visits.append(label)
        with suppress(sa.exc.OperationalError):
            self.order(label)
        visits.pop()

    def check(self, place: str) -> None:
        """It works, and has one thread at most that sends."""
        self.order("afterwards")
        flushed = self.producer.flush(DEADLINE_S)
        assert flushed.is_done, place
        assert len(self.transport.threads) == 1, place
        assert f"{self._name} afterwards" in self.check_promises(place), place

    def check_promises(self, place: str) -> set[str]:
        """What committed was sent or is left, nothing else was, and receipts say so; what was sent."""
        stored = self._world.stored_ids()
        left = {body for body, one in self.receipts.items() if one.message_id in stored}
        orders = self._mine(self._world.committed_orders())
        sent = self._mine(self._world.sent())
        assert len(left) == len(stored), place
        assert sent | left == orders, place
        fates = {body: receipt.fate for body, receipt in self.receipts.items()}
        undone = {body for body, fate in fates.items() if fate is Fate.ROLLED_BACK}
        assert not undone & orders, place
        assert {body for body, fate in fates.items() if fate is Fate.ACCEPTED} <= sent, place
        return sent

    def _mine(self, labels: Iterable[str]) -> set[str]:
        return {label for label in labels if label.startswith(f"{self._name} ")}


def fail() -> None:
    raise KeyboardInterrupt


@contextmanager
def shop_of(world: World, interruption: Interruption, *, background: bool) -> Iterator[Shop]:
    """A shop that is checked at the end of the block, and ends."""
    shop = Shop(world, interruption.at, background=background)
    with suppress(KeyboardInterrupt, sa.exc.SQLAlchemyError):  # whatever a session makes of it
        yield shop
    place = interruption.place
    shop.check(place)
    shop.producer.close(DEADLINE_S)
    assert not shop.producer._thread.is_running, place
    world.change("DELETE FROM qmq_outbox")


@pytest.fixture
def visited(world: World) -> World:
    """A visitor that finds the database locked gives up at once: whom it waits for, it interrupts."""

    @sa.event.listens_for(world.engine, "checkout")
    def set_patience(driver: Any, *_: Any) -> None:
        driver.execute(f"PRAGMA busy_timeout = {0 if visits else round(DEADLINE_S * 1000)}")

    return world


@pytest.mark.parametrize("background", [True, False])
def test_S2_S5_S10_a_signal_that_raises_in_a_transaction_leaves_nothing_locked_or_lost(
    world: World, background: bool
) -> None:
    for interruption in at_each_look(fail, within=WITHIN):
        with shop_of(world, interruption, background=background) as shop:
            interruption.around(partial(shop.order, "interrupted"))
    assert interruption.at > 100


@pytest.mark.parametrize("background", [True, False])
def test_S5_S10_a_signal_handler_may_send_in_the_middle_of_a_transaction(
    visited: World, background: bool
) -> None:
    for interruption in at_each_look(lambda: shop.try_order("of the handler"), within=WITHIN):
        with shop_of(visited, interruption, background=background) as shop:
            interruption.around(partial(shop.order, "interrupted"))
    assert interruption.at > 100


@pytest.mark.parametrize("background", [True, False])
def test_S12_a_signal_that_raises_in_a_flush_leaves_nothing_locked_or_lost(
    world: World, background: bool
) -> None:
    for interruption in at_each_look(fail, within=WITHIN):
        with shop_of(world, interruption, background=background) as shop:
            shop.order("before")
            interruption.around(partial(shop.producer.flush, DEADLINE_S))
    assert interruption.at > 10


@pytest.mark.parametrize("background", [True, False])
def test_S12_a_signal_handler_may_send_and_flush_in_the_middle_of_a_flush(
    visited: World, background: bool
) -> None:
    def visit() -> None:
        shop.try_order("of the handler")
        shop.producer.flush(0.0)

    for interruption in at_each_look(visit, within=WITHIN):
        with shop_of(visited, interruption, background=background) as shop:
            shop.order("before")
            interruption.around(partial(shop.producer.flush, DEADLINE_S))
    assert interruption.at > 10


@pytest.mark.parametrize("background", [True, False])
def test_S12_a_signal_handler_may_close_in_the_middle_of_a_flush(
    world: World, background: bool
) -> None:
    def visit() -> None:
        shop.producer.close(DEADLINE_S)

    for interruption in at_each_look(visit, within=WITHIN):
        shop = Shop(world, interruption.at, background=background)
        shop.order("before")
        interruption.around(partial(shop.producer.flush, DEADLINE_S))
        shop.producer.close(DEADLINE_S)
        assert not shop.producer._thread.is_running, interruption.place
        shop.check_promises(interruption.place)
        world.change("DELETE FROM qmq_outbox")
    assert interruption.at > 10


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("raises", [True, False])
def test_S12_a_close_that_is_interrupted_can_be_repeated_and_loses_nothing(
    visited: World, raises: bool, background: bool
) -> None:
    def visit() -> None:
        shop.try_order("of the handler")

    for interruption in at_each_look(fail if raises else visit, within=WITHIN):
        shop = Shop(visited, interruption.at, background=background)
        shop.order("before")
        with suppress(KeyboardInterrupt):
            interruption.around(partial(shop.producer.close, DEADLINE_S))
        shop.producer.close(DEADLINE_S)
        assert not shop.producer._thread.is_running, interruption.place
        shop.check_promises(interruption.place)
        visited.change("DELETE FROM qmq_outbox")
    assert interruption.at > 10


def test_S2_S4_sessions_that_are_collected_in_the_middle_of_a_transaction_take_only_theirs(
    world: World,
) -> None:
    def leave_garbage() -> None:
        forgotten = Session(world.engine)
        forgotten.info["circle"] = forgotten  # only the garbage collector ends it
        message_id = shop.producer.send(Message(SUBJECT, "forgotten"), session=forgotten)
        shop.receipts["forgotten"] = shop.producer.receipt(message_id, session=forgotten)
        del forgotten
        gc.collect()

    gc.collect()
    gc.freeze()  # it would go through all modules each time
    try:
        for interruption in at_each_look(leave_garbage, within=WITHIN):
            with shop_of(world, interruption, background=False) as shop:
                interruption.around(partial(shop.order, "interrupted"))
            if interruption.place:
                assert shop.receipts["forgotten"].fate is Fate.ROLLED_BACK, interruption.place
    finally:
        gc.unfreeze()
    assert interruption.at > 100
    assert "forgotten" not in world.sent()


def test_S1_a_send_that_was_interrupted_leaves_its_transaction_usable(world: World) -> None:
    for interruption in at_each_look(fail, within=WITHIN):
        with Session(world.engine) as session, session.begin():
            session.connection()
            with suppress(KeyboardInterrupt):
                interruption.around(partial(world.send, "interrupted", session))
            add(world, session, f"{interruption.at} b")
    orders, sent, left = world.outcome()
    assert orders == sorted(set(sent) - {"interrupted"})
    assert left == set()
    assert interruption.at > 10


def test_S12_a_signal_that_raises_while_a_receipt_is_waited_for_does_not_hold_up_the_publisher() -> (
    None
):
    row = handed("a").rows[0]
    within = (*WITHIN, concurrent.futures.__path__[0])
    for interruption in at_each_look(fail, within=within):
        receipts = Receipts()
        receipt = receipts.open(row, Ending())
        with suppress(KeyboardInterrupt):
            interruption.around(partial(receipt.wait, 0.001))
        publisher = threading.Thread(
            target=receipts.tell, args=([row.message_id], Fate.ACCEPTED), daemon=True
        )
        publisher.start()
        publisher.join(DEADLINE_S)
        assert not publisher.is_alive(), interruption.place
        assert receipt.wait(0.0) is Fate.ACCEPTED, interruption.place
    assert interruption.at > 3


def handed(label: str) -> HandOver:
    row = OutboxRow(
        message_id=label.encode().ljust(16), subject=SUBJECT, ordering_key=None, record=b""
    )
    return HandOver(rows=(row,), token=b"t" * 16, written_at_s=0.0, is_certain=True)


@pytest.mark.parametrize("raises", [True, False])
def test_S5_a_queue_that_is_interrupted_while_it_takes_counts_right(raises: bool) -> None:
    def visit() -> None:
        queue.put(handed("visitor"))

    for interruption in at_each_look(fail if raises else visit, within=WITHIN):
        queue = HandoffQueue(3)
        for label in ("a", "b"):
            queue.put(handed(label))
        with suppress(KeyboardInterrupt):
            interruption.around(partial(queue.take, 1))
        while queue.take(10):
            pass
        assert len(queue) == 0, interruption.place
        for label in ("c", "d", "e", "too many"):
            queue.put(handed(label))
        assert (len(queue), queue.dropped) == (3, 1), interruption.place
