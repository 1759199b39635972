"""Listeners of SQLAlchemy's events that send: what they send goes with what they write."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from qmq_client.errors import NoTransactionError
from tests.client.outbox.faces import drive, new_session, settled, within
from tests.client.outbox.hooks import HOOKS, hook
from tests.client.world import Order, World, a_world
from tests.conftest import MakeDatabase
from tests.kit.waiting import DEADLINE_S
from tests.services.drivers import MAIN, Driver, drivers

#: Events of the commit itself: a transaction that they saw is undone only by a COMMIT that fails.
OF_COMMIT: Final = ("before_commit", "commit")
REFUSED: Final = (NoTransactionError, sa.exc.InvalidRequestError)


@pytest.fixture(params=[one for one in drivers() if one.name in MAIN], ids=str)
def hooked_world(
    request: pytest.FixtureRequest, make_database: MakeDatabase, tmp_path: Path
) -> Iterator[World]:
    """With a publisher's thread, by the main drivers of each database."""
    driver: Driver = request.param
    options: dict[str, Any] = {"background": True, "real_clock": True, "driver": driver}
    with a_world(tmp_path, database=make_database(driver.kind), **options) as world:
        yield world


def run(world: World, main: Any) -> None:
    asyncio.run(main) if world.is_async else drive(main)


def inner(world: World, session: Any) -> Any:
    """The synchronous session, to which events belong."""
    return session.sync_session if world.is_async else session


def outcome(world: World) -> tuple[list[str], list[str], set[str]]:
    """Rows that hooks wrote, messages at the broker, rows that are left."""
    assert world.producer.flush(DEADLINE_S).is_done
    rows = sorted(label for label in world.committed_orders() if label.startswith("hook"))
    return rows, sorted(world.sent()), world.stored_ids()


def refuse(world: World) -> None:
    """The next COMMIT fails before it is done."""

    def fail(_: Any) -> None:
        world.commits.now = world.commits.real
        raise world.commits.loaded_dbapi.OperationalError(1, "refused")

    world.commits.now = fail


@pytest.mark.parametrize("name", HOOKS)
def test_S1_S2_S11_a_hook_sends_exactly_when_its_transaction_commits(
    hooked_world: World, name: str
) -> None:
    world = hooked_world

    async def transaction(label: str, *, is_committed: bool) -> None:
        def write(scope: Any) -> None:
            world.send(label, scope)
            connection = scope if isinstance(scope, sa.Connection) else scope.connection()
            connection.execute(sa.insert(Order).values(label=label))

        async with within(new_session(world)) as session:
            with hook(name, inner(world, session), world.sync_engine, write):
                session.add(Order(label=f"cause of {label}"))
                await settled(session.flush())
                if is_committed:
                    await settled(session.commit())
                elif name in OF_COMMIT:
                    refuse(world)
                    with pytest.raises(sa.exc.OperationalError):
                        await settled(session.commit())
                    await settled(session.rollback())
                else:
                    await settled(session.rollback())

    async def main() -> None:
        await transaction("hook undone", is_committed=False)
        await transaction("hook", is_committed=True)
        if world.is_async:
            await world.engine.dispose()

    run(world, main())
    assert outcome(world) == (["hook"], ["hook"], set())


def test_S8_a_send_after_the_commit_is_refused_and_nothing_is_sent(hooked_world: World) -> None:
    world = hooked_world
    refused: list[Exception] = []

    def listen(session: Any) -> None:
        with pytest.raises(REFUSED) as error:
            world.send("hook", session)
        refused.append(error.value)

    async def main() -> None:
        async with within(new_session(world)) as session:
            event.listen(inner(world, session), "after_commit", listen)
            session.add(Order(label="cause"))
            await settled(session.commit())
        if world.is_async:
            await world.engine.dispose()

    run(world, main())
    assert len(refused) == 1
    assert outcome(world) == ([], [], set())
    assert world.committed_orders() == {"cause"}
