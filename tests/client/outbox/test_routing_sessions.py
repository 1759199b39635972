"""Sessions with several engines: a message goes where the session would write to the outbox."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from qmq_client.errors import WrongDatabaseError
from qmq_client.message import Message
from qmq_client.outbox.table import DEFAULT_TABLES
from tests.client.world import SUBJECT, Order, World, a_world
from tests.conftest import MakeDatabase
from tests.services.databases import Database

OUTBOX = DEFAULT_TABLES.outbox
#: What each kind of `get_bind` sends to the primary, beside what is flushed.
WRITES = {
    "the recipe of SQLAlchemy's pages": (sa.Update, sa.Delete),
    "one that knows INSERT only": (sa.Insert,),
}


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'elsewhere.sqlite'}")
    Order.metadata.create_all(engine)
    yield engine
    engine.dispose()


def routing(primary: sa.Engine, replica: sa.Engine, writes: tuple[type, ...]) -> type[Session]:
    """A session class that writes to the one and reads from the other."""

    class Routing(Session):
        def get_bind(self, mapper: Any = None, *, clause: Any = None, **_: Any) -> sa.Engine:
            return primary if self._flushing or isinstance(clause, writes) else replica

    return Routing


@pytest.mark.parametrize("recipe", WRITES)
def test_S1_S2_a_session_that_reads_elsewhere_sends_before_its_first_write(
    any_world: World, elsewhere: sa.Engine, recipe: str
) -> None:
    with routing(any_world.sync_engine, elsewhere, WRITES[recipe])() as session:
        session.execute(sa.select(Order)).all()  # on the replica
        any_world.send("a", session)
        any_world.send("b", session)
        session.add(Order(label="a"))
        session.flush()
        any_world.send("c", session)
        session.commit()
        any_world.send("d", session)
        session.add(Order(label="d"))
        session.rollback()
    assert any_world.outcome() == (["a"], ["a", "b", "c"], set())


@pytest.mark.parametrize("recipe", WRITES)
@pytest.mark.parametrize("is_awaited", [True, False])
def test_S1_S11_an_asynchronous_session_does_so_too(
    a_database: Database, tmp_path: Path, elsewhere: sa.Engine, recipe: str, is_awaited: bool
) -> None:
    async def main(world: World) -> None:
        chosen = routing(world.sync_engine, elsewhere, WRITES[recipe])
        async with AsyncSession(sync_session_class=chosen) as session:
            for label, is_wanted in (("early", False), ("a", True)):
                sent = world.producer.send(Message(SUBJECT, label), session=session)
                if is_awaited:
                    await sent
                session.add(Order(label=label))
                await (session.commit() if is_wanted else session.rollback())
        await world.engine.dispose()

    with a_world(tmp_path, database=a_database, is_async=True) as world:
        asyncio.run(main(world))
        assert world.outcome() == (["a"], ["a"], set())


@pytest.mark.parametrize("is_twophase", [False, True])
def test_S1_S2_a_session_with_binds_goes_by_the_one_of_the_outbox_table(
    make_database: MakeDatabase, tmp_path: Path, is_twophase: bool
) -> None:
    other = make_database("mysql").engine()
    notes = sa.Table("note", sa.MetaData(), sa.Column("id", sa.Integer(), primary_key=True))
    notes.create(other)
    with a_world(tmp_path, database=make_database("mysql")) as world:
        binds: dict[Any, Any] = {Order: world.engine, notes: other, OUTBOX: world.engine}
        with Session(binds=binds, twophase=is_twophase) as session:
            world.send("a", session)
            session.execute(sa.insert(notes))
            session.add(Order(label="a"))
            session.commit()
            world.send("b", session)
            session.rollback()
        assert world.outcome() == (["a"], ["a"], set())


def test_S8_a_session_that_writes_to_another_database_is_refused(
    world: World, elsewhere: sa.Engine
) -> None:
    for session in (Session(elsewhere), Session(binds={Order: world.engine}), Session()):
        with session, pytest.raises(WrongDatabaseError, match="qmq_outbox"):
            world.send("a", session)
    with elsewhere.connect() as connection, pytest.raises(WrongDatabaseError, match="qmq_outbox"):
        world.send("a", connection)
