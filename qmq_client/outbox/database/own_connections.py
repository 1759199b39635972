"""The publisher's and the watchdog's own connections to a database, next to the application's.

They come from a separate pool and are opened like the application's (with its `connect_args` and
listeners). Each is in AUTOCOMMIT, so a single statement is one round trip and one transaction;
longer transactions begin and end by explicit statements. Work is written once, for a synchronous
connection: with an asynchronous driver it runs on an event loop of this object, through SQLAlchemy's
greenlets.

Deadlines: a driver may wait forever on a silent connection (a frozen server behind a proxy, a stalled
pooler); libpq has no time-out for that. The publisher's transactions are short, so each has a
deadline. At the deadline the socket is shut down, the driver finds its connection lost, and the
thread continues with an error. One thread watches all of them, and ends when there was none for a
minute.

Forks: SQLite does not support forks, for two reasons, both reproduced. While a thread is inside SQLite, it may hold a
lock of the library; a child inherits that, and hangs at its first use of any database. And the
library keeps the file locks of the process in its memory: a child that inherits an open connection
assumes that it holds them, and when the parent closes its last connection, it deletes the write-ahead
log that the child is writing to. So a fork waits until no publisher is inside SQLite, and the idle
connections of publishers are closed before it. The application must handle its own connections:
SQLAlchemy's documentation says to dispose of an engine before a fork.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Final, TypeVar
from weakref import WeakSet

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.pool import StaticPool

from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.outbox.database.dialect import OutboxDialect
from qmq_client.outbox.database.shared_connection import shared_connection
from qmq_client.outbox.database.sqlite_file import follow_file

#: Longest wait of a fork: a publisher's transaction takes milliseconds, but may wait some seconds
#: for a lock that the forking thread holds.
FORK_S_MAX: Final = 5.0


class SqliteUse:
    """The use of one SQLite file by one publisher or watchdog, from one thread at a time."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        #: Reentrant, because the code inside may fork.
        self._lock = threading.RLock()
        self._is_held_for_fork = False
        _uses.add(self)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Around each use of the file."""
        with self._lock:
            yield

    def before_fork(self, end_s: float) -> None:
        """Wait until no connection is in use, or until `end_s`, and close the idle connections."""
        left_s = max(0.0, end_s - SYSTEM_CLOCK.monotonic_s())
        self._is_held_for_fork = self._lock.acquire(timeout=left_s)
        if isinstance(self._engine.pool, sa.QueuePool) and self._engine.pool.checkedin():
            self._engine.dispose()

    def after_fork(self) -> None:
        """In the parent: continue."""
        if self._is_held_for_fork:
            self._is_held_for_fork = False
            self._lock.release()

    def after_fork_in_child(self) -> None:
        """In the child: forget the thread that was inside, which does not exist here."""
        self._lock = threading.RLock()
        self._is_held_for_fork = False


_uses: Final[WeakSet[SqliteUse]] = WeakSet()


def _before_fork() -> None:
    end_s = SYSTEM_CLOCK.monotonic_s() + FORK_S_MAX
    for use in list(_uses):
        use.before_fork(end_s)


def _after_fork() -> None:
    for use in list(_uses):
        use.after_fork()


def _after_fork_in_child() -> None:
    for use in list(_uses):
        use.after_fork_in_child()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
)


_LOOK_S: Final = 1.0
_IDLE_LOOKS_MAX: Final = 60


class _Deadlines:
    """Sockets with the times at which they are cut. Safe for any number of threads."""

    def __init__(self) -> None:
        #: Held while a socket is cut, because its file number may be reused after its transaction.
        self._lock = threading.Lock()
        #: File number and time of each open transaction.
        self._open: dict[object, tuple[int, float]] = {}
        self._is_running = False

    @contextmanager
    def around(self, number: int, end_s: float) -> Iterator[None]:
        """Cut this socket at `end_s` unless the block has ended."""
        mine = object()
        with self._lock:
            if not self._is_running:
                threading.Thread(target=self._run, name="qmq-deadlines", daemon=True).start()
                self._is_running = True
            self._open[mine] = (number, end_s)
        try:
            yield
        finally:
            with self._lock:
                self._open.pop(mine, None)

    def _run(self) -> None:
        idle_looks = 0
        while True:
            SYSTEM_CLOCK.sleep(_LOOK_S)
            now_s = SYSTEM_CLOCK.monotonic_s()
            with self._lock:
                for mine, (number, end_s) in list(self._open.items()):
                    if end_s <= now_s:
                        del self._open[mine]
                        _cut(number)
                idle_looks = 0 if self._open else idle_looks + 1
                if idle_looks > _IDLE_LOOKS_MAX:
                    self._is_running = False
                    return


_deadlines = _Deadlines()


def _forget() -> None:
    global _deadlines  # noqa: PLW0603  # a forked child has neither the thread nor the sockets
    _deadlines = _Deadlines()


os.register_at_fork(after_in_child=_forget)


@contextmanager
def answered_within(driver: Any, seconds: float) -> Iterator[None]:
    """Around a transaction: if the block takes longer, the driver's connection is cut.

    `driver` is a blocking connection. Without a public `fileno` it does nothing: other drivers get
    a time limit when they connect.
    """
    number = _file_number(driver)
    if number is None:
        yield
        return
    with _deadlines.around(number, SYSTEM_CLOCK.monotonic_s() + seconds):
        yield


def _cut(number: int) -> None:
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def _file_number(driver: Any) -> int | None:
    with suppress(Exception):  # closed, or of a kind that has none
        return int(driver.fileno())
    return None


_Result = TypeVar("_Result")
#: Work on a connection.
Work = Callable[[sa.Connection], _Result]

#: Pools and loops of the parent: closing their sockets here would end its sessions.
_LEFT_TO_THE_PARENT: Final[list[object]] = []
#: Key in a connection's `info`: the connection was checked after it was opened.
_CHECKED: Final = "qmq_checked"
#: Drivers that take time limits of a socket as arguments, by their names for them. The others have a
#: public `fileno` (`own_connections.py`), are local files, or wait on the store's event loop, where
#: a wait can be ended.
_SOCKET_LIMITS: Final = {
    "pymysql": ("read_timeout", "write_timeout"),
    "mysqldb": ("read_timeout", "write_timeout"),
    "pg8000": ("timeout",),
}


class OwnConnections:
    """A pool for one store. Safe for any number of threads."""

    def __init__(self, engine: sa.Engine, dialect: OutboxDialect) -> None:
        """`engine`: the application's, synchronous or the one inside an `AsyncEngine`."""
        self._dialect = dialect
        is_sqlite = engine.dialect.name == "sqlite"
        #: A database in memory has a single connection, so the application's own engine is used.
        self._is_shared = is_sqlite and isinstance(engine.pool, StaticPool)
        self._use: SqliteUse | None = None
        self._loop = _Loop() if engine.dialect.is_async else None
        if self._is_shared:
            self.engine = engine
            shared_connection(engine.pool)
            return
        # Errors are logged, so they must not contain a token or a record.
        self.engine = sa.Engine(
            engine.pool.recreate(), engine.dialect, engine.url, hide_parameters=True
        )
        event.listen(self.engine, "connect", self._on_connect)
        event.listen(engine, "do_connect", _limit_in_time)
        follow_file(self.engine)
        if is_sqlite and self._loop is None:
            self._use = SqliteUse(self.engine)

    def look(self, work: Work[_Result]) -> _Result:
        """Run work of one statement that reads committed rows."""
        return self._run(work)

    def read(self, work: Work[_Result]) -> _Result:
        """Run work that reads committed rows, in a transaction if the database needs settings for it."""
        return self._run(lambda connection: self._transaction(connection, work, is_to_write=False))

    def write(self, work: Work[_Result]) -> _Result:
        """Run work that writes, in one short transaction; committed, or rolled back if it raises."""
        return self._run(lambda connection: self._transaction(connection, work, is_to_write=True))

    def after_fork(self) -> None:
        """In a forked child: drop the parent's connections without touching them."""
        if self._is_shared:
            return
        _LEFT_TO_THE_PARENT.append(self.engine.pool)
        self.engine.dispose(close=False)
        if self._loop is not None:
            _LEFT_TO_THE_PARENT.append(self._loop)
            self._loop = _Loop()

    def rest(self) -> None:
        """Close the idle connections except one."""
        pool = self.engine.pool
        if self._loop is not None or not isinstance(pool, sa.QueuePool) or pool.checkedin() < 2:
            return
        with suppress(sa.exc.SQLAlchemyError), self._access():  # a lost one is not kept
            kept, *others = [pool.connect() for _ in range(pool.checkedin())]
            for other in others:
                other.invalidate()
                other.close()
            kept.close()

    def close(self) -> None:
        """Close the idle connections; new ones are opened at the next use."""
        if self._is_shared:
            return
        if self._loop is not None:
            self._loop.close(self.engine)
            return
        with self._access():
            self.engine.dispose()

    def _transaction(
        self, connection: sa.Connection, work: Work[_Result], *, is_to_write: bool
    ) -> _Result:
        if self._is_shared:
            return _on_the_shared(connection, work, is_to_write)
        if is_to_write and _CHECKED not in connection.info:
            self._dialect.check_writable(connection)
            connection.info[_CHECKED] = True
        self._dialect.begin(connection, is_to_write=is_to_write)
        try:
            result = work(connection)
            connection.exec_driver_sql("COMMIT")
        except BaseException:
            _roll_back(connection)
            raise
        return result

    def _run(self, work: Work[_Result]) -> _Result:
        if self._loop is not None:
            return self._loop.run(lambda: self._run_async(work))
        with self._access(), _our_connects(self._dialect), self.engine.connect() as connection:
            driver = connection.connection.driver_connection
            with answered_within(driver, self._dialect.transaction_s_max):
                return work(connection)

    async def _run_async(self, work: Work[_Result]) -> _Result:
        from sqlalchemy.ext.asyncio import AsyncEngine

        try:
            with _our_connects(self._dialect):
                async with (
                    asyncio.timeout(self._dialect.transaction_s_max),
                    AsyncEngine(self.engine).connect() as connection,
                ):
                    with self._access():
                        return await connection.run_sync(work)
        except TimeoutError as error:
            raise sa.exc.TimeoutError(
                f"the database did not answer within {self._dialect.transaction_s_max} s"
            ) from error

    def _access(self) -> AbstractContextManager[object]:
        if self._is_shared:
            # Left after the connection is returned, because returning it rolls back.
            return shared_connection(self.engine.pool).enter()
        return nullcontext() if self._use is None else self._use.inside()

    def _on_connect(self, driver: Any, _: object) -> None:
        self.engine.dialect.set_isolation_level(driver, "AUTOCOMMIT")
        self._dialect.on_connect(driver, self.engine.dialect)


def _on_the_shared(connection: sa.Connection, work: Work[_Result], is_to_write: bool) -> _Result:
    """A transaction on the application's own connection, begun and ended like the application's."""
    with connection.begin():
        return work(connection)


def _roll_back(connection: sa.Connection) -> None:
    """Roll back a failed transaction; without an answer, the connection is discarded."""
    if connection.invalidated:
        return
    try:
        connection.exec_driver_sql("ROLLBACK")
    except Exception:  # after any error: the next work gets another connection
        connection.invalidate()


class _OurConnects(threading.local):
    """The dialect for which this thread opens connections, if they belong to a store."""

    dialect: OutboxDialect | None = None


_ours: Final = _OurConnects()


@contextmanager
def _our_connects(dialect: OutboxDialect) -> Iterator[None]:
    _ours.dialect = dialect
    try:
        yield
    finally:
        _ours.dialect = None


def _limit_in_time(dialect: sa.Dialect, _: object, __: object, options: dict[str, Any]) -> None:
    """A listener of `do_connect` that sets time limits only for a store's connections."""
    if _ours.dialect is None:
        return
    seconds = max(1, round(_ours.dialect.transaction_s_max))
    for name in _SOCKET_LIMITS.get(dialect.driver, ()):
        options.setdefault(name, seconds)


class _Loop:
    """An event loop that runs in the thread that has work for it, one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, work: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
        """Wait for this work; it blocks a loop that runs in the calling thread."""
        if not _has_running_loop():
            return self._run_here(work)
        results: list[_Result] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(self._run_here(work))
            except BaseException as error:  # raised again below, at the wait
                errors.append(error)

        thread = threading.Thread(target=run, name="qmq-database")
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    def close(self, engine: sa.Engine) -> None:
        """Close the idle connections of this engine, which were opened on the loop, and the loop."""
        from sqlalchemy.ext.asyncio import AsyncEngine

        if self._loop is None:
            return
        self.run(lambda: AsyncEngine(engine).dispose())
        with self._lock:
            loop, self._loop = self._loop, None
            if loop is not None:
                loop.close()

    def _run_here(self, work: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
            return self._loop.run_until_complete(work())


def _has_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
