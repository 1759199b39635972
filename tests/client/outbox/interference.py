"""What a server, a network or another transaction does to a program in the middle of its work."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, Final

import pymysql
import sqlalchemy as sa

from tests.client.world import World
from tests.kit.waiting import wait_for

#: Rows to be locked against each other. Many, so that the other transaction of a deadlock is the
#: heavier one, and the program's own the victim.
LOCK_ROWS: Final = 300
JOIN_S_MAX: Final = 30
_KILL: Final = {
    "mysql": "KILL CONNECTION {}",
    "postgresql": "SELECT pg_terminate_backend({})",
}


def driver_of(connection: sa.Connection) -> Any:
    """The connection of the driver itself."""
    return connection.connection.driver_connection


def make_lock_rows(world: World) -> None:
    """The table that `deadlock` and `lock_timeout` need."""
    world.change("CREATE TABLE lock_row (id INTEGER PRIMARY KEY, n INTEGER NOT NULL)")
    values = ", ".join(f"({i}, 0)" for i in range(1, LOCK_ROWS + 1))
    world.change(f"INSERT INTO lock_row (id, n) VALUES {values}")


def server_id(driver: Any) -> int:
    """The number under which the server knows a connection of the driver."""
    if hasattr(driver, "thread_id"):  # of MySQL
        return int(driver.thread_id())
    if hasattr(driver, "get_server_pid"):  # asyncpg
        return int(driver.get_server_pid())
    if hasattr(driver, "info"):  # psycopg and psycopg2
        return int(driver.info.backend_pid)
    with closing(driver.cursor()) as cursor:  # pg8000
        cursor.execute("SELECT pg_backend_pid()")
        return int(cursor.fetchone()[0])


def kill(world: World, connection: sa.Connection) -> None:
    """The server ends this session, as an administrator or a fail-over would."""
    kill_driver(world, driver_of(connection))


def kill_driver(world: World, driver: Any) -> None:
    """The same for a connection of the driver."""
    if world.kind == "sqlite":
        return
    try:
        statement = _KILL[world.kind].format(server_id(driver))
    except world.sync_engine.dialect.loaded_dbapi.Error:
        return  # pg8000, in a transaction that has failed: so does its COMMIT
    with (
        closing(world.truth.connect()) as administrator,
        closing(administrator.cursor()) as cursor,
        suppress(pymysql.err.OperationalError),  # it is gone already
    ):
        cursor.execute(statement)
        while (
            world.kind == "postgresql" and cursor.fetchone()[0]
        ):  # until the server knows it no more
            cursor.execute(statement)


class Fate:
    """Decides what becomes of the application's next COMMIT, until `close`."""

    def __init__(self, world: World) -> None:
        self._world = world
        world.commits.now = self._commit
        self._next: str | None = None

    def arm(self, what: str) -> None:
        """`kill`: the server ends the session just before; `lose`: the answer never arrives."""
        self._next = what

    def disarm(self) -> None:
        self._next = None

    def close(self) -> None:
        self._world.commits.now = self._world.commits.real

    def _commit(self, driver: Any) -> None:
        what, self._next = self._next, None
        if what == "kill":
            kill_driver(self._world, getattr(driver, "driver_connection", driver))
        self._world.commits.real(driver)
        if what == "lose":
            raise self._world.commits.loaded_dbapi.OperationalError(2013, "the answer was lost")


class Deadlock:
    """Another transaction, which waits for the program while the program waits for it.

    The program executes `first`, calls `close_the_circle` and executes `second`: that fails, and the
    program is the victim. `with` ends the other transaction, however far it came.
    """

    first: Final = "UPDATE lock_row SET n = n + 1 WHERE id = 1"
    second: Final = "UPDATE lock_row SET n = n + 1 WHERE id = 2"

    def __init__(self, world: World) -> None:
        self._world = world
        self._other = world.truth.connect()
        self._cursor = self._other.cursor()
        self._thread = threading.Thread(target=self._wait_for_the_program)

    def __enter__(self) -> Deadlock:
        if self._world.kind == "postgresql":
            self._cursor.execute("SET LOCAL deadlock_timeout = '1h'")
        self._cursor.execute("UPDATE lock_row SET n = n + 1 WHERE id > 1")
        return self

    def close_the_circle(self) -> None:
        self._thread.start()
        if self._world.kind == "postgresql":
            # Its victim is who looks, once after its own time-out, when the circle is closed.
            waits = (
                "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
                f"AND pid = {server_id(self._other)}"
            )
            wait_for(lambda: self._world.read(waits), "the other one does not wait")

    def __exit__(self, *_: object) -> None:
        kill_driver(self._world, self._other)
        if self._thread.ident is not None:
            self._thread.join(JOIN_S_MAX)
        with suppress(Exception):
            self._other.close()

    def _wait_for_the_program(self) -> None:
        # What becomes of this transaction is not looked at.
        with suppress(Exception):
            self._cursor.execute(self.first)


@contextmanager
def locked_row(world: World) -> Iterator[str]:
    """A statement that does not get its lock."""
    with closing(world.truth.connect()) as other, closing(other.cursor()) as cursor:
        cursor.execute("UPDATE lock_row SET n = n + 1 WHERE id = 3")
        yield "SELECT n FROM lock_row WHERE id = 3 FOR UPDATE NOWAIT"
        other.rollback()
