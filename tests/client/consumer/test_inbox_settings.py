"""What a consumer takes for its inbox, and when it says that something else was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from qmq_client.consumer import consumer
from qmq_client.errors import ConfigurationError, DatabaseUnavailableError, OutboxMissingError
from qmq_client.inbox import Inbox
from qmq_client.outbox.table import create_tables
from tests.client.consumer.kit import GROUP, SUBJECT, Bench


@pytest.mark.parametrize("source", ["sqlite:///e.db", 1, ["x"]])
def test_an_inbox_that_is_none_is_refused_at_decoration(source: Any) -> None:
    with pytest.raises(ConfigurationError, match="sessionmaker bound to an engine"):
        consumer(SUBJECT, group=GROUP, inbox=source)


@pytest.mark.parametrize("source", [sessionmaker(), lambda: 1])
def test_an_inbox_without_an_engine_is_refused_when_the_consumers_are_made(
    bench: Bench, source: Any
) -> None:
    handler = consumer(SUBJECT, group=GROUP, inbox=source)(lambda body: None)
    with pytest.raises(ConfigurationError, match="no session with an engine"):
        bench.consumers(handler)


def test_a_database_of_an_inbox_that_cannot_be_opened_is_reported_before_the_start(
    bench: Bench, tmp_path: Path
) -> None:
    nowhere = sa.create_engine(f"sqlite:///{tmp_path}/nowhere/shop.db")
    handler = consumer(SUBJECT, group=GROUP, inbox=nowhere)(lambda body: None)
    consumers = bench.consumers(handler)
    with pytest.raises(DatabaseUnavailableError, match=f"inbox of {SUBJECT}/{GROUP}"):
        consumers.start()


def test_a_database_of_an_inbox_that_is_locked_is_reported_before_the_start(
    bench: Bench, tmp_path: Path
) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db", connect_args={"timeout": 0})
    create_tables(engine)
    consumers = bench.consumers(consumer(SUBJECT, group=GROUP, inbox=engine)(lambda body: None))
    with engine.connect() as other:
        other.exec_driver_sql("BEGIN IMMEDIATE")
        with pytest.raises(DatabaseUnavailableError, match="locked"):
            consumers.start()
    engine.dispose()


@pytest.mark.parametrize("driver", ["postgresql+psycopg", "mysql+pymysql"])
def test_an_inbox_whose_database_is_away_is_made_all_the_same(bench: Bench, driver: str) -> None:
    nowhere = sa.create_engine(f"{driver}://nobody@127.0.0.1:1/nothing")
    consumers = bench.consumers(consumer(SUBJECT, group=GROUP, inbox=nowhere)(lambda body: None))
    with pytest.raises(DatabaseUnavailableError, match=f"inbox of {SUBJECT}/{GROUP}"):
        consumers.start()


def test_a_missing_table_is_reported_before_any_thread_starts(bench: Bench, tmp_path: Path) -> None:
    empty = sa.create_engine(f"sqlite:///{tmp_path}/empty.db")
    consumers = bench.consumers(consumer(SUBJECT, group=GROUP, inbox=empty)(lambda body: None))
    with pytest.raises(OutboxMissingError) as caught:
        consumers.start()
    text = str(caught.value)
    assert f"table main.qmq_inbox is missing in sqlite:///{tmp_path}/empty.db" in text
    assert "qmq db migrate" in text
    assert consumers._threads.all() == []
    empty.dispose()


async def takes_a_plain_session(body: int, session: Session) -> None: ...
async def takes_a_session_of_a_loop(body: int, session: AsyncSession) -> None: ...


@pytest.mark.parametrize(
    ("function", "is_async"), [(takes_a_plain_session, True), (takes_a_session_of_a_loop, False)]
)
def test_C5_a_session_of_the_other_kind_than_the_inbox_gives_is_refused(
    bench: Bench, function: Any, is_async: bool
) -> None:
    """Else its statements would never run, and the message be acked."""
    engine: Any = sa.create_engine("sqlite://")
    if is_async:
        engine = create_async_engine("sqlite+aiosqlite://")
    mark = consumer(SUBJECT, group=GROUP, inbox=engine)
    with pytest.raises(ConfigurationError, match=r"asks for a (Async)?Session"):
        bench.consumers(mark(function))

    async def takes_any_session(body: int, session: Any) -> None: ...

    bench.consumers(mark(takes_any_session))


def test_an_inbox_of_another_group_is_refused(bench: Bench) -> None:
    handler = consumer(
        SUBJECT, group=GROUP, inbox=Inbox(sa.create_engine("sqlite://"), group="other")
    )(lambda body: None)
    with pytest.raises(ConfigurationError, match="other"):
        bench.consumers(handler)
