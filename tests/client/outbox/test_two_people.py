"""Two at the same rows: what one has let go is not purged by the other, what one holds is passed by."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import pytest
import sqlalchemy as sa

from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.outbox.row import BatchOutcome, ParkedRow
from qmq_client.outbox.table import PARKED, create_tables
from qmq_watchdog.databases import Database as Ward
from tests.kit.listening import listening
from tests.services.databases import Database
from tests.watchdog.rows import OUTBOX, put_rows

WATCHDOG = b"the watchdog's !"


@contextmanager
def between_choice_and_change(change: str, act: Callable[[], object]) -> Iterator[list[str]]:
    """Do it once, right before such a statement is executed; what was met."""
    met: list[str] = []

    def before(*arguments: object) -> None:
        if str(arguments[2]).startswith(change) and not met:
            met.append(change)
            act()

    with listening(sa.Engine, before_cursor_execute=before):
        yield met


@pytest.fixture
def shop(a_server_database: Database) -> Iterator[Ward]:
    """With three rows that are parked."""
    engine = a_server_database.engine()
    create_tables(engine)
    made = Ward(name="shop", store=OutboxStore(engine), engine=engine)
    put_rows(made, 3)
    taken = made.store.claim(token=WATCHDOG, limit=3, lease_ms=60_000)
    parked = tuple(ParkedRow(message_id=row.message_id, error="no") for row in taken)
    made.store.settle(BatchOutcome(parked=parked), token=WATCHDOG)
    yield made
    made.close()


def test_O1_O2_a_row_that_somebody_retries_meanwhile_is_not_purged(shop: Ward) -> None:
    other = OutboxStore(shop.engine)
    with between_choice_and_change("DELETE", other.retry) as met:
        assert shop.store.purge() == 0
    assert met
    counts = shop.store.counts()
    assert (counts.live, counts.parked) == (3, 0)
    other.close()


def test_O3_a_row_that_somebody_retries_meanwhile_keeps_its_next_owner(shop: Ward) -> None:
    """A second retry must not take a row from the watchdog that has claimed it after the first."""
    other = OutboxStore(shop.engine)

    def retry_and_claim() -> None:
        assert other.retry() == 3
        assert len(other.claim(token=WATCHDOG, limit=3, lease_ms=60_000)) == 3

    with between_choice_and_change("UPDATE", retry_and_claim) as met:
        assert shop.store.retry() == 0
    assert met
    sent = tuple(row.message_id for row in shop.store.list_rows())
    assert other.settle(BatchOutcome(sent=sent), token=WATCHDOG) == 3
    other.close()


#: Of the last row, and of those before it.
CHOICE: Final = re.compile(rf"SELECT (max\()?\S*{OUTBOX}\W?\.id\b")


@contextmanager
def before_each_choice(act: Callable[[], object]) -> Iterator[None]:
    """Do it whenever rows to be changed are about to be chosen."""
    doing: list[bool] = []

    def before(*arguments: object) -> None:
        if CHOICE.match(str(arguments[2])) and not doing:
            doing.append(True)
            act()
            doing.clear()

    with listening(sa.Engine, before_cursor_execute=before):
        yield


@pytest.mark.parametrize("command", ["retry", "purge"])
def test_O7_what_is_parked_meanwhile_is_neither_retried_nor_purged(
    shop: Ward, command: str
) -> None:
    """A sweep parks at once what is damaged, so that there is always something to retry."""
    there = {row.message_id for row in shop.store.list_rows()}
    other, choices = OutboxStore(shop.engine), []

    def sweep() -> None:
        choices.append("one more")
        assert len(choices) < 10, "it does not end"
        if len(choices) > 1:
            put_rows(shop)
        taken = other.claim(token=WATCHDOG, limit=9, lease_ms=60_000)
        parked = tuple(ParkedRow(message_id=row.message_id, error="no") for row in taken)
        other.settle(BatchOutcome(parked=parked), token=WATCHDOG)

    change = getattr(shop.store, command)
    with before_each_choice(sweep):
        assert change(rows_max=1) == 3
    left = {row.message_id: row.state for row in shop.store.list_rows()}
    assert len(left.keys() - there) == len(choices) - 1, "the new ones are all there"
    assert {left[new] for new in left.keys() - there} == {PARKED}
    assert len(left.keys() & there) == (3 if command == "retry" else 0)
    other.close()


def test_W2_W5_a_claim_passes_by_what_somebody_holds_and_waits_for_nobody(shop: Ward) -> None:
    """As an application does that cancels a message in a transaction which takes its time."""
    assert shop.store.retry() == 3
    with shop.engine.connect() as connection:
        row = sa.select(OUTBOX.c.message_id).order_by(OUTBOX.c.id).limit(1)
        held = connection.scalar(row.with_for_update())
        claimed = shop.store.claim(token=WATCHDOG, limit=3, lease_ms=60_000)
        assert len(claimed) == 2
        assert held not in {each.message_id for each in claimed}
        connection.rollback()
    assert len(shop.store.claim(token=WATCHDOG, limit=3, lease_ms=60_000)) == 1
