"""The databases of one watchdog, with time limits and a budget of idle connections.

Each has a store with a pool of its own. Every connect and every statement has a time limit: a slow
or unreachable database holds a thread for some seconds and does not block others. Opening does not
connect: a database that is unreachable now may be reachable at the next sweep.

Hundreds of databases must not hold hundreds of connections to servers that have other users. A
connection is kept while there is room; beyond that it is closed after its sweep, but a database
that has just had work replaces one that had none. An idle database has one connection, which
`sweep.py` ensures; a database in a sweep has at most `CONNECTIONS_PER_RUN`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import event

from qmq_client.database.engine import open_engine, section_tables
from qmq_client.database.registry import Registry
from qmq_client.outbox.checking.rights import WATCHDOG, WATCHDOG_OF_INBOX, Role
from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.outbox.database.dialect import dialect_of
from qmq_client.outbox.database.sqlite_file import follow_file
from qmq_client.outbox.table import DEFAULT_TABLES
from qmq_client.settings.sections import Config, DatabaseSection, WatchdogSection
from qmq_watchdog.claiming import THREADS

#: Statements of the longest transaction, each with its own limit.
_STATEMENTS_MAX: Final = 2
_BUILT_IN: Final = WatchdogSection()
_PLACES: Final = ("host", "port", "unix_socket")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Database:
    """One business database with an outbox."""

    #: Its name in logs and commands; contains no secret.
    name: str
    store: OutboxStore
    engine: sa.Engine
    inbox: sa.Table = DEFAULT_TABLES.inbox
    #: Most rows per second of this watchdog, independent of others; 0 for no limit.
    rows_per_s: int = 0
    #: How long accepted rows are kept; None deletes them at once.
    keep_sent_ms: int | None = None
    #: How long inbox ids are kept; None forever.
    keep_inbox_ms: int | None = None
    #: Held while its connections are used or closed.
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        follow_file(self.engine)

    @property
    def role(self) -> Role:
        """The role of its user, which decides the needed rights."""
        return WATCHDOG if self.keep_inbox_ms is None else WATCHDOG_OF_INBOX

    @property
    def server(self) -> str:
        """The server of the database: its databases become unreachable together."""
        url = self.engine.url
        if url.get_backend_name() == "sqlite":
            return f"sqlite {url.database}"
        # a socket, or several hosts, are in the query
        places = [url.query[name] for name in _PLACES if name in url.query]
        return f"{url.host}:{url.port}" if not places else f"{url.host}:{url.port} {places}"

    def close(self) -> None:
        """Close its connections; it may be used again."""
        self.store.close()
        self.engine.dispose()


def open_database(
    section: DatabaseSection,
    environment: Mapping[str, str],
    limits: WatchdogSection = _BUILT_IN,
) -> Database:
    """One configured database; raises `ConfigurationError` if its settings are invalid."""
    engine = open_engine(section, environment)
    limit_in_time(engine, limits)
    tables = section_tables(section)
    return Database(
        name=section.name,
        store=OutboxStore(engine, tables),
        engine=engine,
        inbox=tables.inbox,
        rows_per_s=section.rows_per_s,
        keep_sent_ms=_kept_ms(section.keep_sent_s),
        keep_inbox_ms=_kept_ms(section.keep_inbox_s),
    )


def open_registry(config: Config, environment: Mapping[str, str]) -> Registry:
    """The registry, with the same limits. Does not connect."""
    prepare = partial(limit_in_time, limits=config.watchdog)
    return Registry(config.registry, environment, prepare)


def limit_in_time(engine: sa.Engine, limits: WatchdogSection) -> None:
    """Put a time limit on every connect and every statement of this engine."""
    if (limit := _LIMITS.get(engine.dialect.driver)) is not None:
        event.listen(engine, "do_connect", _LimitOnConnect(limit, limits))
    dialect = dialect_of(engine)
    dialect.statement_s_max = limits.statement_s_max
    if engine.dialect.name == "postgresql":
        event.listen(engine, "begin", _LimitOnBegin(_statement_ms(limits)))
    # For a silent established connection, which neither driver nor server ends
    dialect.transaction_s_max = _STATEMENTS_MAX * limits.statement_s_max


def _statement_ms(limits: WatchdogSection) -> int:
    return max(1, round(limits.statement_s_max * 1000))  # 0 would be no limit at all


def _kept_ms(kept_s: float) -> int | None:
    return round(kept_s * 1000) if kept_s else None


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _LimitOnConnect:
    """Adds the time limits to the arguments of each connect."""

    limit: Callable[[dict[str, Any], WatchdogSection], None]
    limits: WatchdogSection

    def __call__(
        self, _dialect: Any, _record: Any, _arguments: Any, options: dict[str, Any]
    ) -> None:
        self.limit(options, self.limits)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _LimitOnBegin:
    """Sets the limits in each transaction: a pooler takes no options at the connect."""

    statement_ms: int

    def __call__(self, connection: sa.Connection) -> None:
        connection.exec_driver_sql(f"SET LOCAL statement_timeout = {self.statement_ms}")


def _limit_mysql(options: dict[str, Any], limits: WatchdogSection) -> None:
    options["connect_timeout"] = max(1, round(limits.connect_s_max))
    options["read_timeout"] = options["write_timeout"] = max(1, round(limits.statement_s_max))


def _limit_libpq(options: dict[str, Any], limits: WatchdogSection) -> None:
    options["connect_timeout"] = max(2, round(limits.connect_s_max))  # libpq treats 1 as 2
    # The server's own limit, set in each transaction, does not help when no bytes arrive any more
    options["tcp_user_timeout"] = _statement_ms(limits)
    options["keepalives_idle"] = max(1, round(limits.statement_s_max))


def _limit_pg8000(options: dict[str, Any], limits: WatchdogSection) -> None:
    options["timeout"] = max(1, round(limits.statement_s_max))  # also of the connect


_LIMITS: Final[Mapping[str, Callable[[dict[str, Any], WatchdogSection], None]]] = {
    "pymysql": _limit_mysql,
    "mysqldb": _limit_mysql,
    "psycopg": _limit_libpq,
    "psycopg2": _limit_libpq,
    "pg8000": _limit_pg8000,
}


#: Connections of a sweep: its own and those of the threads next to it.
CONNECTIONS_PER_RUN: Final = THREADS


class ConnectionBudget:
    """At most `kept_max` databases with open connections that are not in use. Thread-safe."""

    def __init__(self, kept_max: int) -> None:
        self._kept_max = kept_max
        self._lock = threading.Lock()
        #: In the order in which they were returned.
        self._kept: dict[Database, bool] = {}

    def take(self, database: Database) -> None:
        """Mark its connections as used. Requires: the caller holds `database.lock`."""
        with self._lock:
            self._kept.pop(database, None)

    def give_back(self, database: Database, *, was_busy: bool) -> None:
        """Mark its connections as idle; if too many are open, those of some database are closed.

        Requires: the caller has released `database.lock`.
        """
        with self._lock:
            self._kept[database] = was_busy
            if len(self._kept) <= self._kept_max:
                return
            idle = (each for each, is_busy in self._kept.items() if not is_busy)
            surplus = next(idle, database) if was_busy else database
            del self._kept[surplus]
        if surplus.lock.acquire(
            blocking=False
        ):  # otherwise it is in use again, and will be returned later
            try:
                surplus.close()
            finally:
                surplus.lock.release()

    def forget(self, database: Database) -> None:
        """Forget a database that was closed permanently."""
        with self._lock:
            self._kept.pop(database, None)

    @property
    def kept(self) -> int:
        """Databases with connections that are not in use."""
        with self._lock:
            return len(self._kept)
