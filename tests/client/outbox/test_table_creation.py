"""`create_tables`: what it makes, and of whose files it changes nothing but that."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from sqlalchemy import MetaData, create_engine, inspect
from sqlalchemy.ext.asyncio import create_async_engine

from qmq_client import Producer, create_tables, create_tables_async, make_tables
from qmq_client.errors import ConfigurationError
from qmq_client.outbox.table import choose_journal
from qmq_client.settings.sections import DatabaseSection
from qmq_client.testing import MemoryBroker, MemoryTransport
from tests.services.databases import Database


def journal_of(path: Path) -> str:
    with closing(sqlite3.connect(path)) as connection:
        (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
        assert connection.execute("SELECT count(*) FROM qmq_outbox").fetchone() == (0,)
    return str(mode)


@pytest.mark.parametrize(("is_new", "journal"), [(True, "wal"), (False, "delete")])
def test_a_new_file_gets_a_write_ahead_log_and_another_keeps_its_journal(
    tmp_path: Path, is_new: bool, journal: str
) -> None:
    path = tmp_path / "shop.db"
    if not is_new:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE business (id)")
    engine = create_engine(f"sqlite:///{path}")
    create_tables(engine)
    create_tables(engine)
    engine.dispose()
    assert journal_of(path) == journal


@pytest.mark.parametrize(("is_new", "journal"), [(True, "wal"), (False, "delete")])
def test_an_asynchronous_application_gets_the_same(
    tmp_path: Path, is_new: bool, journal: str
) -> None:
    path = tmp_path / "shop.db"
    if not is_new:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE business (id)")

    async def make() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
        await create_tables_async(engine)
        await create_tables_async(engine)
        await engine.dispose()

    asyncio.run(make())
    assert journal_of(path) == journal


def test_the_engine_inside_an_asynchronous_one_may_be_given_inside_its_run_sync(
    tmp_path: Path,
) -> None:
    path = tmp_path / "shop.db"

    async def make() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
        async with engine.connect() as connection:
            await connection.run_sync(lambda _: create_tables(engine.sync_engine))
        await engine.dispose()

    asyncio.run(make())
    assert journal_of(path) == "wal"


def test_an_asynchronous_engine_makes_the_tables_of_each_database(a_database: Database) -> None:
    tables = make_tables(MetaData(), prefix="our_")

    async def make() -> None:
        engine = create_async_engine(a_database.async_url)
        await create_tables_async(engine, tables)
        await engine.dispose()

    asyncio.run(make())
    engine = a_database.engine()
    assert set(inspect(engine).get_table_names()) == {table.name for table in tables.all}


def test_create_tables_refuses_an_asynchronous_engine_and_names_its_twin(tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}")
    for given in (engine, engine.sync_engine):
        with pytest.raises(ConfigurationError, match="await create_tables_async"):
            create_tables(given)  # type: ignore[arg-type]  # what a caller may do


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python has no such modes")
@pytest.mark.parametrize("mode", [True, False])
def test_S1_python_s_own_control_of_transactions_is_refused(tmp_path: Path, mode: bool) -> None:
    path = tmp_path / "shop.db"
    engine = create_engine(f"sqlite:///{path}", connect_args={"autocommit": mode})
    with pytest.raises(ConfigurationError, match="Leave `autocommit` out"):
        create_tables(engine)
    sound = create_engine(f"sqlite:///{path}")
    create_tables(sound)
    with pytest.raises(ConfigurationError, match="Leave `autocommit` out"):
        Producer(engine, MemoryTransport(MemoryBroker()))
    sound.dispose()
    engine.dispose()


@pytest.mark.parametrize("mode", [True, False])
def test_S1_the_same_where_python_is_older(mode: bool) -> None:
    with pytest.raises(ConfigurationError, match="Leave `autocommit` out"):
        choose_journal(SimpleNamespace(autocommit=mode))


@pytest.mark.parametrize(
    "prefix", ["a" * 33, "sh\u00f6p_", "shop\n", "shop\0", "\ud800", "x; DROP", 'a"', "a`", "a\\"]
)
def test_a_prefix_that_no_command_takes_is_refused_where_it_is_given(prefix: str) -> None:
    with pytest.raises(ConfigurationError, match=r"prefix.*Use up to 32 printable characters"):
        make_tables(MetaData(), prefix=prefix)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"name": "a", "url": "b", "table_prefix": prefix}, DatabaseSection)


@pytest.mark.parametrize("schema", ["a" * 64, "sh\u00f6p", "shop\t", "x; DROP"])
def test_a_schema_that_no_command_takes_is_refused_where_it_is_given(schema: str) -> None:
    with pytest.raises(ConfigurationError, match=r"schema.*Use up to 63 printable characters"):
        make_tables(MetaData(), schema=schema)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"name": "a", "url": "b", "schema": schema}, DatabaseSection)
