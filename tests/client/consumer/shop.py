"""A business database with one number in it, and a consumer process that may be killed.

Run as `python -m tests.client.consumer.shop URL MOMENT BATCH_SIZE`: handles three messages
and kills itself with SIGKILL at the moment named, or ends well after all of them.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import sqlalchemy as sa
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


def main(url: str, moment: str, batch_size: int) -> None:
    engine = make_engine(url)
    factory = sessionmaker(engine)

    def handle(bodies: Any, session: Session) -> None:
        if moment == "begun":
            die()
        count = len(bodies) if batch_size > 1 else 1
        session.execute(sa.text("UPDATE tally SET n = n + :count"), {"count": count})
        session.flush()
        if moment == "changed":
            die()

    handle.__annotations__["bodies"] = list[int] if batch_size > 1 else int
    if moment == "committed":
        sa.event.listen(factory, "after_commit", lambda _: die())
    handler = consumer(SUBJECT, group=GROUP, inbox=factory, batch_size=batch_size)(handle)
    bench = Bench()
    bench.broker.put(*[Message(SUBJECT, i, message_id=f"{i:032x}") for i in range(3)])
    drain(bench.consumers(handler))
    engine.dispose()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
