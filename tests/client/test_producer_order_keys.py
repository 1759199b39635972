"""Ordering keys of any script, also where the application's connections have a narrow character set."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from qmq_client.errors import EncodingError
from qmq_client.message import Message
from tests.client.publishing import sweep
from tests.client.world import OUTBOX, SUBJECT, World, a_world
from tests.conftest import MakeDatabase
from tests.services.databases import Database

#: How each driver is told that the application speaks no Unicode with its server.
NARROW = {"mysql": {"charset": "latin1"}, "postgresql": {"client_encoding": "latin1"}}
#: The short form of MySQL's UTF-8.
SHORT = {"charset": "utf8mb3"}
WIDE_KEY = "日本-17"
LONG_KEY = "😀-17"


def a_narrow_world(tmp_path: Path, database: Database, connecting: Any, **more: Any) -> Any:
    options = {"connect_args": connecting}
    return a_world(tmp_path, database=database, engine_options=options, order_by_key=True, **more)


def keyed(body: str, key: str) -> Message:
    return Message(SUBJECT, body, key=key)


def check_refused(world: World, error: EncodingError) -> None:
    assert (error.field, "utf8" in error.remedy) == ("key", True)
    assert world.read(f"SELECT subject FROM {OUTBOX}") == []


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
def test_S7_an_ordering_key_beyond_the_connections_character_set_is_refused_by_name(
    tmp_path: Path, a_server_database: Database, is_async: bool
) -> None:
    connecting = NARROW[a_server_database.kind]

    async def send_async(world: World, key: str) -> None:
        try:
            async with AsyncSession(world.engine) as session, session.begin():
                await world.producer.send(keyed("a", key), session=session)
        finally:
            await world.engine.dispose()

    def send(world: World, key: str) -> None:
        if is_async:
            return asyncio.run(send_async(world, key))
        with Session(world.engine) as session, session.begin():
            world.producer.send(keyed("a", key), session=session)
        return None

    with a_narrow_world(tmp_path, a_server_database, connecting, is_async=is_async) as world:
        with pytest.raises(EncodingError) as refused:
            send(world, WIDE_KEY)
        check_refused(world, refused.value)
        send(world, "café-17")
        assert world.producer.flush().is_done
        assert world.sent() == ["a"]


def test_S7_mysqls_short_utf8_takes_the_keys_it_can_spell_and_no_others(
    tmp_path: Path, make_database: MakeDatabase
) -> None:
    with a_narrow_world(tmp_path, make_database("mysql"), SHORT) as world:
        with Session(world.engine) as session, session.begin():
            with pytest.raises(EncodingError) as refused:
                world.producer.send(keyed("a", LONG_KEY), session=session)
            world.producer.send(keyed("b", WIDE_KEY), session=session)
            check_refused(world, refused.value)
        assert world.producer.flush().is_done
        assert world.sent() == ["b"]


def test_O4_O6_a_key_that_the_application_cannot_spell_holds_up_no_other_who_finds_its_row(
    tmp_path: Path, a_server_database: Database
) -> None:
    connecting = NARROW[a_server_database.kind]
    with (
        a_world(tmp_path, database=a_server_database, order_by_key=True) as wide,
        a_narrow_world(tmp_path, a_server_database, connecting) as world,
    ):
        with Session(wide.engine) as session, session.begin():
            for body, key in (("1", WIDE_KEY), ("2", WIDE_KEY), ("3", LONG_KEY), ("4", LONG_KEY)):
                wide.producer.send(keyed(body, key), session=session)
        world.make_due()
        assert len(sweep(world).sent) == 4
        assert world.sent() == ["1", "2", "3", "4"]
        assert world.stored_ids() == set()
