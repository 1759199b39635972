"""R8: what a send adds to the caller's transaction while the publisher is sending.

Five kinds of transaction, each on a database of its own, in turns of some hundred: one business
INSERT; two business INSERTs; one business INSERT and one send, whose publisher hands the messages to a
real broker and deletes their rows meanwhile; the same without a publisher thread, so that nothing is
published before the turn ends; and one business INSERT beside a hand-written outbox: the same row as
text through the session's connection, its record ready-made, sent by nobody. The caller is one thread
that begins the next transaction at once, so publisher and broker compete with it for the interpreter,
processors and disk: what that costs is the difference between the two kinds of send. What the publisher
still has to do after the last transaction of a turn is waited for before the next turn begins.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from benchmarks.load import BODIES, BODY_BYTES, SUBJECT, encode_message, make_messages
from benchmarks.measure import interleave, paired_ratios, percentile
from benchmarks.places import Place, open_places
from benchmarks.processes import Broker, written_bytes
from benchmarks.result import Conditions, Goal, Row
from benchmarks.shop import make_order, make_posting
from benchmarks.suite import Bench
from qmq_client import Message, Producer, ProducerOptions
from qmq_client.ids import TOKEN_BYTES
from qmq_client.outbox.database.dialect import dialect_of
from qmq_client.outbox.database.placeholders import placeholders
from qmq_client.outbox.table import DEFAULT_TABLES
from qmq_client.wire.message_id import MESSAGE_ID_BYTES

#: Turns of each kind in one round of the benchmark.
TURNS: Final = 2
KINDS: Final = ("plain", "two", "hand", "alone", "send")
#: How much longer than the plain commit a send may take; a server's round trip weighs more than a
#: file's.
PLAIN_BOUND: Final = {"sqlite": 1.25}
SERVER_PLAIN_BOUND: Final = 1.45
#: How much longer the slowest of a hundred may take than those with two INSERTs.
SLOWEST_BOUND: Final = 1.5

Fill = Callable[[Session, int], None]


class LeftBehindError(Exception):
    """Messages of a turn are still in the outbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Some hundred transactions of one kind, one after the other."""

    times_ms: list[float]
    #: By this process, the broker and the database's server, until the publisher came to rest.
    written_bytes: int

    def p(self, share: float) -> float:
        """Milliseconds that this share of the transactions did not exceed."""
        return percentile(self.times_ms, share)


class Caller:
    """One kind of transaction on one database."""

    def __init__(
        self,
        engine: sa.Engine,
        fill: Fill,
        *,
        place: Place,
        broker: Broker,
        after_turn: Callable[[], object],
    ) -> None:
        self.engine = engine
        self.fill = fill
        self.place = place
        self.broker = broker
        self.after_turn = after_turn
        self.count = 0

    def turn(self, transaction_count: int) -> Turn:
        """Time some transactions."""
        before_bytes = self.written_bytes()
        times_ms = []
        for i in range(self.count, self.count + transaction_count):
            started_ns = time.perf_counter_ns()
            with Session(self.engine) as session, session.begin():
                self.fill(session, i)
            times_ms.append((time.perf_counter_ns() - started_ns) / 1e6)
        self.count += transaction_count
        self.after_turn()
        return Turn(times_ms=times_ms, written_bytes=self.written_bytes() - before_bytes)

    def written_bytes(self) -> int:
        """Bytes handed to the disk so far by this process, the broker and the server."""
        own_bytes = written_bytes(os.getpid()) + self.broker.written_bytes()
        return own_bytes + self.place.written_bytes()


def run(bench: Bench) -> list[Row]:
    """Milliseconds of each kind and their ratios, turn by turn, one database after the other."""
    with open_places(bench) as places:
        return [row for place in places for row in run_place(bench, place)]


def run_place(bench: Bench, place: Place) -> list[Row]:
    """All figures on one database."""
    transaction_count = bench.effort.pick(tiny=5, quick=150, full=500)
    turns = bench.rounds * bench.effort.pick(tiny=1, quick=TURNS, full=TURNS)
    with bench.processes() as processes:
        broker = processes.start_broker()
        times = run_turns(place, broker, turns, transaction_count)
    bound = PLAIN_BOUND.get(place.kind, SERVER_PLAIN_BOUND)
    plain, two, hand, alone, sent = ([turn.p(0.5) for turn in times[name]] for name in KINDS)
    slowest = [turn.p(0.99) for turn in times["send"]]
    slowest_of_two = [turn.p(0.99) for turn in times["two"]]
    figures = [
        ("one INSERT, p50", "ms", plain, None, "plain"),
        ("two INSERTs, p50", "ms", two, None, "two"),
        ("INSERT and hand-written outbox, p50", "ms", hand, None, "hand"),
        ("INSERT and send without a publisher thread, p50", "ms", alone, None, "alone"),
        ("INSERT and send, p50", "ms", sent, None, "send"),
        ("INSERT and send, p99", "ms", slowest, None, "send"),
        ("p50: send / two INSERTs", "ratio", paired_ratios(sent, two), 1.10, "send"),
        (
            "p99: send / two INSERTs",
            "ratio",
            paired_ratios(slowest, slowest_of_two),
            SLOWEST_BOUND,
            "send",
        ),
        ("p50: send / one INSERT", "ratio", paired_ratios(sent, plain), bound, "send"),
        (
            "p50: hand-written outbox / one INSERT",
            "ratio",
            paired_ratios(hand, plain),
            None,
            "hand",
        ),
        (
            "p50: send without a publisher thread / one INSERT",
            "ratio",
            paired_ratios(alone, plain),
            None,
            "alone",
        ),
        ("p50: send / hand-written outbox", "ratio", paired_ratios(sent, hand), None, "send"),
    ]
    return [
        Row(
            figure=f"{place.name}: {figure}",
            unit=unit,
            samples=tuple(samples),
            conditions=conditions_of(place, times[kind], transaction_count),
            goal=None if bound is None else Goal(bound=bound, is_floor=False),
        )
        for figure, unit, samples, bound, kind in figures
    ]


def conditions_of(place: Place, turns: list[Turn], transaction_count: int) -> Conditions:
    """What the turns of one kind were run with."""
    return Conditions(
        durability=place.durability,
        client="SQLAlchemy ORM, one caller thread, publisher thread in the same process",
        batch_messages=1,
        message_bytes=BODY_BYTES,
        written_bytes=sorted(turn.written_bytes for turn in turns)[len(turns) // 2],
        note=f"a sample is a turn of {transaction_count} transactions",
    )


def run_turns(
    place: Place, broker: Broker, turns: int, transaction_count: int
) -> dict[str, list[Turn]]:
    """All turns of each kind."""
    engines = {kind: place.open(f"{kind}_caller") for kind in KINDS}
    messages = make_messages()
    later = ProducerOptions(background=False)
    with (
        Producer(engines["send"], broker.url) as producer,
        Producer(engines["alone"], broker.url, options=later) as alone,
    ):
        hand = HandWritten(engines["hand"])
        fills: dict[str, Fill] = {
            "plain": insert_one,
            "two": insert_two,
            "hand": hand.insert,
            "alone": partial(send_one, alone, messages),
            "send": partial(send_one, producer, messages),
        }
        ends: dict[str, Callable[[], object]] = {"hand": hand.delete, "alone": alone.flush}
        callers = {
            kind: Caller(
                engines[kind],
                fills[kind],
                place=place,
                broker=broker,
                after_turn=ends.get(kind, producer.flush),
            )
            for kind in KINDS
        }
        for caller in callers.values():
            caller.turn(min(50, transaction_count))  # connections, imports, prepared statements
        times = interleave(
            {kind: partial(callers[kind].turn, transaction_count) for kind in KINDS}, rounds=turns
        )
    check_empty(engines["send"])
    check_empty(engines["alone"])
    for engine in engines.values():
        engine.dispose()
    return times


class HandWritten:
    """An outbox without us: one INSERT as text, of a row like ours."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        now_ms, places = dialect_of(engine).now_ms, placeholders(engine.dialect)
        self._text = (
            f"INSERT INTO {DEFAULT_TABLES.outbox.name} (message_id, subject, ordering_key, record, token, "
            "state, attempts, due_at_ms, created_at_ms) "
            f"VALUES ({', '.join(islice(places, 5))}, 0, 0, {now_ms} + 5000, {now_ms})"
        )
        self._records = [encode_message(message) for message in islice(make_messages(), BODIES)]

    def insert(self, session: Session, i: int) -> None:
        """The transaction with a message."""
        session.add(make_order(i))
        record = self._records[i % BODIES]
        values = (i.to_bytes(MESSAGE_ID_BYTES), SUBJECT, None, record, bytes(TOKEN_BYTES))
        session.connection().exec_driver_sql(self._text, values)

    def delete(self) -> None:
        """What a publisher would have done."""
        with self._engine.begin() as connection:
            connection.execute(sa.delete(DEFAULT_TABLES.outbox))


def insert_one(session: Session, i: int) -> None:
    """The plain transaction."""
    session.add(make_order(i))


def insert_two(session: Session, i: int) -> None:
    """The transaction that a send is measured against."""
    session.add(make_order(i))
    session.add(make_posting(i))


def send_one(producer: Producer, messages: Iterator[Message], session: Session, i: int) -> None:
    """The transaction with a message."""
    session.add(make_order(i))
    producer.send(next(messages), session=session)


def check_empty(engine: sa.Engine) -> None:
    """Every message was accepted and its row deleted; else the figures would leave work out."""
    with engine.connect() as connection:
        count = connection.scalar(sa.select(sa.func.count()).select_from(DEFAULT_TABLES.outbox))
    if count:
        raise LeftBehindError(f"{count} rows are still in the outbox after the producer's close")
