"""Transactions that a signal handler ends in the middle of the driver's own steps, on servers.

The connection may be unusable afterwards, and a COMMIT under way may have happened or not. The message
is sent if and only if the business row is there, the receipt does not say otherwise, and the next
transaction goes through.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest
import sqlalchemy as sa

from qmq_client.message import Message
from qmq_client.outbox.database import deadline
from qmq_client.publishing.receipts import Fate
from tests.client.test_interrupted_producer import DEADLINE_S, WITHIN, Shop, fail, shop_of
from tests.client.world import SUBJECT, World
from tests.kit.interrupting import Interruption

#: Each place costs a transaction and perhaps a connection; neighbours differ little.
STRIDE: Final = 3
#: Of work of ours with several transactions.
LONG_STRIDE: Final = 11
#: A connection whose goodbye is interrupted, or an object while it is made, says so where it is collected: here.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("collected_at_the_end"),
]


def test_S1_S2_S3_a_signal_that_raises_inside_the_driver_leaves_all_or_nothing(
    server_world: World,
) -> None:
    world = server_world
    driver: Any = world.engine.dialect.loaded_dbapi
    within = [str(Path(driver.__file__).parent)]
    fates: Counter[Fate | None] = Counter()
    for at in count(step=STRIDE):
        interruption = Interruption(fail, within=within, at=at)
        with shop_of(world, interruption, background=False) as shop:
            interruption.around(partial(shop.order, "interrupted"))
        assert world.checked_out() == 0, interruption.place
        receipt = shop.receipts.get(f"{at} interrupted")
        if receipt is not None:
            fates[receipt.fate] += 1
        if not interruption.place:
            break
    assert at > 100
    assert fates[Fate.LEFT] > 0, "some were interrupted while the COMMIT was under way"
    assert fates[Fate.ACCEPTED] > 0


def places_of(world: World) -> list[str]:
    """Those of ours, of the driver, and of blocks of `with`; not the locks of the application's pool."""
    driver: Any = world.engine.dialect.loaded_dbapi
    ours = [place for place in WITHIN if place != threading.__file__]
    return [*ours, str(Path(driver.__file__).parent), contextlib.__file__]


def check_connections(world: World, shop: Shop, place: str) -> None:
    """Nobody has one, and none of those that are back would be cut."""
    assert world.checked_out() == 0, place
    sibling = shop.producer._store._sibling.pool
    assert isinstance(sibling, sa.QueuePool)
    assert sibling.checkedout() == 0, place
    assert [watch for watch in deadline._deadlines._watches if not watch.is_over] == [], place


@pytest.mark.timeout(300)
@pytest.mark.parametrize("doubts", [False, True])
def test_S12_a_signal_that_raises_in_a_flush_on_a_server_leaves_nothing_locked_or_lost(
    server_world: World, doubts: bool
) -> None:
    """Also where the publisher has to look for the rows before it sends them."""
    world = server_world
    for at in count(step=LONG_STRIDE):
        interruption = Interruption(fail, within=places_of(world), at=at)
        with shop_of(world, interruption, background=False) as shop:
            shop.order("before", dedupe_key=f"{at}" if doubts else None)
            with suppress(
                KeyboardInterrupt, sa.exc.SQLAlchemyError
            ):  # what is raised holds blocks open
                interruption.around(partial(shop.producer.flush, DEADLINE_S))
        check_connections(world, shop, interruption.place)
        if not interruption.place:
            break
    assert at > 100


@pytest.mark.timeout(300)
def test_S12_a_close_on_a_server_that_is_interrupted_can_be_repeated_and_loses_nothing(
    server_world: World,
) -> None:
    world = server_world
    for at in count(step=LONG_STRIDE):
        interruption = Interruption(fail, within=places_of(world), at=at)
        shop = Shop(world, at, background=False)
        shop.order("before")
        with suppress(KeyboardInterrupt, sa.exc.SQLAlchemyError):
            interruption.around(partial(shop.producer.close, DEADLINE_S))
        shop.producer.close(DEADLINE_S)
        shop.check_promises(interruption.place)
        check_connections(world, shop, interruption.place)
        world.change("DELETE FROM qmq_outbox")
        if not interruption.place:
            break
    assert at > 100


@pytest.mark.timeout(300)
def test_S8_a_send_now_on_a_server_that_is_interrupted_stores_all_or_nothing(
    server_world: World,
) -> None:
    world = server_world
    messages = [Message(SUBJECT, "one"), Message(SUBJECT, "two")]
    for at in count(step=LONG_STRIDE):
        interruption = Interruption(fail, within=places_of(world), at=at)
        shop = Shop(world, at, background=False)
        before = len(world.sent())
        with suppress(KeyboardInterrupt, sa.exc.SQLAlchemyError):
            interruption.around(partial(shop.producer.send_now_many, messages))
        place = interruption.place
        assert shop.producer.flush(DEADLINE_S).is_done, place
        sent, left = len(world.sent()) - before, len(world.stored_ids())
        assert (sent, left) in {(0, 0), (2, 0), (0, 2)}, place
        shop.producer.send_now(Message(SUBJECT, "afterwards"))
        assert shop.producer.flush(DEADLINE_S), place
        assert world.sent()[-1] == "afterwards", place
        shop.producer.close(DEADLINE_S)
        check_connections(world, shop, place)
        world.change("DELETE FROM qmq_outbox")
        if not place:
            break
    assert at > 100
