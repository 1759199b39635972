"""A database of an inbox that is away: its messages wait for it, however long that takes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from qmq_client.consumer import Consumers, consumer
from qmq_client.consumer.outage import PROBE_BACKOFF
from qmq_client.testing import MemoryTransport, drain
from qmq_client.wire.deliveries import Deliveries
from qmq_client.wire.requests import PullRequest
from tests.client.consumer.kit import GROUP, SUBJECT, Bench
from tests.client.consumer.shop import count_of, gone, make_engine
from tests.kit.waiting import wait_for
from tests.services.databases import Database

ADD_ONE = sa.text("UPDATE tally SET n = n + 1")
ATTEMPTS_MAX = 2
HOUR_MS = 3_600_000
PROBE_MS_MAX = PROBE_BACKOFF.max_ms
NAME = f"{SUBJECT}/{GROUP}"


class Line:
    """What leads to the database of an inbox, and how it fails."""

    def __init__(self, database: Database, *, is_async: bool) -> None:
        self.is_async = is_async
        self.is_away = False
        #: So many transactions will not be opened, though the database is there.
        self.refused = 0
        #: What a COMMIT raises.
        self.commit_error: Exception | None = None
        url = database.async_url if is_async else database.url
        self._engine: Any = create_async_engine(url) if is_async else sa.create_engine(url)

    def session(self) -> Any:
        """A session, as the inbox asks for it."""
        if self.is_away or self.refused:
            self.refused = max(0, self.refused - 1)
            raise gone("BEGIN")
        line = self

        class OnLine(Session):
            def commit(self) -> None:
                if line.commit_error is not None:
                    raise line.commit_error
                super().commit()

        if self.is_async:
            return AsyncSession(self._engine, sync_session_class=OnLine)
        return OnLine(self._engine)

    def go_away(self) -> None:
        self.is_away, self.commit_error = True, gone("COMMIT")

    def come_back(self) -> None:
        self.is_away, self.commit_error = False, None

    def close(self) -> None:
        """Let go of its connections; the consumer does of an asynchronous one's."""
        if not self.is_async:
            self._engine.dispose()

    def adding(self, then: Callable[[], object] = list, **settings: Any) -> Callable[..., Any]:
        """A handler that counts its messages in the database, and does this behind that."""
        terms: Any = {"group": GROUP, "inbox": self.session, "max_attempts": 1} | settings

        @consumer(SUBJECT, **terms)
        def add(body: int, session: Session) -> None:
            session.execute(ADD_ONE)
            then()

        @consumer(SUBJECT, **terms)
        async def add_async(body: int, session: AsyncSession) -> None:
            await session.execute(ADD_ONE)
            then()

        return add_async if self.is_async else add


@pytest.fixture(params=[False, True], ids=["plain", "async"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def line(sqlite_database: Database, is_async: bool) -> Iterator[Line]:
    make_engine(sqlite_database.url).dispose()
    with closing(Line(sqlite_database, is_async=is_async)) as made:
        yield made


@pytest.fixture
def shop(sqlite_database: Database) -> Iterator[sa.Engine]:
    """The database of `line`, whatever becomes of that."""
    engine = sa.create_engine(sqlite_database.url)
    yield engine
    engine.dispose()


@contextmanager
def of(bench: Bench, handler: Callable[..., Any]) -> Iterator[Consumers]:
    consumers = bench.consumers(handler)
    try:
        yield consumers
    finally:
        consumers.stop()


def fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_C4_an_outage_of_the_database_makes_no_dead_letters(
    bench: Bench, a_database: Database, engine: sa.Engine, is_async: bool
) -> None:
    bench.put(1)
    with (
        closing(Line(a_database, is_async=is_async)) as line,
        of(bench, line.adding(max_attempts=ATTEMPTS_MAX)) as consumers,
    ):
        line.go_away()
        for _ in range(3 * ATTEMPTS_MAX):
            drain(consumers)
            bench.clock.advance(HOUR_MS)
        assert bench.broker.dead_letters(SUBJECT, GROUP) == []
        assert bench.counters(consumers)["pulled"] == 1
        line.come_back()
        drain(consumers)
    assert count_of(engine) == 1
    assert bench.broker.lag(SUBJECT, GROUP) == 0


def test_C4_what_a_consumer_holds_goes_back_at_once_and_nothing_is_pulled_until_a_probe_succeeds(
    bench: Bench, shop: sa.Engine, line: Line
) -> None:
    bench.put(1, 2, 3)
    with of(bench, line.adding(concurrency=3)) as consumers:
        line.go_away()
        (member,) = consumers.members
        member.pull_once(is_blocking=False)
        member.work_once(is_blocking=False)
        assert member.prefetch.count == 0, "the others are not tried one after the other"
        for _ in range(3):
            drain(consumers)
        assert bench.transport.calls["pull"] == 1
        assert bench.counters(consumers)["nacked"] == 3
        line.come_back()
        bench.clock.advance(PROBE_MS_MAX)
        drain(consumers)
    assert count_of(shop) == 3
    assert bench.broker.dead_letters(SUBJECT, GROUP) == []


def test_C4_messages_that_arrive_when_the_outage_has_begun_go_back_to_the_broker(
    bench: Bench, line: Line
) -> None:
    class Slow(MemoryTransport):
        def pull(self, request: PullRequest) -> Deliveries:
            answer = super().pull(request)
            member.work_once(is_blocking=False)
            return answer

    consumers = Consumers(line.adding(concurrency=2), Slow(bench.broker), clock=bench.clock)
    (member,) = consumers.members
    bench.put(1)
    member.pull_once(is_blocking=False)
    line.go_away()
    bench.put(2)
    assert member.pull_once(is_blocking=False).count == 1
    assert bench.counters(consumers)["nacked"] == 2
    assert member.prefetch.count == 0
    consumers.stop()


def test_C8_a_stop_in_an_outage_is_clean_and_leaves_the_messages_to_others(
    bench: Bench, line: Line
) -> None:
    consumers = bench.consumers(line.adding())
    consumers.start()
    line.go_away()
    bench.put(1, 2)
    wait_for(lambda: bench.counters(consumers).get("inbox_failures"))
    assert consumers.stop().is_clean
    answer = bench.broker.pull(
        PullRequest(subject=SUBJECT, group=GROUP, consumer="other", max_messages=10)
    )
    assert len(answer.messages) == 2


def test_C6_what_keeps_one_message_from_its_handler_holds_up_no_other(
    bench: Bench, shop: sa.Engine, line: Line
) -> None:
    bench.put(1, 2)
    with of(bench, line.adding()) as consumers:
        line.refused = 1
        drain(consumers)
        assert count_of(shop) == 1
        assert "inbox_failures" not in bench.counters(consumers)
        bench.clock.advance(HOUR_MS)
        drain(consumers)
    assert count_of(shop) == 2
    assert bench.broker.dead_letters(SUBJECT, GROUP) == []


def test_C4_an_outage_behind_the_handler_is_no_attempt(
    bench: Bench, shop: sa.Engine, line: Line
) -> None:
    bench.put(1)
    with of(bench, line.adding(line.go_away)) as consumers:
        drain(consumers)
    assert count_of(shop) == 0
    line.come_back()
    with of(bench, line.adding()) as consumers:
        drain(consumers)
    assert count_of(shop) == 1
    assert bench.broker.dead_letters(SUBJECT, GROUP) == []


def test_C4_a_connection_lost_behind_the_handler_is_an_attempt_where_the_database_is_there(
    bench: Bench, line: Line
) -> None:
    """The handler may be why: it let the connection idle for longer than the server bears."""
    bench.put(1)
    with of(bench, line.adding()) as consumers:
        line.commit_error = gone("COMMIT")
        drain(consumers)
    assert len(bench.broker.dead_letters(SUBJECT, GROUP)) == 1


def test_C4_what_a_handler_raises_is_an_attempt_also_where_the_database_is_away(
    bench: Bench, line: Line
) -> None:
    """Its statement may be what brings the server down, each time."""

    def bring_down() -> None:
        line.go_away()
        fail(gone("SELECT all"))

    bench.put(1)
    with of(bench, line.adding(bring_down)) as consumers:
        drain(consumers)
    assert len(bench.broker.dead_letters(SUBJECT, GROUP)) == 1


def test_C4_an_outage_in_the_middle_of_a_handler_costs_one_attempt_however_long_it_lasts(
    bench: Bench, shop: sa.Engine, line: Line
) -> None:
    def lose_the_database() -> None:
        line.go_away()
        fail(gone("SELECT 1"))

    bench.put(1)
    with of(bench, line.adding(lose_the_database, max_attempts=ATTEMPTS_MAX)) as consumers:
        for _ in range(3 * ATTEMPTS_MAX):
            drain(consumers)
            bench.clock.advance(HOUR_MS)
    assert bench.broker.dead_letters(SUBJECT, GROUP) == []
    line.come_back()
    with of(bench, line.adding(max_attempts=ATTEMPTS_MAX)) as consumers:
        drain(consumers)
    assert count_of(shop) == 1


def test_C4_what_the_commit_finds_wrong_with_a_message_is_an_attempt_also_in_an_outage(
    bench: Bench, line: Line
) -> None:
    def leave_dangling() -> None:
        line.go_away()
        line.commit_error = sa.exc.IntegrityError("COMMIT", {}, ValueError("nobody has that key"))

    bench.put(1)
    with of(bench, line.adding(leave_dangling)) as consumers:
        drain(consumers)
    assert len(bench.broker.dead_letters(SUBJECT, GROUP)) == 1


def test_W8_an_outage_is_reported_when_it_begins_and_when_it_ends(
    bench: Bench, line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bench.put(*range(5))
    with of(bench, line.adding(concurrency=5)) as consumers:
        line.go_away()
        drain(consumers)
        bench.clock.advance(1_000)
        drain(consumers)
        failures = bench.counters(consumers)["inbox_failures"]
        line.come_back()
        bench.clock.advance(PROBE_MS_MAX)
        drain(consumers)
        lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        f"inbox_unreachable seconds=0.0 failures=1 consumer={NAME} "
        "error=OperationalError (ConnectionError): nobody answers",
        f"inbox_reachable seconds=6.0 failures={failures} consumer={NAME}",
    ]


def test_W8_handlers_with_one_inbox_go_through_its_outage_together(
    bench: Bench, line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    sessions = line.session
    handlers = [line.adding(inbox=sessions, group=f"group{number}") for number in range(20)]
    consumers = bench.consumers(*handlers)
    line.go_away()
    bench.put(1)
    for _ in range(10):
        drain(consumers)
        bench.clock.advance(PROBE_MS_MAX)
    events = [record.getMessage().split()[0] for record in caplog.records]
    consumers.stop()
    assert sum(one["inbox_failures"] for one in consumers.counters().values()) == 10
    assert events.count("inbox_unreachable") == 3, "after 0, 10 and 30 seconds"
