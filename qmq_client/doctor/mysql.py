"""Checks of MySQL and MariaDB: settings that lose committed rows, and transactions that hold rows back."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa

from qmq_client.doctor.finding import Findings, Thresholds, found
from qmq_client.doctor.rights import missing
from qmq_client.outbox.checking.rights import is_denied
from qmq_client.outbox.database.mysql import IS_READ_ONLY, WITHOUT_LIMITS, session_read_only

_STATEMENT_S_MAX: Final = 10
_STRICT: Final = ("STRICT_TRANS_TABLES", "STRICT_ALL_TABLES")
#: 1 syncs at each commit; MariaDB's 3 does so twice.
_FLUSHES: Final = (1, 3)
_TORN: Final = ("OFF", "0", "DETECT_ONLY")
#: Two characters for each byte of a record, and the statement around it; see
#: `outbox/database/mysql.py`.
_PACKET_OVERHEAD_BYTES: Final = 64 * 1024
_MEBIBYTE: Final = 1024 * 1024
_TRANSACTIONS_MAX: Final = 5


def bound(connection: sa.Connection) -> None:
    """Limit how long a statement of this connection may run."""
    connection.exec_driver_sql(WITHOUT_LIMITS)  # otherwise it would see only a part of the rows
    dialect: Any = connection.dialect
    if dialect.is_mariadb:
        connection.exec_driver_sql(f"SET SESSION max_statement_time = {_STATEMENT_S_MAX}")
    else:
        connection.exec_driver_sql(f"SET SESSION max_execution_time = {_STATEMENT_S_MAX * 1000}")


def settings(connection: sa.Connection, thresholds: Thresholds) -> Findings:
    """The server's settings, and those of this session."""
    dialect: Any = connection.dialect
    only_reads = session_read_only(dialect.is_mariadb)
    row = connection.exec_driver_sql(
        "SELECT @@innodb_flush_log_at_trx_commit AS flush_log, @@log_bin AS has_binlog, "
        "@@sync_binlog AS sync_binlog, @@session.binlog_format AS binlog_format, "
        "@@innodb_doublewrite AS doublewrite, "
        "@@session.sql_mode AS sql_mode, @@max_allowed_packet AS packet_bytes, "
        f"{IS_READ_ONLY} AS is_read_only, @@session.{only_reads} AS only_reads, @@session.time_zone AS time_zone, "
        "TIMESTAMPDIFF(MINUTE, UTC_TIMESTAMP(), NOW()) AS offset_minutes"
    ).one()
    if row.flush_log not in _FLUSHES:
        fix = "SET GLOBAL innodb_flush_log_at_trx_commit = 1"
        yield found("mysql.flush_log", f"innodb_flush_log_at_trx_commit is {row.flush_log}", fix)
    if row.has_binlog and row.sync_binlog != 1:
        read = f"sync_binlog is {row.sync_binlog}, with log_bin"
        yield found("mysql.sync_binlog", read, "SET GLOBAL sync_binlog = 1")
    if row.has_binlog and row.binlog_format == "STATEMENT":
        read = "binlog_format is STATEMENT, with log_bin"
        yield found("mysql.binlog_format", read, "SET GLOBAL binlog_format = 'ROW'")
    if str(row.doublewrite).upper() in _TORN:
        read = f"innodb_doublewrite is {row.doublewrite}"
        fix = "write innodb_doublewrite = ON under [mysqld] and restart the server"
        yield found("mysql.doublewrite", read, fix)
    if not any(mode in row.sql_mode.split(",") for mode in _STRICT):
        read = f"sql_mode is {row.sql_mode!r}"
        fix = "SET GLOBAL sql_mode = CONCAT(@@GLOBAL.sql_mode, ',STRICT_TRANS_TABLES')"
        yield found("mysql.sql_mode", read, fix)
    yield from _packet(row.packet_bytes, thresholds)
    if row.is_read_only:
        yield found("server.read_only", "read_only is on", "SET GLOBAL read_only = 0")
    if row.only_reads:
        yield found("server.read_only", f"{only_reads} is on", f"SET GLOBAL {only_reads} = 0")
    if row.offset_minutes:
        read = f"time_zone is {row.time_zone}, {row.offset_minutes} minutes from UTC"
        yield found("session.time_zone", read, "SET GLOBAL time_zone = '+00:00'")


def _packet(packet_bytes: int, thresholds: Thresholds) -> Findings:
    needed = 2 * thresholds.limits.record_bytes + _PACKET_OVERHEAD_BYTES
    if packet_bytes < needed:
        enough = -(-needed // _MEBIBYTE) * _MEBIBYTE
        read = f"max_allowed_packet is {packet_bytes:,} bytes; the limits need {needed:,}"
        yield found("mysql.max_allowed_packet", read, f"SET GLOBAL max_allowed_packet = {enough}")


def transactions(connection: sa.Connection, thresholds: Thresholds) -> Findings:
    """Transactions that are prepared or open for too long."""
    try:
        rows = connection.execute(_OPEN).all()
    except sa.exc.DBAPIError as error:
        if not is_denied(error):
            raise
        read = "information_schema.innodb_trx, for open and prepared transactions"
        yield missing(connection, "PROCESS ON *.*", read)
        return
    orphans = [row for row in rows if not row.trx_mysql_thread_id]
    if orphans and orphans[0].age_s >= thresholds.prepared_s_max:
        yield from _prepared(connection, f"the oldest for {orphans[0].age_s:,} s or more")
    live = [row for row in rows if row.trx_mysql_thread_id]
    if live and live[0].age_s > thresholds.transaction_s_max:
        read = f"connection {live[0].trx_mysql_thread_id}, for {live[0].age_s:,} s"
        yield found("transactions.old", read, f"KILL {live[0].trx_mysql_thread_id}")


#: Rows without a connection are prepared transactions whose connection is gone. Their age counts
#: from a restart of the server. The column is in the server's time zone, even if the session has another one.
_OPEN: Final = sa.text(
    "SELECT trx_mysql_thread_id, TIMESTAMPDIFF(SECOND, trx_started, "
    "CONVERT_TZ(UTC_TIMESTAMP(), '+00:00', 'SYSTEM')) AS age_s "
    "FROM information_schema.innodb_trx WHERE trx_mysql_thread_id <> CONNECTION_ID() "
    "ORDER BY trx_started LIMIT 1000"
)


def _prepared(connection: sa.Connection, age: str) -> Findings:
    dialect: Any = connection.dialect
    # Names may be any bytes; each server has its own way to write them as text.
    spelled = "FORMAT='SQL'" if dialect.is_mariadb else "CONVERT XID"
    try:
        rows = connection.exec_driver_sql(f"XA RECOVER {spelled}").all()
    except sa.exc.DBAPIError as error:
        if not is_denied(error):
            raise
        read = f"XA RECOVER, for prepared transactions ({age})"
        yield missing(connection, "XA_RECOVER_ADMIN ON *.*", read)
        return
    names = [row.data if dialect.is_mariadb else _xid(row) for row in rows[:_TRANSACTIONS_MAX]]
    if names:
        read = f"{len(rows)} prepared transactions, {age}: {', '.join(names)}"
        fix = "; ".join(f"XA ROLLBACK {name}" for name in names)
        yield found("transactions.prepared", read, fix)


def _xid(row: Any) -> str:
    """MySQL's form: all bytes of both parts as one hexadecimal number."""
    digits = str(row.data).removeprefix("0x")
    middle = 2 * row.gtrid_length
    return f"X'{digits[:middle]}',X'{digits[middle:]}',{row.formatID}"
