"""An inbox whose work is interrupted at each place where Python runs signal handlers.

What a handler raises comes out in the middle of an effect, of a purge or of the look at the start.
Afterwards no connection is in anybody's hands, no lock is taken, and the next delivery has its effect if
and only if the one before had none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final

import pytest
import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

import qmq_client
from qmq_client.inbox import Inbox
from tests.client.consumer.kit import GROUP
from tests.client.consumer.shop import ADD, count_of, make_engine, rows_in_inbox
from tests.client.consumer.test_interrupted_consumers import fail, in_time
from tests.kit.interrupting import Interruption, at_each_look

PLACES: Final = ("inbox", "outbox")
#: Blocks of `with` are written in Python as well.
WITHIN: Final = (
    *(str(Path(qmq_client.__file__).with_name(name)) for name in PLACES),
    contextlib.__file__,
)


class Shop:
    """One inbox, and what is done with it."""

    def __init__(self, engine: sa.Engine) -> None:
        self.engine = engine
        self.inbox = Inbox(engine, group=GROUP)

    def handle(self, number: int) -> bool:
        """Always true, for whoever waits for the end."""
        with self.inbox.open([number.to_bytes(16)]) as work:
            if work.new:
                work.session.execute(ADD, {"count": 1})
        return True

    def check(self, number: int, place: str) -> None:
        """Delivered once more, in another thread, each message up to this one has had its effect once."""
        in_time(partial(self.handle, number))
        assert rows_in_inbox(self.engine) == {(GROUP, i.to_bytes(16)) for i in range(number + 1)}
        assert count_of(self.engine) == number + 1, place
        pool = self.engine.pool
        assert not isinstance(pool, sa.QueuePool) or pool.checkedout() == 0, place


@pytest.fixture
def shop(engine: sa.Engine) -> Shop:
    return Shop(engine)


@pytest.fixture
def shop_in_memory() -> Iterator[Shop]:
    engine = sa.create_engine(
        "sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False}
    )
    yield Shop(make_engine(None, engine=engine))
    engine.dispose()


def interrupted(interruption: Interruption, work: Callable[[], object]) -> None:
    with suppress(KeyboardInterrupt):
        interruption.around(work)


def walk(shop: Shop, work: Callable[[int], object]) -> int:
    """Interrupt this at each place, for one message after the other; how many places there were."""
    for interruption in at_each_look(fail, within=WITHIN):
        interrupted(interruption, partial(work, interruption.at))
        shop.check(interruption.at, interruption.place)
    return interruption.at


def test_C5_a_signal_that_raises_in_an_effect_leaves_nothing_locked_and_has_it_once(
    shop: Shop,
) -> None:
    assert walk(shop, shop.handle) > 20


def test_C5_a_signal_that_raises_in_an_effect_in_memory_leaves_nothing_locked_and_has_it_once(
    shop_in_memory: Shop,
) -> None:
    assert walk(shop_in_memory, shop_in_memory.handle) > 20


def test_C5_a_signal_that_raises_in_the_look_at_the_start_leaves_nothing_locked(shop: Shop) -> None:
    assert walk(shop, lambda _: shop.inbox.check()) > 20


def test_C5_a_signal_that_raises_in_a_purge_leaves_nothing_locked_and_purges_nothing_young(
    shop: Shop,
) -> None:
    assert walk(shop, lambda _: shop.inbox.purge(timedelta(days=1))) > 10
