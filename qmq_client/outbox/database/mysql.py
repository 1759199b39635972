"""The outbox on MySQL (8.0.1 or newer) and MariaDB (10.6 or newer).

Pitfalls handled here, each reproduced: at REPEATABLE READ an open claim blocks every INSERT of the
application; `NOW()` follows the session's time zone; a message larger than `max_allowed_packet`
ends the connection and looks like a network failure; a binary log of statements accepts nothing
from READ COMMITTED; `read_only` is a number on most servers and a word from MariaDB 12 on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import sqlalchemy as sa

from qmq_client.errors import OutboxMissingError
from qmq_client.outbox.database.claiming import ClaimTerms
from qmq_client.outbox.database.dialect import LAST_CHARACTER, OutboxDialect, error_code, refuse
from qmq_client.outbox.database.locked_claim import claim_locked
from qmq_client.outbox.database.table_names import table_sql, table_text
from qmq_client.outbox.row import OutboxRow

#: In UTC, with any time zone of the session.
NOW_MS: Final = "(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(3)) DIV 1000)"
#: 0 or OFF mean no, anything else yes: MariaDB 12 has several words for it.
IS_READ_ONLY: Final = "CAST(@@global.read_only AS CHAR) NOT IN ('0', 'OFF')"
#: Limits for interactive users that a server may have: truncated results, no deletes without a key,
#: time-outs. All of them make QMQ's statements fail, and one makes results wrong.
WITHOUT_LIMITS: Final = (
    "SET SESSION sql_select_limit = 18446744073709551615, sql_safe_updates = 0, sql_big_selects = 1 "
    "/*M!100100 , max_statement_time = 0 */ /*!80000 , max_execution_time = 0 */"
)
#: The binary log takes only statements, and these are not safe below REPEATABLE READ.
_NOT_LOGGABLE: Final = 1665
_UTF8: Final = "utf8mb4"
_SHORT_UTF8: Final = ("utf8", "utf8mb3")
_LAST_OF_THREE_BYTES: Final = "\uffff"
_MISSING: Final = (1146, 1054, 1049)  # no such table, unknown column, no such schema
#: Classes of errors: values that do not fit, violated constraints, and SIGNAL, with any error number.
_ABOUT_ROWS: Final = ("22", "23", "45")
#: Errors of a trigger: its SIGNAL, from a driver that gives no class; a missing right (to a table,
#: a column, a routine, or at all); a table in use by the statement itself; an author or a view that
#: is gone; a CHECK of MySQL.
_REFUSING: Final = (1644, 1142, 1143, 1370, 1227, 1442, 1449, 1356, 3819)
#: Also a foreign key, or a value or table that is missing in a trigger.
_REFUSALS: Final = (sa.exc.IntegrityError, sa.exc.DataError, sa.exc.ProgrammingError)
#: Bytes of a packet around the rows.
_PACKET_OVERHEAD_BYTES: Final = 64 * 1024
_OLDEST: Final = {True: (10, 6), False: (8, 0, 1)}


def lift_limits(driver: Any, _: object = None) -> None:
    """Remove limits for interactive users from a blocking connection of the store; may listen to `connect`."""
    cursor = driver.cursor()
    cursor.execute(WITHOUT_LIMITS)
    cursor.close()


def is_temporary(connection: sa.Connection, quoted_name: str) -> bool:
    """Whether a temporary table with this name hides the table on this connection."""
    definition: str = connection.exec_driver_sql(f"SHOW CREATE TABLE {quoted_name}").one()[1]
    return definition.startswith("CREATE TEMPORARY")


def session_read_only(is_mariadb: bool) -> str:
    """The variable that makes a session's transactions read-only, under the name this server knows."""
    return "tx_read_only" if is_mariadb else "transaction_read_only"


def make_dialect(_: sa.Engine) -> MySqlDialect:
    """The dialect for this engine."""
    return MySqlDialect()


class MySqlDialect(OutboxDialect):
    """See `OutboxDialect`."""

    now_ms = NOW_MS
    #: MySQL's INSERT IGNORE would also hide every other fault, and it refuses to set the numbered column to itself.
    skip_known = " ON DUPLICATE KEY UPDATE state = state"

    def on_connect(self, connection: Any, _: sa.Dialect) -> None:
        if hasattr(
            connection, "set_character_set"
        ):  # for a blocking driver: a key may have any character
            connection.set_character_set(_UTF8)
        cursor = connection.cursor()
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        cursor.execute(WITHOUT_LIMITS)
        cursor.close()

    def begin(self, connection: sa.Connection, *, is_to_write: bool) -> None:
        connection.exec_driver_sql("START TRANSACTION")

    def binary(self, value: bytes) -> str:
        return f"X'{value.hex()}'"

    def is_table_missing(self, error: sa.exc.DBAPIError) -> bool:
        return error_code(error.orig) in _MISSING

    def is_refused(self, error: sa.exc.DBAPIError) -> bool:
        if isinstance(error, _REFUSALS) or error_code(error.orig) in _REFUSING:
            return True
        state = getattr(error.orig, "sqlstate", None)  # PyMySQL shows it from 1.2 on
        return isinstance(state, str) and state.startswith(_ABOUT_ROWS)

    def check_writable(self, connection: sa.Connection) -> None:
        dialect: Any = connection.dialect
        session = session_read_only(dialect.is_mariadb)
        is_read_only, is_told_to_read = connection.exec_driver_sql(
            f"SELECT {IS_READ_ONLY}, @@{session}"
        ).one()
        if is_read_only:
            raise refuse(
                "the server is read-only (@@read_only is on): a replica does not have what was "
                "deleted on its primary a moment ago. Give the primary"
            )
        if is_told_to_read:
            raise refuse(
                f"transactions are read-only here (@@{session} is on), and rows cannot be claimed: "
                f"SET GLOBAL {session} = 0, or give the primary"
            )

    def record_bytes_max(self, connection: sa.Connection) -> int | None:
        packet_bytes: int = connection.exec_driver_sql("SELECT @@max_allowed_packet").scalar_one()
        # The drivers write each byte as up to two characters of text.
        return max(0, (packet_bytes - _PACKET_OVERHEAD_BYTES) // 2)

    def last_character(self, connection: sa.Connection) -> str:
        # With its 3-byte utf8 the server cuts or alters longer characters.
        name: str = connection.exec_driver_sql("SELECT @@character_set_client").scalar_one()
        return _LAST_OF_THREE_BYTES if name in _SHORT_UTF8 else LAST_CHARACTER

    def faults(self, connection: sa.Connection, tables: Sequence[sa.Table]) -> list[str]:
        dialect: Any = connection.dialect
        oldest = _OLDEST[bool(dialect.is_mariadb)]
        if tuple(dialect.server_version_info[: len(oldest)]) < oldest:
            wanted = ".".join(map(str, oldest))
            return [
                f"the server is older than {wanted} and cannot skip locked rows: use a newer one"
            ]
        return self._unloggable(connection, tables[0]) + self._of_wrong_engine(connection, tables)

    def _unloggable(self, connection: sa.Connection, table: sa.Table) -> list[str]:
        """Whether the binary log refuses the tables. Tested instead of read from settings, because
        filters decide whether a database is logged.

        A missing table, or one without rights, is reported elsewhere.
        """
        text = f"SELECT 1 FROM {table_sql(connection, table)} WHERE 1 = 0 FOR UPDATE"
        try:
            connection.exec_driver_sql(text)
        except sa.exc.DBAPIError as error:
            if error_code(error.orig) == _NOT_LOGGABLE:
                return [
                    "binlog_format is STATEMENT, so no row can be claimed or deleted at READ COMMITTED "
                    "and nothing would ever be sent: SET GLOBAL binlog_format = 'ROW', or 'MIXED'"
                ]
        return []

    def _of_wrong_engine(self, connection: sa.Connection, tables: Sequence[sa.Table]) -> list[str]:
        names = sa.text(
            "SELECT table_name, engine FROM information_schema.tables "
            "WHERE table_schema = COALESCE(:schema, DATABASE()) AND table_name IN :names"
        ).bindparams(sa.bindparam("names", expanding=True))
        found = connection.execute(
            names, {"schema": tables[0].schema, "names": [table.name for table in tables]}
        )
        texts = {table.name: table_text(connection, table) for table in tables}
        return [
            f"table {name} is of engine {engine}, which cannot roll back: "
            f"ALTER TABLE {texts.get(name, name)} ENGINE=InnoDB"
            for name, engine in found
            if engine.lower() != "innodb"
        ]

    def locks_what_it_reads(self, connection: sa.Connection) -> bool:
        return connection.get_isolation_level() == "SERIALIZABLE"

    def refuse_hidden(self, connection: sa.Connection, table: sa.Table) -> None:
        if is_temporary(connection, table_sql(connection, table)):
            name = table_text(connection, table)
            raise OutboxMissingError(
                f"a temporary table hides {name} on this connection, also under its qualified name: "
                f"DROP TEMPORARY TABLE {name}, or give the temporary one another name"
            )

    def claim(
        self, connection: sa.Connection, outbox: sa.Table, terms: ClaimTerms
    ) -> list[OutboxRow]:
        return claim_locked(connection, outbox, terms, self)
