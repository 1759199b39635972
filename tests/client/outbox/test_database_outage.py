"""A producer opens nothing when it is made: a database that is away is an outage, not a failed start."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import sessionmaker

from qmq_client import Message, OutboxMissingError, Producer
from qmq_client.testing import MemoryBroker, MemoryTransport
from tests.client.outbox.test_web_loads import bodies
from tests.client.outbox.web_server import (
    FLASK,
    IMPORTED,
    TAKEN,
    Order,
    environment,
    gunicorn,
    place,
    serving,
    uvicorn,
)
from tests.client.truth import Truth
from tests.client.world import OUTBOX, SUBJECT, set_up
from tests.conftest import MakeDatabase, MakeServer
from tests.kit import warm
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import DEADLINE_S, wait_for
from tests.services.databases import Database, Databases
from tests.services.drivers import Driver, drivers

FAILED: Final = 500
WORKERS: Final = 2
#: Orders whose answers must be those of each worker.
MANY: Final = 20
#: The command, and ways of an order in its application.
SERVERS: Final = {
    "gunicorn": (gunicorn, ("named", "told")),
    "uvicorn": (uvicorn, ("thread-thread", "awaited")),
}


@pytest.fixture
def broker_process(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "broker") as process:
        yield process


def orders(way: str, prefix: str) -> list[Order]:
    return [Order(way=way, n=f"{prefix}-{i}", is_refused=False) for i in range(MANY)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each web server and each database server once; before a release each with each."""
    if "serve" in metafunc.fixturenames:
        met = [("mysql", "gunicorn"), ("postgresql", "uvicorn")]
        if metafunc.config.getoption("--release"):
            met = [*product(("mysql", "postgresql"), SERVERS)]
        given = [(kind, *SERVERS[name]) for kind, name in met]
        metafunc.parametrize(("kind", "serve", "ways"), given, ids=map("-".join, met))


@pytest.mark.timeout(600)
def test_S1_S11_workers_start_without_their_database_and_send_when_it_is_back(
    kind: str,
    serve: Callable[..., list[str]],
    ways: tuple[str, str],
    databases: Databases,
    make_private_server: MakeServer,
    broker_process: BrokerProcess,
    tmp_path: Path,
) -> None:
    server = make_private_server(kind)
    url = databases.make_on(server.url(), kind, "shop").url
    set_up(url)
    server.stop()
    told = environment(url, broker_process.url)
    with serving(serve, told, tmp_path / "log", workers=WORKERS) as address:
        for way in ways:
            assert set(place(address, orders(way, f"away-{way}"), 4)) == {FAILED}
        server.start()
        taken = []
        for way in ways:
            placed = orders(way, way)
            assert set(place(address, placed, 4)) == {TAKEN}
            taken += [order.n for order in placed]
        wait_for(lambda: Truth(url).read(f"SELECT count(*) FROM {OUTBOX}") == [(0,)])
    assert sorted(bodies(broker_process.url)) == sorted(taken)


def unused_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def flask_command(url: str, name: str) -> subprocess.CompletedProcess[str]:
    """A command of the shop on Flask, as a developer calls it."""
    told = environment(url, "http://127.0.0.1:1")
    line = ["flask", "--app", FLASK, name]
    return warm.run(line, env=told, imports=IMPORTED, timeout=DEADLINE_S)


@pytest.mark.parametrize("kind", ["mysql", "postgresql"])
def test_an_application_is_imported_without_its_database(kind: str) -> None:
    names = {"mysql": "mysql+pymysql", "postgresql": "postgresql+psycopg"}
    done = flask_command(f"{names[kind]}://nobody@127.0.0.1:{unused_port()}/shop", "routes")
    assert (done.returncode, "/alive" in done.stdout) == (0, True), done.stderr


def test_a_migration_runs_in_an_application_whose_producer_is_there_before_the_tables(
    a_database: Database,
) -> None:
    done = flask_command(a_database.url, "migrate")
    assert (done.returncode, done.stdout) == (0, "migrated\n"), done.stderr
    assert Truth(a_database.url).read(f"SELECT count(*) FROM {OUTBOX}") == [(0,)]


@pytest.mark.parametrize("driver", drivers(), ids=str)
def test_a_producer_is_made_and_closed_without_a_connection(
    driver: Driver, make_database: MakeDatabase
) -> None:
    url = driver.url(make_database(driver.kind).url)
    connected: list[Any] = []
    engine: Any = create_async_engine(url) if driver.is_async else sa.create_engine(url)
    sync_engine = engine.sync_engine if driver.is_async else engine
    sa.event.listen(sync_engine, "do_connect", lambda *given: connected.append(given))
    with Producer(engine, MemoryTransport(MemoryBroker())):
        pass
    assert connected == []


def test_tables_that_are_not_there_are_named_at_the_first_send(a_database: Database) -> None:
    engine = a_database.engine()
    sessions = sessionmaker(engine)
    with Producer(sessions, MemoryTransport(MemoryBroker())) as producer:
        with sessions() as session, pytest.raises(OutboxMissingError) as error:
            producer.send(Message(SUBJECT, "a"), session=session)
        assert OUTBOX in str(error.value)
        set_up(a_database.url)
        with sessions.begin() as session:
            producer.send(Message(SUBJECT, "a"), session=session)
        assert producer.flush(DEADLINE_S)
