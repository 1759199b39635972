"""A business database with one number in it, and a consumer process that may be killed.

Run as `python -m tests.client.consumer.shop URL MOMENT BATCH_SIZE [ASYNC_URL]`: handles three messages
and kills itself with SIGKILL at the moment named, or ends well after all of them; with the last
argument by an asynchronous handler.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from qmq_client.consumer import consumer
from qmq_client.message import Message
from qmq_client.outbox.table import create_tables
from qmq_client.testing import drain
from tests.client.consumer.kit import GROUP, SUBJECT, Bench


def make_engine(
    url: str | None, *, engine: sa.Engine | None = None, begins_by_itself: bool = False
) -> sa.Engine:
    made = engine or sa.create_engine(url or "")
    if engine is None and made.dialect.name == "sqlite":

        @sa.event.listens_for(made, "connect")
        def on_connect(driver: Any, _: Any) -> None:
            driver.execute("PRAGMA journal_mode = WAL")
            driver.execute("PRAGMA synchronous = NORMAL")
            driver.execute("PRAGMA busy_timeout = 20000")
            if begins_by_itself:
                driver.isolation_level = None

    if begins_by_itself:
        sa.event.listen(made, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    create_tables(made)
    with made.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE IF NOT EXISTS tally (n INTEGER NOT NULL)")
        connection.exec_driver_sql(
            "INSERT INTO tally SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM tally)"
        )
    return made


def count_of(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(sa.text("SELECT n FROM tally")).scalar_one())


def rows_in_inbox(engine: sa.Engine) -> set[tuple[str, bytes]]:
    with engine.connect() as connection:
        rows = connection.execute(sa.text("SELECT consumer_group, message_id FROM qmq_inbox"))
        return {(row[0], bytes(row[1])) for row in rows}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


ADD = sa.text("UPDATE tally SET n = n + :count")


def main(url: str, moment: str, batch_size: int, async_url: str | None = None) -> None:
    engine = make_engine(url)
    make = _handler if async_url is None else partial(_async_handler, async_url)
    handler = make(engine, moment, batch_size)
    bench = Bench()
    bench.broker.put(*[Message(SUBJECT, i, message_id=f"{i:032x}") for i in range(3)])
    consumers = bench.consumers(handler)
    drain(consumers)
    consumers.stop()
    engine.dispose()


def _handler(engine: sa.Engine, moment: str, batch_size: int) -> Callable[..., Any]:
    factory = sessionmaker(engine)

    def handle(bodies: Any, session: Session) -> None:
        if moment == "begun":
            die()
        session.execute(ADD, {"count": len(bodies) if batch_size > 1 else 1})
        if moment == "changed":
            die()

    handle.__annotations__["bodies"] = list[int] if batch_size > 1 else int
    if moment == "committed":
        sa.event.listen(factory, "after_commit", lambda _: die())
    return consumer(SUBJECT, group=GROUP, inbox=factory, batch_size=batch_size)(handle)


def _async_handler(
    async_url: str, _: sa.Engine, moment: str, batch_size: int
) -> Callable[..., Any]:
    class Sessions(Session):
        """Those behind the asynchronous ones, so that a listener is on them alone."""

    factory = async_sessionmaker(create_async_engine(async_url), sync_session_class=Sessions)

    async def handle(bodies: Any, session: AsyncSession) -> None:
        if moment == "begun":
            die()
        await session.execute(ADD, {"count": len(bodies) if batch_size > 1 else 1})
        if moment == "changed":
            die()

    handle.__annotations__["bodies"] = list[int] if batch_size > 1 else int
    if moment == "committed":
        sa.event.listen(Sessions, "after_commit", lambda _: die())
    return consumer(SUBJECT, group=GROUP, inbox=factory, batch_size=batch_size)(handle)


def gone(statement: str) -> sa.exc.DBAPIError:
    """As SQLAlchemy tells that a connection is lost."""
    error = ConnectionError("nobody answers")
    return sa.exc.OperationalError(statement, {}, error, connection_invalidated=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
