"""The application's own engine and sessions: facts that only the application's process can show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.orm import Session
from sqlalchemy.pool import QueuePool

from qmq_client.doctor.finding import Finding, Findings, found
from qmq_client.outbox.database.autocommit import in_transaction, is_autocommit
from qmq_client.outbox.sending.notes import begun_connections, watch

#: From this version on PyMySQL has no code that aiomysql calls to write bytes.
_REFUSES_BYTES: Final = (1, 2)


def sessions(engine: sa.Engine, session_factory: Callable[[], Any], outbox: sa.Table) -> Findings:
    """Facts about a new session, which is closed again. `engine` is the one given to the producer."""
    session: Any = session_factory()
    plain: Session = getattr(session, "sync_session", session)
    bind = plain.get_bind(clause=outbox)
    chosen = bind if isinstance(bind, sa.Engine) else bind.engine
    if chosen.pool is not engine.pool:
        url = chosen.url.render_as_string(hide_password=True)
        fix = "give the same engine to the sessionmaker and to the Producer"
        yield found("session.bind", f"sessions are bound to another engine ({url})", fix)
    if chosen.dialect.is_async:  # asking its driver would need the application's event loop
        if chosen.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
            yield _autocommit()
        return
    watch(chosen)
    with plain:
        connection = plain.connection(bind_arguments={"clause": outbox})
        others = [each for each in begun_connections(plain) if each.engine.pool is not chosen.pool]
        is_in_autocommit, has_begun = is_autocommit(connection), _has_begun(connection)
        plain.rollback()
    if others:
        url = others[0].engine.url.render_as_string(hide_password=True)
        fix = (
            "use a separate session for it, and `ProducerOptions(strict=True)` to refuse such sends"
        )
        yield found(
            "session.engines", f"its transaction also begins on another engine ({url})", fix
        )
    if is_in_autocommit:
        yield _autocommit()
    elif not has_begun:
        fix = "begin by an event, as SQLAlchemy's documentation of SQLite shows under transactions"
        yield found("sqlite.explicit_begin", "no transaction is open after the begin", fix)


def pool(engine: sa.Engine, threads: int) -> Findings:
    """Whether the pool keeps a connection for each of this many threads."""
    made = engine.pool
    if isinstance(made, QueuePool) and 0 < made.size() < threads:
        read = f"keeps {made.size()} connections, for {threads} threads"
        yield found("pool.small", read, f"create_engine(…, pool_size={threads})")


def driver(engine: sa.Engine, pymysql: str) -> Findings:
    """Whether the engine's driver can write a message with that version of PyMySQL."""
    if engine.driver != "aiomysql":
        return
    if tuple(int(part) for part in pymysql.split(".")[:2]) >= _REFUSES_BYTES:
        yield found(
            "driver.aiomysql",
            f"aiomysql with PyMySQL {pymysql}",
            "pip install 'pymysql<1.2', or use asyncmy",
        )


def _autocommit() -> Finding:
    fix = "remove isolation_level='AUTOCOMMIT' from the engine, or give the sessions another"
    return found("session.autocommit", "the driver is in autocommit", fix)


def _has_begun(connection: sa.Connection) -> bool:
    """On SQLite the driver may defer its BEGIN until the first change; servers have no such gap."""
    if connection.dialect.name != "sqlite":
        return True
    connection.exec_driver_sql("SELECT 1")
    return in_transaction(connection)
