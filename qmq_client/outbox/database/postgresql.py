"""The outbox on PostgreSQL, through psycopg.

Pitfalls handled here, each reproduced: after an error that the application swallowed, COMMIT
returns normally and stores nothing, so the driver's status is read before it; `now()` is the time
at which the transaction began, which may be long ago.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import sqlalchemy as sa

from qmq_client.errors import ConfigurationError
from qmq_client.outbox.database.claiming import ClaimTerms
from qmq_client.outbox.database.driver import driver_of, is_encodable
from qmq_client.outbox.database.link import Link
from qmq_client.outbox.database.locked_claim import claim_locked
from qmq_client.outbox.database.savepoint_names import exact_name
from qmq_client.outbox.database.server import ServerDialect, refuse
from qmq_client.outbox.database.table_names import table_text
from qmq_client.outbox.row import OutboxRow

#: When the statement began. `clock_timestamp()` may change within one, so no index search can use it.
NOW_MS: Final = "CAST(extract(epoch FROM statement_timestamp()) * 1000 AS bigint)"
#: Without statistics, as after a burst, the planner would read and sort every live row, both for a
#: claim and for the age of the oldest.
_BY_INDEX: Final = (
    "set_config('enable_bitmapscan', 'off', true), set_config('enable_seqscan', 'off', true)"
)
#: A scan that is switched off counts as very expensive where there is no other way, as for a
#: foreign key without an index; and expensive statements are compiled, at half a second each. From
#: 11 on.
_UNCOMPILED: Final = "set_config('jit', 'off', true)"
_COMPILING: Final = (11,)
_IDLE: Final = 0  # libpq's PQTRANS_IDLE
_ACTIVE: Final = 1  # PQTRANS_ACTIVE: in the middle of a COPY or a stream of rows
_IN_ERROR: Final = 3  # PQTRANS_INERROR
_READ_COMMITTED: Final = 2  # of libpq
_BINARY: Final = 1  # of the protocol, as psycopg's `Format` has it
_UTF8: Final = "utf-8"  # as psycopg calls it
_MISSING: Final = ("42P01", "42703")  # undefined table, undefined column
#: Classes of errors that say nothing about the rows: connection, transaction state, rollback,
#: resources, limits, object state (locks), operator, system, configuration, internal.
_OF_THE_SERVER: Final = ("08", "25", "40", "53", "54", "55", "57", "58", "F0", "XX")
_OLDEST: Final = (9, 5)
_IS_UNLOGGED: Final = sa.text(
    "SELECT 1 FROM pg_class WHERE oid = to_regclass(:name) AND relpersistence = 'u'"
)


def make_dialect(engine: sa.Engine) -> PostgresDialect:
    """The dialect for this engine; refuses drivers whose transactions cannot be followed."""
    if engine.dialect.driver not in ("psycopg", "psycopg_async"):
        raise ConfigurationError(
            setting="engine",
            value=f"the driver {engine.dialect.driver!r}",
            remedy='Write postgresql+psycopg:// (pip install "qmq[postgres]"), also for an '
            "asynchronous engine.",
        )
    return PostgresDialect()


class PostgresDialect(ServerDialect):
    """See `OutboxDialect`."""

    now_ms = NOW_MS

    def is_open(self, link: Link) -> bool:
        return _status(link) != _IDLE

    def is_autocommit(self, link: Link) -> bool:
        return bool(link.driver.autocommit)

    def can_commit(self, link: Link) -> bool:
        # In a failed transaction COMMIT is a ROLLBACK that raises nothing.
        return _status(link) != _IN_ERROR and self.is_in_transaction(link)

    def is_busy(self, link: Link) -> bool:
        return _status(link) == _ACTIVE

    def can_encode(self, link: Link, text: str) -> bool:
        return is_encodable(text, link.driver.info.encoding)

    def savepoint_name(self, text: str) -> str:
        return exact_name(text)

    def undoes_transaction(self, link: Link, _: BaseException | None) -> bool:
        return not self.is_in_transaction(link)

    def is_table_missing(self, error: sa.exc.DBAPIError) -> bool:
        return getattr(error.orig, "sqlstate", None) in _MISSING

    def is_refused(self, error: sa.exc.DBAPIError) -> bool:
        state: str | None = getattr(error.orig, "sqlstate", None)
        return state is not None and state[:2] not in _OF_THE_SERVER

    def prepare_sibling(self, connection: sa.Connection) -> None:
        is_replica, is_read_only = connection.exec_driver_sql(
            "SELECT pg_is_in_recovery(), current_setting('transaction_read_only')"
        ).one()
        if is_replica or is_read_only == "on":
            raise refuse(
                "the server is a replica, or its transactions are read-only: rows cannot be claimed "
                "there. Give the primary"
            )

    def record_bytes_max(self, _: sa.Connection) -> int | None:
        return None

    def faults(self, connection: sa.Connection, tables: Sequence[sa.Table]) -> list[str]:
        version = connection.dialect.server_version_info or _OLDEST
        if tuple(version[:2]) < _OLDEST:
            return ["the server is older than 9.5 and cannot skip locked rows: use a newer one"]
        names = [table_text(connection, table) for table in tables]
        return [
            f"table {name} is UNLOGGED, so a crash of the server empties it: "
            f"ALTER TABLE {name} SET LOGGED"
            for name in names
            if connection.scalar(_IS_UNLOGGED, {"name": name})
        ]

    def claim(
        self, connection: sa.Connection, outbox: sa.Table, terms: ClaimTerms
    ) -> list[OutboxRow]:
        def reads(text: str, parameters: tuple[object, ...]) -> Sequence[Any]:
            with _in_binary(connection):
                return connection.exec_driver_sql(text, parameters).all()

        return claim_locked(
            connection, outbox, terms, now_ms=NOW_MS, reads=reads, numbered=_numbered
        )

    def blocking_url(self, url: sa.URL) -> sa.URL:
        return url.set(drivername="postgresql+psycopg")

    def on_connect(self, driver: Any, _: Any) -> None:
        driver.autocommit = False  # the application's engine may have asked for it
        driver.isolation_level = _READ_COMMITTED
        driver.prepare_threshold = None  # behind a pooler the next transaction has another session
        if driver.info.encoding != _UTF8:  # the application's choice: here a row may have any key
            driver.execute("SET client_encoding TO 'UTF8'")
            driver.commit()

    def relax(self, connection: sa.Connection) -> None:
        self._set(connection, "set_config('synchronous_commit', 'off', true)", _BY_INDEX)

    @contextmanager
    def read(self, sibling: sa.Engine) -> Iterator[sa.Connection]:
        with super().read(sibling) as connection:
            self._set(connection, _BY_INDEX)
            try:
                yield connection
            finally:
                # Here, where a deadline applies: the pool would wait forever for the answer.
                connection.rollback()

    def _set(self, connection: sa.Connection, *settings: str) -> None:
        """For this transaction only: behind a pooler the session may then be somebody else's.

        What an application allows its own statements may be too little for a batch of a thousand.
        """
        statement_ms = round((self.statement_s_max or self.transaction_s_max) * 1000)
        settings += (f"set_config('statement_timeout', '{statement_ms}', true)",)
        if (connection.dialect.server_version_info or _OLDEST) >= _COMPILING:
            settings += (_UNCOMPILED,)
        connection.exec_driver_sql(f"SELECT {', '.join(settings)}")


@contextmanager
def _in_binary(connection: sa.Connection) -> Iterator[None]:
    """Request binary results: as text, with two digits for each byte, records take half as long again."""
    driver = driver_of(connection)
    usual = driver.cursor_factory

    def in_binary(*arguments: Any, **options: Any) -> Any:
        cursor = usual(*arguments, **options)
        cursor.format = _BINARY
        return cursor

    driver.cursor_factory = in_binary
    try:
        yield
    finally:
        driver.cursor_factory = usual


def _numbered(numbers: Sequence[int]) -> tuple[str, tuple[object, ...]]:
    first, last = min(numbers), max(numbers)
    if last - first + 1 == len(numbers):  # one piece: found by one descent into the index
        return f"id BETWEEN {first:d} AND {last:d}", ()
    return "id = ANY(%b)", (list(numbers),)


def _status(link: Link) -> int:
    return int(link.driver.pgconn.transaction_status)
