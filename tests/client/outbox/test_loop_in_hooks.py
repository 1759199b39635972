"""E13: in the commit hook of an asynchronous session a loop is running. Ours leaves it alone, and the
application's may use it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession

from qmq_client.message import Message
from tests.client.world import SUBJECT, Order, World, a_world
from tests.services.databases import Database


def test_E13_S5_S11_a_task_made_in_a_commit_hook_may_send_and_our_hook_makes_none(
    a_database: Database, tmp_path: Path
) -> None:
    story: list[str] = []
    tasks: list[asyncio.Task[None]] = []

    async def follow(world: World) -> None:
        story.append("task")
        await world.producer.send_now_async(Message(SUBJECT, "then"))

    async def main(world: World) -> None:
        async with AsyncSession(world.engine) as session:
            await world.producer.send(Message(SUBJECT, "first"), session=session)
            await session.execute(sa.insert(Order).values(label="first"))
            before = asyncio.all_tasks()
            await session.commit()
            assert asyncio.all_tasks() == before, "a task of ours"

            @event.listens_for(session.sync_session, "after_commit")
            def _hook(_: object) -> None:
                story.append("hook")
                tasks.append(asyncio.create_task(follow(world)))

            await world.producer.send(Message(SUBJECT, "second"), session=session)
            await session.execute(sa.insert(Order).values(label="second"))
            await session.commit()
            story.append("committed")
        await asyncio.gather(*tasks)
        await world.engine.dispose()

    with a_world(tmp_path, database=a_database, is_async=True) as world:
        asyncio.run(main(world))
        # Whether the task runs before `commit` returns depends on what the driver waits for then.
        assert (story[0], sorted(story)) == ("hook", ["committed", "hook", "task"])
        assert world.outcome() == (["first", "second"], ["first", "second", "then"], set())
