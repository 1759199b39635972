"""The inbox on every driver: ids, duplicates, endings and purges, through each driver's own ways with values."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from qmq_client.consumer import consumer
from qmq_client.errors import AutocommitError, InboxRowLostError, InboxTransactionError
from qmq_client.inbox import Inbox
from qmq_client.inbox.async_inbox import AsyncInbox
from qmq_client.testing import drain
from tests.client.consumer.kit import GROUP, SUBJECT, Bench
from tests.client.consumer.shop import count_of, make_engine, rows_in_inbox
from tests.client.outbox.test_environments import run
from tests.services.databases import Database, Databases
from tests.services.drivers import Driver, drivers, drivers_apart, environment_apart

Result = TypeVar("Result")
ADD_ONE = sa.text("UPDATE tally SET n = n + 1")
#: An error that a handler swallows.
VOIDING = "INSERT INTO tally VALUES (NULL)"
COMMITTING = ("psycopg2", "asyncpg")
#: Every byte that some driver or server treats in its own way.
ODD_IDS = [bytes(range(first, first + 16)) for first in range(0, 256, 16)]


class Shop:
    """A database and one driver to it."""

    def __init__(self, database: Database, driver: Driver) -> None:
        self.driver, self.kind, self.is_async = driver, driver.kind, driver.is_async
        self.truth = make_engine(database.url)
        self._url = driver.url(database.url)

    def engine(self, **options: Any) -> Any:
        """An engine of that driver."""
        return (create_async_engine if self.is_async else sa.create_engine)(self._url, **options)

    def run(self, work: Callable[[Face], Awaitable[Result]], **options: Any) -> Result:
        """Do this with an inbox; blocking drivers never really wait."""

        async def with_inbox() -> Result:
            engine = self.engine(**options)
            face = Face(
                AsyncInbox(engine, group=GROUP) if self.is_async else Inbox(engine, group=GROUP)
            )
            try:
                return await work(face)
            finally:
                disposed = engine.dispose()
                if self.is_async:
                    await disposed

        return asyncio.run(with_inbox())


class Face:
    """An inbox of either kind, used in one way."""

    def __init__(self, inbox: Inbox | AsyncInbox) -> None:
        self._inbox = inbox

    async def handle(
        self, ids: list[bytes], *statements: str, forgotten: Sequence[bytes] = ()
    ) -> set[bytes]:
        """One effect with these statements; the new ids. Errors of `VOIDING` are swallowed."""
        if isinstance(self._inbox, Inbox):
            with self._inbox.open(ids) as work:
                for statement in statements:
                    with suppress(*_swallowed(statement)):
                        work.session.execute(sa.text(statement))
                work.forgotten.update(forgotten)
            return work.new
        async with self._inbox.open(ids) as opened:
            for statement in statements:
                with suppress(*_swallowed(statement)):
                    await opened.session.execute(sa.text(statement))
            opened.forgotten.update(forgotten)
        return opened.new

    async def purge(self) -> int:
        done = self._inbox.purge(timedelta(hours=1))
        return done if isinstance(done, int) else await done

    async def check(self) -> None:
        if (done := self._inbox.check()) is not None:
            await done

    async def probe(self) -> None:
        if (done := self._inbox.probe()) is not None:
            await done


def _swallowed(statement: str) -> list[type[Exception]]:
    return [sa.exc.DBAPIError] if statement == VOIDING else []


@pytest.fixture(params=drivers(), ids=str)
def shop(
    request: pytest.FixtureRequest, make_database: Callable[[str], Database]
) -> Iterator[Shop]:
    made = Shop(make_database(request.param.kind), request.param)
    yield made
    made.truth.dispose()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("driver", drivers_apart(), ids=str)
def test_C5_the_inbox_works_on_drivers_that_need_an_environment_of_their_own(
    driver: Driver, databases: Databases
) -> None:
    environment = environment_apart(driver.apart, driver.debian)
    told = run(environment, databases, __file__, "-k", driver.name)
    assert " passed" in told
    assert "skipped" not in told


def test_C5_of_ids_with_any_bytes_only_those_are_new_that_were_not_there(shop: Shop) -> None:
    many = [number.to_bytes(16) for number in range(1_200)]

    async def work(inbox: Face) -> list[int]:
        return [
            len(await inbox.handle(ids)) for ids in (ODD_IDS[:9], ODD_IDS, ODD_IDS[:1], many, many)
        ]

    assert shop.run(work) == [9, 7, 0, 1_200, 0]
    assert rows_in_inbox(shop.truth) == {(GROUP, one) for one in ODD_IDS + many}


def test_C5_an_effect_is_stored_with_its_id_and_undone_with_it(shop: Shop) -> None:
    async def work(inbox: Face) -> set[bytes]:
        with pytest.raises(sa.exc.SQLAlchemyError):
            await inbox.handle(
                ODD_IDS[:2], "UPDATE tally SET n = n + 1", "SELECT nothing FROM nowhere"
            )
        assert count_of(shop.truth) == 0
        await inbox.check()
        await inbox.probe()
        assert rows_in_inbox(shop.truth) == set()
        return await inbox.handle(ODD_IDS[:2], "UPDATE tally SET n = n + 1")

    assert shop.run(work) == set(ODD_IDS[:2])
    assert count_of(shop.truth) == 1


def test_C5_ids_that_are_forgotten_are_new_again(shop: Shop) -> None:
    async def work(inbox: Face) -> set[bytes]:
        await inbox.handle(ODD_IDS[:3], forgotten=ODD_IDS[1:2])
        return await inbox.handle(ODD_IDS[:3])

    assert shop.run(work) == {ODD_IDS[1]}


@pytest.mark.parametrize("goes_on", [True, False], ids=["goes on", "is done"])
@pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK"])
def test_C5_a_transaction_that_was_ended_is_refused(shop: Shop, ending: str, goes_on: bool) -> None:
    async def work(inbox: Face) -> None:
        with pytest.raises(InboxTransactionError):
            await inbox.handle(ODD_IDS[:1], ending, *[ADD_ONE.text] * goes_on)

    shop.run(work)
    # These do not notice that end, and the server commits each later statement by itself.
    assert count_of(shop.truth) == (goes_on and shop.driver.name in COMMITTING)


def test_C5_a_transaction_that_an_error_has_voided_is_refused(shop: Shop) -> None:
    """Also where the handler has swallowed the error, at which only PostgreSQL voids."""

    async def work(inbox: Face) -> None:
        with suppress(InboxTransactionError):
            await inbox.handle(ODD_IDS[:1], ADD_ONE.text, VOIDING)
            assert shop.kind != "postgresql", "it would have stored nothing"

    shop.run(work)
    is_stored = shop.kind != "postgresql"
    assert (count_of(shop.truth), len(rows_in_inbox(shop.truth))) == (is_stored, is_stored)


def test_a_connection_that_commits_by_itself_is_refused(shop: Shop) -> None:
    async def work(inbox: Face) -> None:
        with pytest.raises(AutocommitError):
            await inbox.handle(ODD_IDS[:1])

    shop.run(work, isolation_level="AUTOCOMMIT")
    assert rows_in_inbox(shop.truth) == set()


def test_C5_an_id_that_a_trigger_alters_is_reported(shop: Shop) -> None:
    with shop.truth.begin() as connection:
        for statement in ALTERING[shop.kind]:
            connection.exec_driver_sql(statement)

    async def work(inbox: Face) -> None:
        with pytest.raises(InboxRowLostError):
            await inbox.handle(ODD_IDS[:2])

    shop.run(work)
    assert rows_in_inbox(shop.truth) == set()


ALTERING = {
    "sqlite": [
        "CREATE TRIGGER alter_id AFTER INSERT ON qmq_inbox BEGIN "
        "UPDATE qmq_inbox SET consumer_group = 'other' WHERE message_id = NEW.message_id; END"
    ],
    "mysql": [
        "CREATE TRIGGER alter_id BEFORE INSERT ON qmq_inbox FOR EACH ROW "
        "SET NEW.consumer_group = 'other'"
    ],
    "postgresql": [
        "CREATE FUNCTION alter_id() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN "
        "UPDATE qmq_inbox SET consumer_group = 'other' WHERE message_id = NEW.message_id; "
        "RETURN NEW; END$$",
        "CREATE CONSTRAINT TRIGGER alter_id AFTER INSERT ON qmq_inbox DEFERRABLE INITIALLY "
        "DEFERRED FOR EACH ROW EXECUTE FUNCTION alter_id()",
    ],
}


def test_purging_forgets_old_ids(shop: Shop) -> None:
    async def work(inbox: Face) -> list[int]:
        await inbox.handle([number.to_bytes(16) for number in range(1_100)])
        young = await inbox.purge()
        with shop.truth.begin() as connection:
            connection.exec_driver_sql("UPDATE qmq_inbox SET received_at_ms = 1")
        await inbox.handle(ODD_IDS[1:2])
        return [young, await inbox.purge()]

    assert shop.run(work) == [0, 1_100]
    assert rows_in_inbox(shop.truth) == {(GROUP, ODD_IDS[1])}


def test_C5_a_consumer_handles_a_message_once(bench: Bench, shop: Shop) -> None:
    engine = shop.engine()

    def add(body: int, session: Session) -> None:
        session.execute(ADD_ONE)

    async def add_async(body: int, session: AsyncSession) -> None:
        await session.execute(ADD_ONE)

    handler = consumer(SUBJECT, group=GROUP, inbox=engine)(add_async if shop.is_async else add)
    bench.put(1)
    for _ in range(2):
        consumers = bench.consumers(handler)
        (member,) = consumers.members
        member.pull_once(is_blocking=False)
        member.work_once(is_blocking=False)
        member.ledger.drain()  # the process dies with its outcomes
        bench.clock.advance(60_000)
        drain(consumers)
        consumers.stop()
    assert count_of(shop.truth) == 1
    if not shop.is_async:  # the consumer does of an asynchronous one's connections
        engine.dispose()
