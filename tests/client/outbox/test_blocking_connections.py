"""S11: the publisher of an asynchronous engine connects as that engine does, whatever says how.

The URLs here lead nowhere by themselves: what is missing comes from `connect_args` or from a listener,
as a search path, certificates, or a password that is fetched anew for each connection do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from qmq_client.doctor import examine
from qmq_client.message import Message
from qmq_client.options import ProducerOptions
from qmq_client.producer import Producer
from qmq_client.testing import MemoryBroker, MemoryTransport
from tests.client.world import SUBJECT, set_up
from tests.services.databases import Database

#: What each driver calls the database.
_NAMED: Final = {"mysql": "db", "postgresql": "dbname"}

Open = Callable[[Database], AsyncEngine]


def _in_connect_args(database: Database) -> AsyncEngine:
    bare, missing = _halves(database)
    return create_async_engine(bare, connect_args=missing)


def _by_a_listener(database: Database) -> AsyncEngine:
    bare, missing = _halves(database)
    engine = create_async_engine(bare)

    @event.listens_for(engine.sync_engine, "do_connect")
    def fill_in(_: Any, __: Any, ___: Any, options: dict[str, Any]) -> None:
        options.update(missing)

    return engine


def _halves(database: Database) -> tuple[sa.URL, dict[str, Any]]:
    """A URL that leads nowhere, and the arguments that it lacks."""
    url = make_url(database.async_url).set(query={})
    missing = {"host": url.host, "port": url.port, _NAMED[database.kind]: database.name}
    return url.set(host="nowhere.invalid", port=None, database="nobody"), missing


@pytest.mark.parametrize("open_engine", [_in_connect_args, _by_a_listener])
def test_S11_the_publisher_connects_as_the_asynchronous_engine_does(
    a_server_database: Database, open_engine: Open
) -> None:
    set_up(a_server_database.url)
    assert asyncio.run(_sent(open_engine(a_server_database))) == ["a"]


def test_S11_what_only_an_asynchronous_driver_takes_is_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "shop.sqlite"
    set_up(f"sqlite:///{path}")
    arguments = {"timeout": 7.0, "iter_chunk_size": 3}
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}", connect_args=arguments)
    assert asyncio.run(_sent(engine)) == ["a"]


def test_X1_the_doctor_examines_where_the_asynchronous_engine_leads(
    postgresql_database: Database,
) -> None:
    set_up(postgresql_database.url)
    engine = _by_a_listener(postgresql_database)
    assert "schema.missing" not in {finding.id for finding in examine(engine)}


async def _sent(engine: AsyncEngine) -> list[Any]:
    broker = MemoryBroker()
    options = ProducerOptions(background=False)
    with Producer(engine, MemoryTransport(broker), options=options) as producer:
        async with AsyncSession(engine) as session, session.begin():
            await producer.send(Message(SUBJECT, "a"), session=session)
        assert producer.flush().is_done
    await engine.dispose()
    return [message.body for message in broker.messages(SUBJECT)]
