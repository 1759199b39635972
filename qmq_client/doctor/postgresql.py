"""Checks of PostgreSQL: settings that lose committed rows, and transactions that hold rows back."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa

from qmq_client.doctor.finding import Findings, Thresholds, found
from qmq_client.doctor.rights import missing
from qmq_client.outbox.checking.rights import user
from qmq_client.outbox.database.autocommit import driver_of

_STATEMENT_MS_MAX: Final = 10_000
_TRANSACTIONS_MAX: Final = 5
#: Settings of the whole server.
_SERVER_SETTINGS: Final = ("fsync", "full_page_writes")
_SETTINGS: Final = sa.text(
    "SELECT name, setting, source FROM pg_settings WHERE name IN ('fsync', 'full_page_writes', "
    "'synchronous_commit', 'default_transaction_read_only', 'TimeZone')"
)
_SEES_ALL: Final = "SELECT pg_has_role(current_user, 'pg_read_all_stats', 'MEMBER')"
_PREPARED: Final = (
    "SELECT gid, extract(epoch FROM clock_timestamp() - prepared) AS age_s FROM pg_prepared_xacts "
    "WHERE database = current_database() ORDER BY prepared LIMIT 1000"
)
#: Without the server's own vacuums, which hold no rows back.
_OLDEST: Final = (
    "SELECT pid, extract(epoch FROM clock_timestamp() - xact_start) AS age_s, "
    "coalesce(application_name, '') AS name, state FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL "
    "AND left(coalesce(query, ''), 11) <> 'autovacuum:' ORDER BY xact_start LIMIT 1"
)


def bound(connection: sa.Connection) -> None:
    """Limit how long a statement of this connection may run."""
    connection.exec_driver_sql(f"SET statement_timeout = {_STATEMENT_MS_MAX}")


def settings(connection: sa.Connection, _: Thresholds) -> Findings:
    """The server's settings, and those of this session."""
    rows = {row.name: row for row in connection.execute(_SETTINGS)}
    for name in _SERVER_SETTINGS:
        if rows[name].setting == "off":
            yield found(f"postgresql.{name}", f"{name} is off", _server_fix(name, rows[name]))
    commit = rows["synchronous_commit"]
    if commit.setting == "off":
        read = f"synchronous_commit is off, set by {commit.source}"
        yield found("postgresql.synchronous_commit", read, _session_fix(connection, commit, "on"))
    read_only = rows["default_transaction_read_only"]
    if connection.exec_driver_sql("SELECT pg_is_in_recovery()").scalar_one():
        fix = "give the primary's address"
        yield found("server.read_only", "the server is in recovery: a replica", fix)
    elif read_only.setting == "on":
        read = f"default_transaction_read_only is on, set by {read_only.source}"
        fix = _session_fix(connection, read_only, "off")
        if fix.startswith("ALTER"):
            fix = f"SET default_transaction_read_only = off; {fix}"
        yield found("server.read_only", read, fix)
    offset_s = connection.exec_driver_sql("SELECT extract(timezone FROM now())").scalar_one()
    if offset_s:
        zone = rows["TimeZone"]
        read = f"TimeZone is {zone.setting}, {int(offset_s) // 60} minutes from UTC"
        yield found("session.time_zone", read, _session_fix(connection, zone, "'UTC'"))
    yield from _pooler(connection)


def transactions(connection: sa.Connection, thresholds: Thresholds) -> Findings:
    """Transactions that are prepared or open for too long."""
    prepared = connection.exec_driver_sql(_PREPARED).all()
    if prepared and prepared[0].age_s >= thresholds.prepared_s_max:
        names = [_literal(row.gid) for row in prepared[:_TRANSACTIONS_MAX]]
        age = f"the oldest for {prepared[0].age_s:,.0f} s"
        read = f"{len(prepared)} prepared transactions, {age}: {', '.join(names)}"
        fix = "; ".join(f"ROLLBACK PREPARED {name}" for name in names)
        yield found("transactions.prepared", read, fix)
    oldest = connection.exec_driver_sql(_OLDEST).first()
    if oldest is not None and oldest.age_s > thresholds.transaction_s_max:
        read = f"process {oldest.pid} {oldest.name} ({oldest.state}), for {oldest.age_s:,.0f} s"
        yield found("transactions.old", read, f"SELECT pg_terminate_backend({oldest.pid})")
    if not connection.exec_driver_sql(_SEES_ALL).scalar_one():
        read = "pg_stat_activity of others, for open transactions"
        yield missing(connection, "pg_read_all_stats", read)


def _pooler(connection: sa.Connection) -> Findings:
    """The backend process that the driver connected to, and the one that answers now."""
    told = _known_pid(driver_of(connection))
    answers = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
    if told not in (None, answers):
        read = f"connected to process {told}, answered by {answers}"
        yield found(
            "server.pooler",
            read,
            'connect_args={"prepare_threshold": None}, or pool_mode = session',
        )


def _server_fix(name: str, row: Any) -> str:
    if row.source == "command line":
        return f"start the server without -c {name}=off"
    return f"ALTER SYSTEM SET {name} = on; SELECT pg_reload_conf()"


def _session_fix(connection: sa.Connection, row: Any, value: str) -> str:
    if row.source in ("client", "session", "environment variable"):
        return (
            f"remove {row.name} from the URL's options and from listeners that run at each connect"
        )
    if row.source == "user":
        return f"ALTER ROLE {user(connection)} RESET {row.name}"
    if row.source == "database user":
        return f"ALTER ROLE {user(connection)} IN DATABASE {_database(connection)} RESET {row.name}"
    return f"ALTER DATABASE {_database(connection)} SET {row.name} = {value}"


def _database(connection: sa.Connection) -> str:
    return str(connection.exec_driver_sql("SELECT quote_ident(current_database())").scalar_one())


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _known_pid(driver: Any) -> int | None:
    """The server's process id that the driver got when it connected; None if the driver does not show it."""
    if hasattr(driver, "info"):  # psycopg, psycopg2
        return int(driver.info.backend_pid)
    if hasattr(driver, "get_server_pid"):  # asyncpg
        return int(driver.get_server_pid())
    return None
