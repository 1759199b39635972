"""Applications under load: each message goes with its own request's transaction, or the call is refused.

As many requests as FastAPI's thread pool mixes up with each other's threads: a session that was found by
its thread would be another request's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from qmq_client import pull
from tests.client.outbox.web_server import (
    REFUSED,
    TAKEN,
    UNNAMED,
    Order,
    environment,
    flush,
    gunicorn,
    place,
    serving,
    uvicorn,
)
from tests.client.truth import Truth
from tests.client.world import OUTBOX, SUBJECT, set_up
from tests.conftest import MakeDatabase
from tests.kit.broker_process import BrokerProcess
from tests.services.databases import KINDS, Database

AT_ONCE: Final = 12
#: SQLite has one writer, for which a coroutine with a plain session waits on the loop; so it would wait
#: for another one that waits for the loop.
WAYS_OF_ONE_WRITER: Final = ("thread-thread", "sqlmodel", "decorated", "unnamed-thread")
WAYS_ON_THE_LOOP: Final = (
    "thread-loop",
    "loop-thread",
    "loop-loop",
    "awaited",
    "forgotten",
    "decorated-loop",
    "unnamed-loop",
)
WAYS: Final = {
    "sqlite": WAYS_OF_ONE_WRITER,
    "mysql": WAYS_OF_ONE_WRITER + WAYS_ON_THE_LOOP,
    "postgresql": WAYS_OF_ONE_WRITER + WAYS_ON_THE_LOOP,
}
REQUESTS: Final = {"sqlite": 300, "mysql": 600, "postgresql": 600}
REQUESTS_IN_RELEASE: Final = 10_000


def orders_of(ways: Sequence[str], count: int) -> list[Order]:
    """By each way in turn; a third of each is refused."""
    return [
        Order(way=ways[i % len(ways)], n=f"{i}", is_refused=i // len(ways) % 3 == 0)
        for i in range(count)
    ]


def bodies(broker_url: str) -> list[str]:
    """Of all messages that the broker has accepted, which can be pulled at once."""
    found: list[str] = []
    while True:
        asked = pull(
            broker_url, subject=SUBJECT, group="judge", max_messages=1000, start="earliest"
        )
        with asked as deliveries:
            if not deliveries:
                return found
            for delivery in deliveries:
                found.append(delivery.message.body)
                delivery.ack()


def judge(url: str, broker_url: str, orders: list[Order], statuses: list[int]) -> None:
    """Each answer is the one that its order must have; rows, messages and answers agree."""
    expected = [
        UNNAMED if order.way.startswith("unnamed") else REFUSED if order.is_refused else TAKEN
        for order in orders
    ]
    assert statuses == expected
    taken = sorted(
        order.n for order, status in zip(orders, statuses, strict=True) if status == TAKEN
    )
    truth = Truth(url)
    assert sorted(row[0] for row in truth.read("SELECT label FROM business_order")) == taken
    assert sorted(bodies(broker_url)) == taken
    assert truth.read(f"SELECT count(*) FROM {OUTBOX}") == [(0,)]


@pytest.fixture
def broker_process(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "broker") as process:
        yield process


def count_of(config: pytest.Config, kind: str) -> int:
    return REQUESTS_IN_RELEASE if config.getoption("--release") else REQUESTS[kind]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_S1_S2_S11_requests_to_fastapi_at_once_send_with_their_own_transactions(
    kind: str,
    make_database: MakeDatabase,
    broker_process: BrokerProcess,
    tmp_path: Path,
    pytestconfig: pytest.Config,
) -> None:
    database = make_database(kind)
    set_up(database.url)
    orders = orders_of(WAYS[kind], count_of(pytestconfig, kind))
    told = environment(database.url, broker_process.url)
    with serving(uvicorn, told, tmp_path / "log") as address:
        statuses = place(address, orders, AT_ONCE)
        assert flush(address)
    judge(database.url, broker_process.url, orders, statuses)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_S1_S2_S4_requests_to_flask_at_once_send_with_their_own_transactions(
    kind: str,
    make_database: MakeDatabase,
    broker_process: BrokerProcess,
    tmp_path: Path,
    pytestconfig: pytest.Config,
) -> None:
    database = make_database(kind)
    set_up(database.url)
    orders = orders_of(("named", "told"), count_of(pytestconfig, kind) // 3)
    told = environment(database.url, broker_process.url)
    with serving(gunicorn, told, tmp_path / "log") as address:
        statuses = place(address, orders, AT_ONCE)
        assert flush(address)
    judge(database.url, broker_process.url, orders, statuses)


@pytest.mark.timeout(1800)
def test_S5_workers_that_read_and_then_write_sqlite_fail_no_more_with_messages_than_without(
    sqlite_database: Database, broker_process: BrokerProcess, tmp_path: Path
) -> None:
    """Each worker has a publisher, which knows nothing of transactions in the others."""
    set_up(sqlite_database.url)
    told = environment(sqlite_database.url, broker_process.url)
    orders = orders_of(("read-alone", "read"), REQUESTS["sqlite"])
    with serving(gunicorn, told, tmp_path / "log", workers=4) as address:
        statuses = {
            way: place(address, [each for each in orders if each.way == way], AT_ONCE)
            for way in ("read-alone", "read")
        }
    assert Counter(statuses["read-alone"]) == Counter(statuses["read"]), statuses
    rows = Truth(sqlite_database.url).read(f"SELECT count(*) FROM {OUTBOX}")
    assert len(bodies(broker_process.url)) + rows[0][0] == statuses["read"].count(TAKEN)
    assert rows == [(0,)], "what a worker had when it was told to end, it sends"
