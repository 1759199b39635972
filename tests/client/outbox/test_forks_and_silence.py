"""A fork in the middle of a transaction, servers that fall silent, and very many messages at once."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client.message import Message
from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.outbox.database.dialect import dialect_of
from tests.client.world import SUBJECT, Order, World
from tests.faults.proxy import Proxy

DEADLINE_S = 60.0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("is_sent_before", [True, False])
def test_S10_S1_a_fork_in_the_middle_of_a_transaction_leaves_it_to_the_parent(
    is_sent_before: bool, any_world: World
) -> None:
    world = any_world
    with Session(world.engine) as session:
        session.execute(sa.insert(Order).values(label="a"))
        if is_sent_before:
            world.send("a", session)
        child = os.fork()
        if not child:
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        if not is_sent_before:
            world.send("a", session)
        session.commit()
    assert world.outcome() == (["a"], ["a"], set())


class SilentProxy(Proxy):
    """Passes everything on until it is told to keep the server's answers to itself."""

    is_silent = False

    def _to_client(self, client: socket.socket, server: socket.socket, faults: object) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                if not self.is_silent:
                    client.sendall(data)


def test_W3_a_server_that_takes_everything_and_answers_nothing_is_cut_off(
    server_world: World,
) -> None:
    world = server_world
    url = world.engine.url
    with SilentProxy(url.port or 0) as proxy:
        engine = sa.create_engine(url.set(host="127.0.0.1", port=proxy.port))
        dialect_of(engine).transaction_s_max = 1.0
        store = OutboxStore(engine)
        assert store.claim(token=b"t" * 16, limit=1, lease_ms=1_000) == []
        proxy.is_silent = True
        errors: list[Exception] = []

        def claim() -> None:
            try:
                store.claim(token=b"t" * 16, limit=1, lease_ms=1_000)
            except sa.exc.SQLAlchemyError as error:
                errors.append(error)

        claiming = threading.Thread(target=claim, daemon=True)
        claiming.start()
        claiming.join(DEADLINE_S)
        assert not claiming.is_alive()
        assert len(errors) == 1
        proxy.is_silent = False
        store.close()
        assert store.claim(token=b"t" * 16, limit=1, lease_ms=1_000) == []
        store.close()
        engine.dispose()


def test_S1_a_transaction_with_thousands_of_messages_and_a_swallowed_error_commits(
    any_world: World,
) -> None:
    world = any_world
    with Session(world.engine) as session:
        world.producer.send_many([Message(SUBJECT, str(i)) for i in range(2_500)], session=session)
        with suppress(sa.exc.IntegrityError), session.begin_nested():
            session.execute(sa.text("INSERT INTO business_order (id, label) VALUES (1, NULL)"))
        session.commit()
    assert len(world.outcome()[1]) == 2_500
