"""F2: the database server is killed in the middle of transactions and commits, again and again; every driver."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import sqlalchemy as sa

from qmq_client.errors import QmqError
from tests.client.outbox.faces import drive, new_session, settled, within
from tests.client.publishing import sweep
from tests.client.world import Order, World, a_world
from tests.conftest import MakeServer
from tests.services.databases import Databases
from tests.services.drivers import MAIN, Driver, drivers

KILLS: Final = 5
#: Of a driver that is not the main one of its database.
KILLS_OF_OTHERS: Final = 2
KILLS_IN_RELEASE: Final = 200
WRITERS: Final = 3
#: The server is killed after this many commits, and somewhere in the next ones.
COMMITS_MAX: Final = 60
DEADLINE_S: Final = 60.0
#: pg8000 forgets the socket of a connection whose server dies between TCP's handshake and its own
#: (`_make_socket` of 1.31): the collector of garbage closes it, and says so.
FORGETS_SOCKETS: Final = {"pg8000"}
ON_SERVERS: Final = [
    pytest.param(
        one,
        id=str(one),
        marks=[pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")]
        if one.name in FORGETS_SOCKETS
        else [],
    )
    for one in drivers()
    if one.kind != "sqlite"
]


class Load:
    """Writers with business transactions, until the server is gone under them."""

    def __init__(self, world: World, name: str, kill_after: int) -> None:
        self._world = world
        self._name = name
        self._kill_after = kill_after
        self.acknowledged: set[str] = set()
        self.rolled_back: set[str] = set()
        #: Enough was committed: kill it now.
        self.is_time = threading.Event()
        works: list[Callable[[], object]] = [lambda: asyncio.run(self._write_all())]
        if not world.is_async:
            works = [partial(self._write_alone, writer) for writer in range(WRITERS)]
        self._threads = [threading.Thread(target=work) for work in works]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Requires: the server was killed, so every writer has met an error."""
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "a writer hangs after its server was killed"

    async def _write_all(self) -> None:
        """On one loop, whose connections end with it."""
        await asyncio.gather(*map(self._write, range(WRITERS)))
        await self._world.engine.dispose()

    def _write_alone(self, writer: int) -> None:
        drive(self._write(writer))

    async def _write(self, writer: int) -> None:
        count = 0
        # Asynchronous drivers let errors of the socket through.
        with suppress(sa.exc.SQLAlchemyError, QmqError, OSError):
            while True:
                await self._transact(f"{self._name}.{writer}.{count}", is_wanted=count % 5 != 4)
                count += 1
        self.is_time.set()

    async def _transact(self, label: str, *, is_wanted: bool) -> None:
        async with within(new_session(self._world)) as session:
            await settled(session.execute(sa.insert(Order).values(label=label)))
            await settled(self._world.send(label, session))
            if not is_wanted:
                self.rolled_back.add(label)
                await settled(session.rollback())
                return
            await settled(session.commit())
        self.acknowledged.add(label)
        if len(self.acknowledged) >= self._kill_after:
            self.is_time.set()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("driver", ON_SERVERS)
def test_F2_S1_S2_S6_O1_a_killed_server_forgets_no_commit_and_invents_no_message(
    driver: Driver,
    databases: Databases,
    make_private_server: MakeServer,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    kills = KILLS if driver.name in MAIN else KILLS_OF_OTHERS
    if request.config.getoption("--release"):
        kills = KILLS_IN_RELEASE
    rng = random.Random(2)
    server = make_private_server(driver.kind)
    database = databases.make_on(server.url(), driver.kind, "shop")
    acknowledged: set[str] = set()
    rolled_back: set[str] = set()
    options: dict[str, Any] = {"background": True, "real_clock": True, "driver": driver}
    with a_world(tmp_path, database=database, **options) as world:
        for i in range(kills):
            load = Load(world, f"{i}", rng.randint(1, COMMITS_MAX))
            load.start()
            assert load.is_time.wait(DEADLINE_S)
            server.kill()
            load.join()
            server.start()
            acknowledged |= load.acknowledged
            rolled_back |= load.rolled_back
            world.producer.flush(DEADLINE_S)
            world.make_due()
            world.store.close()  # its connections were to the server that was killed
            while sweep(world).sent:
                pass
            orders, sent = world.committed_orders(), world.sent()
            assert acknowledged <= orders, f"after kill {i} the server forgot a commit"
            assert not rolled_back & orders
            assert set(sent) == orders, f"after kill {i}"
            assert len(sent) == len(set(sent))
        assert world.producer.flush(DEADLINE_S)
        assert world.stored_ids() == set()
    if driver.name in FORGETS_SOCKETS:
        gc.collect()  # here, not in a later test
    assert len(acknowledged) >= kills
