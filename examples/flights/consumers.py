"""The two consumer groups, each in a process of its own.

`tallies` keeps counts per airport, carrier and day in its own database through the inbox, so each
message has its effect once. `counter` only counts what it is handed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.orm import Session, sessionmaker

from examples.flights.database import open_engine
from examples.flights.events import fingerprint
from examples.flights.models import Effect, Tally, TallyBase
from examples.flights.plan import (
    COUNTER,
    DELAYED,
    LEASE_MS,
    SUBJECTS,
    TALLIES,
    Plan,
    latency_ms,
)
from examples.flights.process import say
from qmq_client import Consumers, Delivery, Message, consumer, create_tables
from tests.kit.events import Delivered
from tests.kit.history import History

STATUS_EVERY_S = 0.2
#: Messages of one transaction of the tallies service.
TALLIES_BATCH = 100
COUNTER_BATCH = 200
#: How long messages may wait for company; keeps requests and transactions few.
BATCH_WAIT_MS = 100
#: The key of a tally.
PLACE = ("event", "airport", "carrier", "day")


class Figures:
    """What a consumer process counts about itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latencies_ms: list[float] = []
        self.events: Counter[str] = Counter()
        self.deliveries = 0
        self.redeliveries = 0

    def note(self, deliveries: list[Delivery]) -> None:
        """Count messages that are about to be handled."""
        now_s = time.time()
        with self._lock:
            for delivery in deliveries:
                born_at = delivery.message.deliver_at or delivery.message.born_at
                assert born_at is not None
                self.deliveries += 1
                self.redeliveries += delivery.attempt > 1
                self._latencies_ms.append((now_s - born_at.timestamp()) * 1000)
                self.events[event_name(delivery.message)] += 1

    def status(self) -> dict[str, Any]:
        with self._lock:
            return {
                "done": self.deliveries,
                "redelivered": self.redeliveries,
                "events": dict(self.events),
                "send_to_handler": latency_ms(list(self._latencies_ms)),
            }


def event_name(message: Message) -> str:
    """What a message counts as: the subject's last word, for late departures with the severity."""
    name = message.subject.removeprefix("flight.")
    return f"{name} {message.tags[0]}" if message.subject == DELAYED else name


def note_in_history(history: History, group: str, deliveries: list[Delivery]) -> None:
    """Write down what this process holds, before it handles it."""
    history.write(
        *[
            Delivered(
                group=group,
                consumer=group,
                message_id=delivery.message.message_id or "",
                subject=delivery.message.subject,
                attempt=delivery.attempt,
                body_hash=fingerprint(delivery.message.body, delivery.message.key),
                sequence=delivery.sequence,
            )
            for delivery in deliveries
        ]
    )


def book_tallies(session: Session, deliveries: list[Delivery]) -> None:
    """Count these messages in the transaction of the inbox."""
    counts: Counter[tuple[str, str, str, str]] = Counter()
    for delivery in deliveries:
        body = delivery.message.body
        event = event_name(delivery.message)
        counts[event, body["origin"], body["carrier"], body["day"]] += 1
    connection = session.connection()
    ids = [{"message_id": delivery.message.message_id} for delivery in deliveries]
    connection.execute(sa.insert(Effect), ids)
    # In one order everywhere, or two of these transactions could wait for each other.
    rows = [
        dict(zip(PLACE, place, strict=True), count=count) for place, count in sorted(counts.items())
    ]
    connection.execute(add_up(connection.dialect.name), rows)


def add_up(dialect: str) -> sa.Insert:
    """A statement that inserts a tally or adds its count to the one that is there."""
    if dialect in ("mysql", "mariadb"):
        into = mysql.insert(Tally)
        return into.on_duplicate_key_update(count=Tally.count + into.inserted.count)
    query = (postgresql if dialect == "postgresql" else sqlite).insert(Tally)
    statement: sa.Insert = query.on_conflict_do_update(
        index_elements=PLACE, set_={"count": Tally.count + query.excluded.count}
    )
    return statement


def make_tallies(plan: Plan, history: History, figures: Figures) -> Callable[..., None]:
    """The handler of the group `tallies`, for every subject."""
    engine = open_engine(plan.databases[TALLIES], TallyBase)
    create_tables(engine)
    die = plan.path("die")

    def tally(deliveries: list[Delivery], session: Session) -> None:
        note_in_history(history, TALLIES, deliveries)
        figures.note(deliveries)
        book_tallies(session, deliveries)
        _die_when_told(die)

    sessions = sessionmaker(engine)
    for subject in SUBJECTS:
        mark = consumer(
            subject,
            group=TALLIES,
            inbox=sessions,
            batch_size=TALLIES_BATCH,
            max_wait_ms=BATCH_WAIT_MS,
            lease_ms=LEASE_MS,
        )
        mark(tally)
    return tally


def make_counter(history: History, figures: Figures) -> Callable[..., None]:
    """The handler of the group `counter`, for every subject."""

    def count(deliveries: list[Delivery]) -> None:
        note_in_history(history, COUNTER, deliveries)
        figures.note(deliveries)

    for subject in SUBJECTS:
        mark = consumer(
            subject,
            group=COUNTER,
            batch_size=COUNTER_BATCH,
            max_wait_ms=BATCH_WAIT_MS,
            lease_ms=LEASE_MS,
        )
        mark(count)
    return count


def main(plan: Plan, group: str) -> None:
    figures = Figures()
    with History.open(plan.path("history"), group) as history:
        if group == TALLIES:
            handler = make_tallies(plan, history, figures)
        else:
            handler = make_counter(history, figures)
        stopped = threading.Event()
        reporter = threading.Thread(target=_report, args=(figures, stopped))
        reporter.start()
        try:
            Consumers([handler], plan.broker_url).run()
        finally:
            stopped.set()
            reporter.join()
            say(**figures.status())


def _report(figures: Figures, stopped: threading.Event) -> None:
    while not stopped.wait(STATUS_EVERY_S):
        say(done=figures.deliveries)


def _die_when_told(die: Path) -> None:
    """The worst moment: after the change, before the commit."""
    if die.exists():
        die.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
