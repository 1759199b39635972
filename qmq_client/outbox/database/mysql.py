"""The outbox on MySQL (8.0.1 or newer) and MariaDB (10.6 or newer).

Pitfalls handled here, each reproduced: a deadlock undoes the whole transaction, and the driver
continues as if nothing had happened; DDL commits what came before it; an answer that reports an
error has no transaction flag; `NOW()` follows the session's time zone; a message larger than
`max_allowed_packet` ends the connection and looks like a network failure; a binary log of
statements accepts nothing from READ COMMITTED; `read_only` is a number on most servers and a word
from MariaDB 12 on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import sqlalchemy as sa

from qmq_client.errors import ConfigurationError
from qmq_client.outbox.database.claiming import ClaimTerms
from qmq_client.outbox.database.driver import error_number, is_encodable
from qmq_client.outbox.database.link import Link
from qmq_client.outbox.database.locked_claim import claim_locked
from qmq_client.outbox.database.savepoint_names import folded_name
from qmq_client.outbox.database.server import ServerDialect, refuse
from qmq_client.outbox.database.table_names import table_sql, table_text
from qmq_client.outbox.row import OutboxRow

#: In UTC, whatever the session's time zone is.
NOW_MS: Final = "(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(3)) DIV 1000)"
#: 0 or OFF mean no, anything else yes: MariaDB 12 has several words for it.
IS_READ_ONLY: Final = "CAST(@@global.read_only AS CHAR) NOT IN ('0', 'OFF')"
#: Limits that a server may have for the sake of people: truncated results, no deletes without a
#: key, time-outs. All of them make our statements fail, and one makes results wrong.
WITHOUT_LIMITS: Final = (
    "SET SESSION sql_select_limit = 18446744073709551615, sql_safe_updates = 0, sql_big_selects = 1 "
    "/*M!100100 , max_statement_time = 0 */ /*!80000 , max_execution_time = 0 */"
)
#: aiomysql is not among them: with today's PyMySQL it cannot pass bytes.
DRIVERS: Final = ("pymysql", "asyncmy")
_IN_TRANSACTION: Final = 1  # SERVER_STATUS_IN_TRANS of the protocol
#: Errors that undo the whole transaction: deadlock, the same in XA, a row that changed since the
#: snapshot (MariaDB, from 11.6 on by default), the lock table full.
_UNDOING: Final = (1213, 1614, 1020, 1206)
_LOCK_WAIT_TIMEOUT: Final = 1205
#: The binary log takes only statements, and these are not safe below REPEATABLE READ.
_NOT_LOGGABLE: Final = 1665
_WRITING: Final = re.compile(r"\s*(?:INSERT|REPLACE|DELETE)\b", re.IGNORECASE)
_UTF8: Final = "utf8mb4"
_LAST_OF_THREE_BYTES: Final = "\uffff"
_MISSING: Final = (1146, 1054, 1049)  # no such table, unknown column, no such schema
#: Classes of errors: values that do not fit, violated constraints, and SIGNAL, whatever number its
#: author gave it.
_ABOUT_ROWS: Final = ("22", "23", "45")
#: Errors of a trigger: its SIGNAL, from a driver that gives no class; a missing right (to a table,
#: a column, a routine, or at all); a table in use by the statement itself; an author or a view that
#: is gone; a CHECK of MySQL.
_REFUSING: Final = (1644, 1142, 1143, 1370, 1227, 1442, 1449, 1356, 3819)
#: Also a foreign key, or a value or table that a trigger misses.
_REFUSALS: Final = (sa.exc.IntegrityError, sa.exc.DataError, sa.exc.ProgrammingError)
#: Bytes of a packet around the rows.
_PACKET_OVERHEAD_BYTES: Final = 64 * 1024
_OLDEST: Final = {True: (10, 6), False: (8, 0, 1)}


def lift_limits(driver: Any, _: object = None) -> None:
    """Remove limits meant for people from a blocking connection of our own; may listen to `connect`."""
    cursor = driver.cursor()
    cursor.execute(WITHOUT_LIMITS)
    cursor.close()


def session_read_only(is_mariadb: bool) -> str:
    """The variable that makes a session's transactions read-only, under the name this server knows."""
    return "tx_read_only" if is_mariadb else "transaction_read_only"


def make_dialect(engine: sa.Engine) -> MySqlDialect:
    """The dialect for this engine; refuses drivers whose transactions cannot be followed."""
    if engine.dialect.driver not in DRIVERS:
        raise ConfigurationError(
            setting="engine",
            value=f"the driver {engine.dialect.driver!r}",
            remedy="Write mysql+pymysql://, or mysql+asyncmy:// for an asynchronous engine.",
        )
    return MySqlDialect(is_pymysql=engine.dialect.driver == "pymysql")


class _Rest:
    """Stands in for PyMySQL's last result, which it discards before anything it sends next."""

    server_status = None
    unbuffered_active = False
    has_next = False

    def __bool__(self) -> bool:
        return False  # behind a COMMIT there is no result


_REST: Final = _Rest()


class _IdleRollbacksOfPyMySql:
    """See `IdleRollbacks`."""

    def note_commit(self, link: Link) -> None:
        # The flag alone is not enough: result sets arrive without it, see `note_answer`.
        if not link.driver.server_status & _IN_TRANSACTION:
            link.driver._result = _REST

    def is_at_rest(self, link: Link) -> bool:
        return getattr(link.driver, "_result", None) is _REST


class MySqlDialect(ServerDialect):
    """See `OutboxDialect`."""

    now_ms = NOW_MS

    def __init__(self, *, is_pymysql: bool) -> None:
        super().__init__()
        self.idle_rollbacks = _IdleRollbacksOfPyMySql() if is_pymysql else None
        self._is_undone_by_timeout = False

    def is_open(self, link: Link) -> bool:
        driver = link.driver
        # asyncmy 0.2 keeps the connection's old flags if an answer has none, which is how the end of a
        # transaction is reported; the answer itself is right. Both are None until the first one.
        status = getattr(getattr(driver, "_result", None), "server_status", None)
        return bool(((driver.server_status if status is None else status) or 0) & _IN_TRANSACTION)

    def note_answer(self, link: Link, statement: str) -> None:
        # PyMySQL drops the flags at the end of a result set. So after an INSERT … RETURNING, which the ORM
        # uses on MariaDB, it does not know of its own transaction. It is told here, and forgets it with the
        # next COMMIT or ROLLBACK.
        result = getattr(link.driver, "_result", None)
        is_forgotten = getattr(result, "server_status", 0) is None and _WRITING.match(statement)
        if is_forgotten and not self.is_autocommit(link):
            link.driver.server_status |= _IN_TRANSACTION
        super().note_answer(link, statement)

    def is_autocommit(self, link: Link) -> bool:
        return bool(link.driver.get_autocommit())

    def is_busy(self, link: Link) -> bool:
        # PyMySQL reads and discards the rest of an unbuffered result if anything else is executed; the
        # application would take the rows it has for all.
        return bool(getattr(getattr(link.driver, "_result", None), "unbuffered_active", False))

    def can_encode(self, link: Link, text: str) -> bool:
        name: str = link.driver.character_set_name()
        if name == _UTF8:
            return True
        if name.startswith("utf8"):  # its short form: what is longer would be cut or altered
            return max(text) <= _LAST_OF_THREE_BYTES
        from pymysql.charset import charset_by_name  # late: an asynchronous driver has its own

        return is_encodable(text, charset_by_name(name).encoding)

    def savepoint_name(self, text: str) -> str:
        return folded_name(text)

    def undoes_transaction(self, _: Link, error: BaseException | None) -> bool:
        number = error_number(error)
        return number in _UNDOING or (number == _LOCK_WAIT_TIMEOUT and self._is_undone_by_timeout)

    def is_table_missing(self, error: sa.exc.DBAPIError) -> bool:
        return error_number(error.orig) in _MISSING

    def is_refused(self, error: sa.exc.DBAPIError) -> bool:
        if isinstance(error, _REFUSALS) or error_number(error.orig) in _REFUSING:
            return True
        state = getattr(error.orig, "sqlstate", None)  # PyMySQL tells it from 1.2 on
        return isinstance(state, str) and state.startswith(_ABOUT_ROWS)

    def prepare_sibling(self, connection: sa.Connection) -> None:
        dialect: Any = connection.dialect
        session = session_read_only(dialect.is_mariadb)
        is_read_only, is_told_to_read, self._is_undone_by_timeout = connection.exec_driver_sql(
            f"SELECT {IS_READ_ONLY}, @@{session}, @@global.innodb_rollback_on_timeout"
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
        # The drivers write bytes as text, with up to two characters for each.
        return max(0, (packet_bytes - _PACKET_OVERHEAD_BYTES) // 2)

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
        """Tried, not read from settings: filters decide whether a database is logged at all.

        A missing table, or one without rights, is reported elsewhere.
        """
        text = f"SELECT 1 FROM {table_sql(connection, table)} WHERE 1 = 0 FOR UPDATE"
        try:
            connection.exec_driver_sql(text)
        except sa.exc.DBAPIError as error:
            if error_number(error.orig) == _NOT_LOGGABLE:
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
            f"table {name} is of engine {engine}, which keeps what a transaction rolled back: "
            f"ALTER TABLE {texts.get(name, name)} ENGINE=InnoDB"
            for name, engine in found
            if engine.lower() != "innodb"
        ]

    def claim(
        self, connection: sa.Connection, outbox: sa.Table, terms: ClaimTerms
    ) -> list[OutboxRow]:
        def reads(text: str, parameters: tuple[object, ...]) -> Sequence[Any]:
            return connection.exec_driver_sql(text, parameters).all()

        return claim_locked(
            connection, outbox, terms, now_ms=NOW_MS, reads=reads, numbered=_numbered
        )

    def relax(self, _: sa.Connection) -> None:
        """Nothing: here durability is a setting of the whole server."""

    def blocking_url(self, url: sa.URL) -> sa.URL:
        return url.set(drivername=f"{url.get_backend_name()}+pymysql")

    def on_connect(self, driver: Any, _: Any) -> None:
        driver.autocommit(False)  # the application's engine may have asked for it
        if driver.charset != _UTF8:  # so may it for this: here a row may have any key
            driver.set_character_set(_UTF8)
        cursor = driver.cursor()
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        cursor.close()
        lift_limits(driver)


def _numbered(numbers: Sequence[int]) -> tuple[str, tuple[object, ...]]:
    # As text: number parameters would cost the driver more than the server's whole work.
    return f"id IN ({', '.join(map(str, numbers))})", ()
