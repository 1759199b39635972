"""The departures service: one transaction per flight changes the board and sends its messages.

This is what an application looks like: `book` is ordinary SQLAlchemy code, and `producer.send` joins
its transaction. The history that the demo is judged by is written around it.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from examples.flights.data import ON_TIME_MINUTES_MAX, Flight, read_flights, severity
from examples.flights.database import open_engine
from examples.flights.events import fingerprint
from examples.flights.models import BoardBase, BoardEntry
from examples.flights.plan import (
    ARRIVED,
    BOARD,
    BOARDING_CLOSES,
    CANCELLED,
    DELAY_S_PER_MINUTE,
    DELAYED,
    DEPARTED,
    Plan,
    latency_ms,
)
from examples.flights.process import say
from qmq_client import Message, Producer, ProducerOptions, create_tables, current_session
from qmq_client import transactional as in_transaction
from tests.kit.events import Attempt, Commit, Event, Rollback
from tests.kit.history import History

#: How often the supervisor is told.
STATUS_EVERY = 100
#: Messages gather a little longer than by default: this service commits all the time, and what the
#: publisher's thread saves is its own.
LINGER_MS = 25


class NoTailNumberError(Exception):
    """A business rule: a flight without a tail number is not booked."""


class NoAirTimeError(Exception):
    """The arrival cannot be booked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A message of the transaction under way."""

    message: Message
    message_id: str
    transaction_id: str


class Departures:
    """Books flights, one transaction each."""

    def __init__(self, producer: Producer, history: History, acceptance: Acceptance) -> None:
        self._producer = producer
        self._acceptance = acceptance
        self._history = history
        #: A flight may be tried again by a later life of this process.
        self._life = os.getpid()
        self._sent: list[Sent] = []
        self._body: dict[str, Any] = {}
        self._body_hash = ""
        self.counts = {"committed": 0, "rolled_back": 0, "savepoints_rolled_back": 0}
        self.book = in_transaction(producer)(self._book)

    def work_on(self, flight: Flight) -> None:
        """Book one flight, and note in the history what was tried and what became of it."""
        self._sent.clear()
        self._body = asdict(flight)
        self._body_hash = fingerprint(self._body, flight.tail_number)
        transaction_id = self._transaction_id(flight)
        try:
            self.book(flight)
        except NoTailNumberError:
            self.counts["rolled_back"] += 1
            self._history.write(*self._undone(flight), Rollback(transaction_id=transaction_id))
            return
        self.counts["committed"] += 1
        arrival_id = f"{transaction_id}.arrival"
        events: list[Event] = [Commit(transaction_id=transaction_id)]
        if any(sent.transaction_id == arrival_id for sent in self._sent):
            events.append(Commit(transaction_id=arrival_id))
        self._history.write(*events)

    def _book(self, flight: Flight) -> None:
        session: Session = current_session()
        entry = BoardEntry(
            flight_index=flight.index,
            transaction_id=self._transaction_id(flight),
            flight=f"{flight.carrier}{flight.number}",
            day=flight.day,
            origin=flight.origin,
            destination=flight.destination,
            state="cancelled" if flight.departure_delay is None else "departed",
            departure_delay=flight.departure_delay,
        )
        session.add(entry)
        transaction_id = self._transaction_id(flight)
        if flight.departure_delay is None:
            self._send(CANCELLED, flight, transaction_id)
        else:
            self._send(DEPARTED, flight, transaction_id)
            if flight.departure_delay > ON_TIME_MINUTES_MAX:
                tag = severity(flight.departure_delay)
                self._send(DELAYED, flight, transaction_id, tags=(tag,))
                wait_s = flight.departure_delay * DELAY_S_PER_MINUTE
                self._send(BOARDING_CLOSES, flight, transaction_id, delay=wait_s)
            try:
                with session.begin_nested():
                    self._book_arrival(entry, flight, f"{transaction_id}.arrival")
            except NoAirTimeError:
                self.counts["savepoints_rolled_back"] += 1
                self._sent = [sent for sent in self._sent if sent.message.subject != ARRIVED]
        if flight.tail_number is None:
            raise NoTailNumberError(entry.flight)
        self._note_attempts()

    def _book_arrival(self, entry: BoardEntry, flight: Flight, transaction_id: str) -> None:
        entry.has_arrived = True
        entry.arrival_delay = flight.arrival_delay
        self._send(ARRIVED, flight, transaction_id)
        if flight.air_time is None:
            self._history.write(
                self._attempt(self._sent[-1]), Rollback(transaction_id=transaction_id)
            )
            raise NoAirTimeError(entry.flight)

    def _send(
        self,
        subject: str,
        flight: Flight,
        transaction_id: str,
        tags: tuple[str, ...] = (),
        delay: float | None = None,
    ) -> None:
        message = Message(subject, self._body, key=flight.tail_number, tags=tags, delay=delay)
        message_id = self._producer.send(message)
        self._acceptance.on_send(message_id)
        self._sent.append(
            Sent(message=message, message_id=message_id, transaction_id=transaction_id)
        )

    def _note_attempts(self) -> None:
        """Must be on record before COMMIT: a crash there leaves the outcome to the database."""
        self._history.write(*map(self._attempt, self._sent))

    def _undone(self, flight: Flight) -> list[Event]:
        arrival_id = f"{self._transaction_id(flight)}.arrival"
        events: list[Event] = [self._attempt(sent) for sent in self._sent]
        if any(sent.transaction_id == arrival_id for sent in self._sent):
            events.append(Rollback(transaction_id=arrival_id))
        return events

    def _attempt(self, sent: Sent) -> Attempt:
        return Attempt(
            message_id=sent.message_id,
            subject=sent.message.subject,
            key=sent.message.key or "",
            transaction_id=sent.transaction_id,
            body_hash=self._body_hash,
        )

    def _transaction_id(self, flight: Flight) -> str:
        return f"{flight.index}.{self._life}"


class Acceptance:
    """Milliseconds from the send of a message to the broker's durable answer."""

    def __init__(self) -> None:
        self._sent_at_s: dict[str, float] = {}
        self.values_ms: list[float] = []

    def on_send(self, message_id: str) -> None:
        """The message joined its transaction."""
        self._sent_at_s[message_id] = time.monotonic()

    def on_accepted(self, message_ids: Sequence[str]) -> None:
        """The broker has these; called by the publisher's thread."""
        now_s = time.monotonic()
        for message_id in message_ids:
            sent_at_s = self._sent_at_s.pop(message_id, None)
            if sent_at_s is not None:
                self.values_ms.append((now_s - sent_at_s) * 1000)


def next_index(sessions: sessionmaker[Session]) -> int:
    """Where to go on: behind the last flight on the board."""
    with sessions() as session:
        last = session.scalar(sa.select(sa.func.max(BoardEntry.flight_index)))
        return 0 if last is None else last + 1


def main(plan: Plan) -> None:
    flights = read_flights(frozenset(plan.months), plan.days)
    gc.freeze()  # the input stays to the end: the collector need not look through it again and again
    engine = open_engine(plan.databases[BOARD], BoardBase)
    create_tables(engine)
    sessions = sessionmaker(engine, expire_on_commit=False)
    first = next_index(sessions)
    acceptance = Acceptance()
    options = ProducerOptions(
        on_sent=acceptance.on_accepted,
        linger_ms=LINGER_MS,
        keep_sent_s=plan.keep_sent_s or None,
    )
    with (
        History.open(plan.path("history"), "departures") as history,
        Producer(sessions, plan.broker_url, options=options) as producer,
    ):
        say(ready=True, done=first)
        service = Departures(producer, history, acceptance)
        for flight in flights[first:]:
            service.work_on(flight)
            if flight.index % STATUS_EVERY == 0:
                say(done=flight.index + 1, **service.counts)
        producer.flush(5.0)
        say(
            done=len(flights),
            **service.counts,
            publisher=asdict(producer.stats),
            send_to_accepted=latency_ms(acceptance.values_ms),
        )
