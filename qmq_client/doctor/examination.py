"""Examines one database for faults that break a promise, over one connection with few queries.

Changes nothing. The connection is not returned to the application's pool, because a time limit for
its statements stays set on it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

from qmq_client.clock import SYSTEM_CLOCK, Clock
from qmq_client.doctor import application, mysql, postgresql, sqlite
from qmq_client.doctor.broker import broker
from qmq_client.doctor.check import Severity
from qmq_client.doctor.finding import Finding, Findings, Thresholds, found
from qmq_client.doctor.foreign_objects import foreign_objects
from qmq_client.doctor.outbox_tables import drifted, waiting
from qmq_client.doctor.rights import missing, roles
from qmq_client.errors import ConfigurationError
from qmq_client.outbox.checking.rights import is_denied
from qmq_client.outbox.database.dialect import dialect_of
from qmq_client.outbox.database.own_connections import OwnConnections
from qmq_client.outbox.database.table_names import table_text
from qmq_client.outbox.table import DEFAULT_TABLES, Tables
from qmq_client.transport.address import BrokerAddress

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

_SERVERS: Final[dict[str, Any]] = {
    "mysql": mysql,
    "mariadb": mysql,
    "postgresql": postgresql,
}
_ORDER: Final = list(Severity)
_DEFAULTS: Final = Thresholds()


def examine(
    engine: sa.Engine | AsyncEngine,
    *,
    tables: Tables = DEFAULT_TABLES,
    session_factory: Callable[[], Any] | None = None,
    threads: int | None = None,
    broker_url: str | BrokerAddress | None = None,
    thresholds: Thresholds = _DEFAULTS,
    clock: Clock = SYSTEM_CLOCK,
) -> tuple[Finding, ...]:
    """The findings about this database with their fixes, the worst first; empty without any.

    `engine`: the application's, asynchronous or not. With `session_factory` it also checks how its
    sessions work; with `threads` whether its pool keeps a connection for
    each; with `broker_url` the broker. Blocks: an asynchronous application calls it in a thread.
    Raises SQLAlchemy's errors if the database does not answer, `ConfigurationError` for an unknown
    kind of database.
    """
    application_engine = engine if isinstance(engine, sa.Engine) else engine.sync_engine
    findings: list[Finding] = []
    is_own = not application_engine.dialect.is_async

    def look(connection: sa.Connection) -> list[Finding]:
        return [
            *_of_database(connection, thresholds, is_application=is_own),
            *_of_outbox(connection, tables, thresholds),
            *_of_clock(connection, clock, thresholds),
        ]

    findings += application.driver(application_engine, version("PyMySQL"))
    findings += _looked(application_engine, look)
    if session_factory is not None:
        findings += application.sessions(application_engine, session_factory, tables.outbox)
    if threads is not None:
        findings += application.pool(application_engine, threads)
    if broker_url is not None:
        findings += broker(broker_url)
    return by_severity(findings)


def examine_configured(engine: sa.Engine, tables: Tables) -> tuple[Finding, ...]:
    """`examine` for an engine that is not the application's: checks of connections are left out."""

    def look(connection: sa.Connection) -> list[Finding]:
        return [
            *_of_database(connection, _DEFAULTS, is_application=False),
            *_of_outbox(connection, tables, _DEFAULTS),
            *_of_clock(connection, SYSTEM_CLOCK, _DEFAULTS),
        ]

    return by_severity(_looked(engine, look))


def by_severity(findings: list[Finding]) -> tuple[Finding, ...]:
    """The worst first."""
    return tuple(sorted(findings, key=lambda finding: _ORDER.index(finding.severity)))


def _looked(engine: sa.Engine, look: Callable[[sa.Connection], list[Finding]]) -> list[Finding]:
    dialect = dialect_of(engine)  # refuses databases that the outbox refuses
    is_in_memory = isinstance(engine.pool, StaticPool)
    if engine.dialect.is_async:
        if is_in_memory:
            raise ConfigurationError(
                setting="examine(engine)",
                value="asynchronous, with its database in memory",
                remedy="Other processes cannot see it; examine one in a file.",
            )
        own = OwnConnections(engine, dialect)
        try:
            return own.read(look)
        finally:
            own.close()
    with engine.connect() as connection:
        if not is_in_memory:
            connection.detach()
        findings = look(connection)
        connection.rollback()
    return findings


def _of_database(
    connection: sa.Connection, thresholds: Thresholds, *, is_application: bool
) -> Findings:
    server = _SERVERS.get(connection.dialect.name)
    if server is None:
        yield from sqlite.settings(connection, is_application=is_application)
        return
    server.bound(connection)
    yield from server.settings(connection, thresholds)
    yield from server.transactions(connection, thresholds)


def _of_outbox(connection: sa.Connection, tables: Tables, thresholds: Thresholds) -> Findings:
    drift = list(drifted(connection, tables))
    yield from drift
    if any(finding.id == "schema.missing" for finding in drift):
        return
    yield from roles(connection, tables)
    yield from foreign_objects(connection, tables)
    try:
        yield from waiting(connection, tables, thresholds)
    except sa.exc.DBAPIError as error:
        if not is_denied(error):
            raise
        connection.rollback()
        name = table_text(connection, tables.outbox)
        unread = missing(connection, f"SELECT ON {name}", f"{name}, for rows that wait")
        if unread.fix not in {finding.fix for finding in drift}:
            yield unread


def _of_clock(connection: sa.Connection, clock: Clock, thresholds: Thresholds) -> Findings:
    statement = f"SELECT {dialect_of(connection.engine).now_ms}"
    before_ms = clock.now_ms()
    database_ms = int(connection.exec_driver_sql(statement).scalar_one())
    after_ms = clock.now_ms()
    off_ms = max(before_ms - database_ms, database_ms - after_ms)
    if off_ms > thresholds.clock_s_max * 1000:
        side = "behind" if database_ms < before_ms else "ahead of"
        read = f"the database is {off_ms / 1000:,.1f} s {side} this machine"
        yield found(
            "clock.difference", read, "keep the clocks of both by NTP: timedatectl set-ntp true"
        )
