"""The application's own engine and sessions: facts that only the application's process can show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.orm import Session
from sqlalchemy.pool import QueuePool

from qmq_client.doctor.finding import Findings, found
from qmq_client.outbox.database.dialect import dialect_of
from qmq_client.outbox.database.driver import driver_of, root_engine
from qmq_client.outbox.database.link import link_of
from qmq_client.outbox.transaction import calls

_AUTOCOMMIT: Final = "AUTOCOMMIT"
#: Under whatever name a copy of the product was imported.
_FOLLOWER: Final = calls.__name__.removeprefix("qmq_client")


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
    count = _followers(root_engine(chosen))
    if count == 0:
        yield found("session.hook", "no producer follows it", "make a Producer for this engine")
    elif count > 1:
        fix = "import qmq_client under one name and from one place, and do not reload it"
        yield found("session.hook", f"{count} copies of the product follow it", fix)
    if chosen.dialect.is_async:
        is_autocommit, has_begun = _says_autocommit(chosen), True
    else:
        with plain:
            connection = plain.connection(bind_arguments={"clause": outbox})
            has_begun = _has_begun(connection)
            is_autocommit = not dialect_of(chosen).is_transactional(link_of(connection))
            plain.rollback()
    if is_autocommit:
        fix = "remove isolation_level='AUTOCOMMIT' from the engine, or give the sessions another"
        yield found("session.autocommit", "the driver is in autocommit", fix)
    elif not has_begun:
        fix = "make a Producer for this engine, which sees to it"
        yield found("sqlite.explicit_begin", "no transaction is open after the begin", fix)


def pool(engine: sa.Engine, threads: int) -> Findings:
    """Whether the pool has a connection for each of that many threads."""
    made = engine.pool
    if not isinstance(made, QueuePool):
        return
    overflow = made._max_overflow  # SQLAlchemy tells the size but not this
    if overflow >= 0 and made.size() + overflow < threads:
        read = f"{made.size()} connections and {overflow} more, for {threads} threads"
        yield found("pool.small", read, f"create_engine(…, pool_size={threads})")


def publisher_connections(engine: sa.Engine) -> Findings:
    """The publisher's connections, which inherit the listeners of the application's pool.

    Requires: a server.
    """
    sibling = dialect_of(engine).open_sibling(engine)
    try:
        with sibling.connect() as connection:
            level = connection.get_isolation_level()
    finally:
        sibling.dispose()
    if level != "READ COMMITTED":
        fix = "remove the pool's listener (connect, checkout) that sets the isolation level"
        yield found("publisher.isolation", f"the publisher's connections are {level}", fix)


def _followers(engine: sa.Engine) -> int:
    """How many copies of the product follow this dialect, one behind the other."""
    count = 0
    method: Any = engine.dialect.do_commit
    while method is not None:
        count += getattr(method, "__module__", "").endswith(_FOLLOWER)
        method = getattr(getattr(method, "__self__", None), "followed", {}).get("do_commit")
    return count


def _has_begun(connection: sa.Connection) -> bool:
    """On SQLite the driver may defer its BEGIN until the first change; servers have no such gap."""
    if connection.dialect.name != "sqlite":
        return True
    connection.exec_driver_sql("SELECT 1")
    return bool(driver_of(connection).in_transaction)


def _says_autocommit(engine: sa.Engine) -> bool:
    options = engine.get_execution_options()
    dialect: Any = engine.dialect
    level = options.get("isolation_level") or dialect._on_connect_isolation_level
    return str(level).upper() == _AUTOCOMMIT
