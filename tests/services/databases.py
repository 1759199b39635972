"""A fresh database for one test, on any of the three kinds, gone after it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import make_url

from tests.services.ladder import Service, find_service, recipe_or_install
from tests.services.mysql import WITHOUT_TLS
from tests.services.private import PrivateServer
from tests.services.run import TestRun

KINDS: Final = ("sqlite", "mysql", "postgresql")
#: The driver of each kind for applications with a loop.
ASYNC_DRIVERS: Final = {
    "sqlite": "sqlite+aiosqlite",
    "mysql": "mysql+asyncmy",
    "postgresql": "postgresql+psycopg",
}
#: A test that leaves a lock behind shall fail, not hang, when its database is dropped.
_LOCK_WAIT_S: Final = 10


def for_asyncio(url: str) -> str:
    """The same database for `create_async_engine`."""
    made = make_url(url)
    made = made.set(drivername=ASYNC_DRIVERS[made.get_backend_name()])
    made = made.difference_update_query([WITHOUT_TLS])  # an option of PyMySQL
    return made.render_as_string(hide_password=False)


def is_mariadb(engine: sa.Engine) -> bool:
    """Whether a server of the kind `mysql` is MariaDB. Requires: the engine has connected."""
    return bool(getattr(engine.dialect, "is_mariadb", False))


class Database:
    """One database. Engines made by `engine` are disposed of with it."""

    def __init__(self, kind: str, url: str, drop: Callable[[], None]) -> None:
        self.kind = kind
        #: For a synchronous engine; a password is in it.
        self.url = url
        self._drop = drop
        self._engines: list[sa.Engine] = []

    @property
    def name(self) -> str:
        """What the server calls it; a path for SQLite."""
        return make_url(self.url).database or ""

    @property
    def async_url(self) -> str:
        """The same for `create_async_engine`."""
        return for_asyncio(self.url)

    def engine(self, **options: Any) -> sa.Engine:
        """A new engine with a pool of its own."""
        engine = sa.create_engine(self.url, **options)
        self._engines.append(engine)
        return engine

    def drop(self) -> None:
        """Remove it, whoever is still connected."""
        for engine in self._engines:
            engine.dispose()
        self._drop()


class Databases:
    """Makes databases for one worker; `close` at its end."""

    def __init__(self) -> None:
        self._run: TestRun | None = None
        self._services: dict[str, Service] = {}
        self._administrators: dict[str, sa.Engine] = {}
        self._count = 0

    def make(self, kind: str, folder: Path) -> Database:
        """An empty database. `folder` is where SQLite's file goes.

        Raises `ServiceMissingError` where no rung of the ladder holds.
        """
        self._count += 1
        if kind == "sqlite":
            path = folder / f"database-{self._count}.db"
            return Database(kind, f"sqlite+pysqlite:///{path}", lambda: None)
        service = self.service(kind)
        name = f"qmq_test_{secrets.token_hex(8)}"
        return self.make_on(service.url, kind, name)

    def make_on(self, server_url: str, kind: str, name: str) -> Database:
        """A database of this name on any server."""
        administrator = self._administrator(server_url)
        with administrator.connect() as connection:
            connection.exec_driver_sql(f"CREATE DATABASE {name}{_CREATE[kind]}")
        url = make_url(server_url).set(database=name).render_as_string(hide_password=False)
        return Database(kind, url, lambda: _DROP[kind](administrator, name))

    def service(self, kind: str) -> Service:
        """The server that all workers share."""
        if kind not in self._services:
            self._services[kind] = find_service(self.run, kind)
        return self._services[kind]

    def private_server(
        self,
        kind: str,
        *,
        environment: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> PrivateServer:
        """A server for one test alone, not started. Raises `RungError` when none is installed."""
        recipe = recipe_or_install(self.run, kind)
        return PrivateServer(self.run, recipe, environment=environment, options=options)

    @property
    def run(self) -> TestRun:
        """The run of this worker; entered by the first test that needs a server."""
        if self._run is None:
            self._run = TestRun()
        return self._run

    def close(self) -> None:
        """Let go of the servers; the last worker's keeper ends them."""
        for engine in self._administrators.values():
            engine.dispose()
        if self._run is not None:
            self._run.close()

    def _administrator(self, url: str) -> sa.Engine:
        if url not in self._administrators:
            self._administrators[url] = sa.create_engine(
                url, isolation_level="AUTOCOMMIT", poolclass=sa.pool.NullPool
            )
        return self._administrators[url]


def _drop_in_mysql(administrator: sa.Engine, name: str) -> None:
    query = sa.text("SELECT id FROM information_schema.processlist WHERE db = :name")
    with administrator.connect() as connection:
        for number in connection.scalars(query, {"name": name}).all():
            _kill(connection, number)
        connection.exec_driver_sql(f"SET SESSION lock_wait_timeout = {_LOCK_WAIT_S}")
        connection.exec_driver_sql(f"DROP DATABASE IF EXISTS {name}")


def _kill(connection: sa.Connection, number: int) -> None:
    with suppress(sa.exc.DBAPIError):  # it may have left by itself meanwhile
        connection.exec_driver_sql(f"KILL {number}")


def _drop_in_postgresql(administrator: sa.Engine, name: str) -> None:
    with administrator.connect() as connection:
        connection.exec_driver_sql(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


_CREATE: Final = {"mysql": " CHARACTER SET utf8mb4", "postgresql": ""}
_DROP: Final = {"mysql": _drop_in_mysql, "postgresql": _drop_in_postgresql}
