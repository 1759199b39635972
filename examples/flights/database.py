"""The run's databases: one for each service that has one, in files or on a real server.

A server is found or started by the ladder of the tests (`tests/services/ladder.py`), which also takes
the addresses in `QMQ_TEST_MYSQL_URL` and `QMQ_TEST_POSTGRESQL_URL`. What was made is dropped in the end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import make_url
from sqlalchemy.orm import DeclarativeBase

from examples.flights.options import KINDS
from examples.flights.plan import BOARD, TALLIES

_VERSION = {
    "sqlite": "SELECT 'SQLite ' || sqlite_version()",
    "mysql": "SELECT version()",
    "postgresql": "SELECT 'PostgreSQL ' || current_setting('server_version')",
}


class ServerMissingError(Exception):
    """No server of this kind runs here and none can be started; says what was tried."""


@contextmanager
def open_databases(kind: str, directory: Path) -> Iterator[dict[str, str]]:
    """Addresses of empty databases by name, for SQLAlchemy.

    Raises `ServerMissingError` where no server can be had.
    """
    if kind == "sqlite":
        yield {name: f"sqlite:///{directory / name}.sqlite" for name in (BOARD, TALLIES)}
        return
    # Late: the ladder needs the drivers of both servers.
    from tests.services.databases import Databases
    from tests.services.ladder import PACKAGES, VARIABLES, ServiceMissingError
    from tests.services.private import NotStartedError

    server, made = Databases(), {}
    try:
        try:
            address = server.service(KINDS[kind]).url
        except ServiceMissingError as error:
            remedy = f"Install {PACKAGES[KINDS[kind]]}, or name a running one by {VARIABLES[KINDS[kind]]}"
            raise ServerMissingError(f"there is no {kind} server. {remedy}.\n{error}") from error
        except NotStartedError as error:
            raise ServerMissingError(str(error)) from error
        for name in (BOARD, TALLIES):
            unique = f"qmq_flights_{name}_{os.urandom(4).hex()}"
            made[name] = server.make_on(address, KINDS[kind], unique)
        yield {name: database.url for name, database in made.items()}
    finally:
        for database in made.values():
            database.drop()
        server.close()


def open_engine(url: str, base: type[DeclarativeBase]) -> sa.Engine:
    """Engine of a service's database with its tables; every commit is on the disk."""
    if make_url(url).get_backend_name() != "sqlite":
        engine = sa.create_engine(url)
    else:
        engine = sa.create_engine(url, connect_args={"timeout": 30})
        sa.event.listen(engine, "connect", _configure_sqlite)
    base.metadata.create_all(engine)
    return engine


def read(url: str, query: str) -> list[Any]:
    """What is committed, seen through a driver's connection without anything of the product."""
    address = make_url(url)
    if address.get_backend_name() == "sqlite":
        address = address.set(database=f"file:{address.database}").update_query_dict(
            {"mode": "ro", "uri": "true", "timeout": "10"}
        )
    dialect = address.get_dialect()
    arguments, options = dialect().create_connect_args(address)
    with closing(dialect.import_dbapi().connect(*arguments, **options)) as connection:
        cursor = connection.cursor()
        cursor.execute(query)
        rows: list[Any] = cursor.fetchall()
        return list(rows)


def version_of(url: str) -> str:
    """What the database calls itself."""
    version: str = read(url, _VERSION[make_url(url).get_backend_name()])[0][0]
    return version


def _configure_sqlite(connection: Any, _: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()
