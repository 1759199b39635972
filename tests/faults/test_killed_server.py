"""F2: the database server is killed in the middle of transactions and commits, again and again."""

from __future__ import annotations

import random
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client.errors import QmqError
from tests.client.publishing import sweep
from tests.client.world import Order, World, a_world
from tests.conftest import MakeServer
from tests.services.databases import Databases

KILLS: Final = 5
KILLS_IN_RELEASE: Final = 200
WRITERS: Final = 3
#: The server is killed after this many commits, and somewhere in the next ones.
COMMITS_MAX: Final = 60
DEADLINE_S: Final = 60.0


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
        self._threads = [
            threading.Thread(target=self._write, args=(writer,)) for writer in range(WRITERS)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Requires: the server was killed, so every writer has met an error."""
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "a writer hangs after its server was killed"

    def _write(self, writer: int) -> None:
        count = 0
        with suppress(sa.exc.SQLAlchemyError, QmqError):
            while True:
                self._transact(f"{self._name}.{writer}.{count}", is_wanted=count % 5 != 4)
                count += 1
        self.is_time.set()

    def _transact(self, label: str, *, is_wanted: bool) -> None:
        with Session(self._world.engine) as session:
            session.execute(sa.insert(Order).values(label=label))
            self._world.send(label, session)
            if not is_wanted:
                self.rolled_back.add(label)
                session.rollback()
                return
            session.commit()
        self.acknowledged.add(label)
        if len(self.acknowledged) >= self._kill_after:
            self.is_time.set()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["mysql", "postgresql"])
def test_F2_S1_S2_S6_O1_a_killed_server_forgets_no_commit_and_invents_no_message(
    kind: str,
    databases: Databases,
    make_private_server: MakeServer,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    kills = KILLS_IN_RELEASE if request.config.getoption("--release") else KILLS
    rng = random.Random(2)
    server = make_private_server(kind)
    database = databases.make_on(server.url(), kind, "shop")
    acknowledged: set[str] = set()
    rolled_back: set[str] = set()
    with a_world(tmp_path, database=database, background=True, real_clock=True) as world:
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
    assert len(acknowledged) >= kills
