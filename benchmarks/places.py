"""The databases that the outbox is measured on: SQLite in a file, and private servers.

A server is started for one benchmark, from what is installed here or, as root, from Debian's packages
(`tests/services`), with the buffers of a small production server and every commit on the disk before
its answer. What it says about that itself is part of each figure's conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa

from benchmarks.machine import find_directory
from benchmarks.measure import Effort
from benchmarks.processes import written_bytes
from benchmarks.shop import open_database
from benchmarks.suite import Bench

KINDS: Final = ("sqlite", "mysql", "postgresql")
#: Behind what the tests start it with; of two equal options the later wins.
_ROOM: Final = {
    "mysql": ["--innodb-buffer-pool-size=512M", "--innodb-log-file-size=256M"],
    "postgresql": ["-c", "shared_buffers=512MB", "-c", "max_wal_size=4GB"],
}
_FACTS: Final = {
    "sqlite": "SELECT 'SQLite ' || sqlite_version()",
    "mysql": "SELECT version(), @@innodb_flush_log_at_trx_commit, @@log_bin, @@innodb_doublewrite",
    "postgresql": (
        "SELECT current_setting('server_version'), current_setting('fsync'), "
        "current_setting('synchronous_commit'), current_setting('full_page_writes')"
    ),
}
_IN_WORDS: Final = {
    "sqlite": "{}, WAL, synchronous=FULL",
    "mysql": "{}, innodb_flush_log_at_trx_commit={}, log_bin={}, doublewrite={}",
    "postgresql": "PostgreSQL {}, fsync={}, synchronous_commit={}, full_page_writes={}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One kind of database, ready to be measured on."""

    kind: str
    #: As figures call it.
    name: str
    #: Version and the settings that decide when a commit is on the disk.
    database: str
    #: Makes an empty database of this name and returns its URL.
    make: Callable[[str], str]
    #: Bytes written so far by the server: what a MariaDB wrote, a PostgreSQL's log of changes. What
    #: SQLite writes is the callers' own.
    written_bytes: Callable[[], int]

    @property
    def durability(self) -> str:
        """When something counts that database and broker have."""
        return f"{self.database}; broker fdatasync"

    def open(self, name: str) -> sa.Engine:
        """An engine of a new database with business tables and outbox."""
        return open_database(self.make(name))


@contextmanager
def open_places(bench: Bench, kinds: Sequence[str] = KINDS) -> Iterator[list[Place]]:
    """All of them at once; they do nothing while nobody asks. Raises where a server is missing."""
    with ExitStack() as stack:
        yield [stack.enter_context(_open_place(bench, kind)) for kind in kinds]


@contextmanager
def _open_place(bench: Bench, kind: str) -> Iterator[Place]:
    if kind == "sqlite":

        def in_file(name: str) -> str:
            return f"sqlite:///{bench.directory / name}.sqlite"

        yield Place(
            kind=kind,
            name="SQLite",
            database=_in_words(kind, "sqlite://"),
            make=in_file,
            written_bytes=lambda: 0,
        )
        return
    from tests.services.ladder import recipe_or_install  # late: it needs the servers' drivers
    from tests.services.private import PrivateServer
    from tests.services.run import TestRun

    # Not below the benchmark's directory, which is closed to the user whom PostgreSQL runs as.
    run = TestRun(where=find_directory(None))
    room = [] if bench.effort is Effort.TINY else _ROOM[kind]
    server = PrivateServer(run, recipe_or_install(run, kind), options=room)
    try:
        server.start()
        url, process = server.url(), server.process or 0
        in_words = _in_words(kind, url)

        def on_server(name: str) -> str:
            _administer(url, f"CREATE DATABASE {name}")
            return server.url(name)

        yield Place(
            kind=kind,
            name=_name(kind, in_words),
            database=in_words,
            make=on_server,
            written_bytes=lambda: written_bytes(process) if kind == "mysql" else _logged(url),
        )
    finally:
        server.stop()  # in good order, so that the system adds its processor time to ours
        server.close()
        run.close()


def _in_words(kind: str, url: str) -> str:
    return _IN_WORDS[kind].format(*_ask(url, _FACTS[kind]))


def _name(kind: str, in_words: str) -> str:
    if kind == "postgresql":
        return "PostgreSQL"
    return "MariaDB" if "MariaDB" in in_words else "MySQL"


def _logged(url: str) -> int:
    return int(_ask(url, "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')")[0])


def _ask(url: str, query: str) -> list[Any]:
    engine = sa.create_engine(url, poolclass=sa.pool.NullPool)
    with engine.connect() as connection:
        return list(connection.exec_driver_sql(query).one())


def _administer(url: str, statement: str) -> None:
    engine = sa.create_engine(url, poolclass=sa.pool.NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(statement)
