"""The outbox on PostgreSQL (9.5 or newer).

It handles three pitfalls, each of which was reproduced. `now()` is the time at which the
transaction began, which may be long ago. Without statistics, for example after a burst, the planner
reads and sorts every live row. Behind a pooler a setting of the session would reach other clients,
so settings here end with their transaction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import sqlalchemy as sa

from qmq_client.outbox.database.claiming import ClaimTerms
from qmq_client.outbox.database.dialect import OutboxDialect, error_code, refuse
from qmq_client.outbox.database.locked_claim import claim_locked
from qmq_client.outbox.database.table_names import table_text
from qmq_client.outbox.row import OutboxRow

#: The time at which the statement began. `clock_timestamp()` changes within a statement, so no index search can use it.
NOW_MS: Final = "CAST(extract(epoch FROM statement_timestamp()) * 1000 AS bigint)"
#: Without statistics the planner would read and sort every live row, both for a claim and for the age of
#: the oldest.
_BY_INDEX: Final = (
    "set_config('enable_bitmapscan', 'off', true), set_config('enable_seqscan', 'off', true)"
)
#: Without an index, as for some foreign keys, the planner must use a disabled scan and rates it as
#: very expensive. From version 11 on, PostgreSQL compiles expensive statements, which takes half a
#: second each.
_UNCOMPILED: Final = "set_config('jit', 'off', true)"
_COMPILING: Final = (11,)
_UTF8: Final = ("utf-8", "utf8")
_BINARY: Final = 1  # the protocol's number, as in psycopg's `Format`
_MISSING: Final = ("42P01", "42703")  # undefined table, undefined column
#: Classes of errors that say nothing about the rows: connection, transaction state, rollback,
#: resources, limits, object state (locks), operator, system, configuration, internal.
_OF_THE_SERVER: Final = ("08", "25", "40", "53", "54", "55", "57", "58", "F0", "XX")
_OLDEST: Final = (9, 5)
_IS_UNLOGGED: Final = sa.text(
    "SELECT 1 FROM pg_class WHERE oid = to_regclass(:name) AND relpersistence = 'u'"
)


def make_dialect(_: sa.Engine) -> PostgresDialect:
    """The dialect for this engine."""
    return PostgresDialect()


class PostgresDialect(OutboxDialect):
    """See `OutboxDialect`."""

    now_ms = NOW_MS

    def on_connect(self, connection: Any, dialect: sa.Dialect) -> None:
        driver = getattr(connection, "driver_connection", connection)
        encoding = _UTF8[0]
        if dialect.driver.startswith("psycopg2"):
            encoding = driver.encoding
        elif dialect.driver.startswith("psycopg"):
            # Behind a pooler the next transaction may have another session.
            driver.prepare_threshold = None
            encoding = driver.info.encoding
        if (
            encoding.lower() not in _UTF8
        ):  # the application's encoding, which may not represent every key
            cursor = connection.cursor()
            cursor.execute("SET client_encoding TO 'UTF8'")
            cursor.close()

    def begin(self, connection: sa.Connection, *, is_to_write: bool) -> None:
        """Begin a transaction with settings that end with it: a pooler may share the session.

        The application's own statement timeout may be too short for a batch of a thousand rows.
        """
        statement_ms = round((self.statement_s_max or self.transaction_s_max) * 1000)
        settings = [_BY_INDEX, f"set_config('statement_timeout', '{statement_ms}', true)"]
        if is_to_write:
            settings.append("set_config('synchronous_commit', 'off', true)")
        if (connection.dialect.server_version_info or _OLDEST) >= _COMPILING:
            settings.append(_UNCOMPILED)
        connection.exec_driver_sql("BEGIN ISOLATION LEVEL READ COMMITTED")
        connection.exec_driver_sql(f"SELECT {', '.join(settings)}")

    def check_writable(self, connection: sa.Connection) -> None:
        is_replica, is_read_only = connection.exec_driver_sql(
            "SELECT pg_is_in_recovery(), current_setting('transaction_read_only')"
        ).one()
        if is_replica or is_read_only == "on":
            raise refuse(
                "the server is a replica, or its transactions are read-only: rows cannot be claimed "
                "there. Use the address of the primary"
            )

    def binary(self, value: bytes) -> str:
        return f"decode('{value.hex()}', 'hex')"  # valid with any `standard_conforming_strings`

    def is_table_missing(self, error: sa.exc.DBAPIError) -> bool:
        return error_code(error.orig) in _MISSING

    def is_refused(self, error: sa.exc.DBAPIError) -> bool:
        code = error_code(error.orig)
        return isinstance(code, str) and code[:2] not in _OF_THE_SERVER

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
        with _in_binary(connection):
            return claim_locked(connection, outbox, terms, self)


@contextmanager
def _in_binary(connection: sa.Connection) -> Iterator[None]:
    """Let psycopg read results in binary: as text, records take 1.5 times as long."""
    if connection.dialect.driver != "psycopg" or connection.dialect.is_async:
        yield
        return
    driver: Any = connection.connection.driver_connection
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
