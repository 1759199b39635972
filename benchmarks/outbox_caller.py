"""R8: what a send adds to the caller's transaction while the publisher is sending.

Three kinds of transaction, each on a database file of its own, in turns of some hundred: one business
INSERT; two business INSERTs; one business INSERT and one send, whose publisher hands the messages to a
real broker and deletes their rows meanwhile. The caller is one thread that begins the next transaction
at once, so publisher and broker compete with it for processors and disk. What the publisher still has
to do after the last transaction of a turn is waited for before the next turn begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from benchmarks.load import BODY_BYTES, make_messages
from benchmarks.measure import interleave, paired_ratios, percentile
from benchmarks.result import Conditions, Goal, Row
from benchmarks.shop import DURABILITY, make_order, make_posting, open_database
from benchmarks.suite import Bench
from qmq_client import Producer
from qmq_client.outbox.table import DEFAULT_TABLES

#: Turns of each kind in one round of the benchmark.
TURNS: Final = 2
FLUSH_DEADLINE_S: Final = 30.0

Fill = Callable[[Session, int], None]


class LeftBehindError(Exception):
    """Messages of a turn are still in the outbox."""


class Caller:
    """One kind of transaction on one database; a turn is some hundred of them."""

    def __init__(self, engine: sa.Engine, fill: Fill, *, after_turn: Callable[[], None]) -> None:
        self.engine = engine
        self.fill = fill
        self.after_turn = after_turn
        self.count = 0

    def turn(self, transaction_count: int) -> list[float]:
        """Milliseconds of each transaction."""
        times_ms = []
        for i in range(self.count, self.count + transaction_count):
            started_ns = time.perf_counter_ns()
            with Session(self.engine) as session, session.begin():
                self.fill(session, i)
            times_ms.append((time.perf_counter_ns() - started_ns) / 1e6)
        self.count += transaction_count
        self.after_turn()
        return times_ms


def run(bench: Bench) -> list[Row]:
    """Milliseconds of each kind and their ratios, turn by turn."""
    transaction_count = bench.effort.pick(tiny=5, quick=300, full=600)
    turns = bench.rounds * bench.effort.pick(tiny=1, quick=TURNS, full=TURNS)
    with bench.processes() as processes:
        broker = processes.start_broker()
        times = run_turns(bench, broker.url, turns, transaction_count)
    plain, two, sent = ([percentile(turn, 0.5) for turn in times[name]] for name in times)
    slowest = [percentile(turn, 0.99) for turn in times["send"]]
    conditions = Conditions(
        durability=DURABILITY,
        client="SQLAlchemy ORM, one caller thread, publisher thread in the same process",
        batch_messages=1,
        message_bytes=BODY_BYTES,
        note=f"turns of {transaction_count} transactions, a sample for each turn",
    )
    figures = [
        ("one INSERT, p50", "ms", plain, None),
        ("two INSERTs, p50", "ms", two, None),
        ("INSERT and send, p50", "ms", sent, None),
        ("INSERT and send, p99", "ms", slowest, None),
        ("p50: send / two INSERTs", "ratio", paired_ratios(sent, two), 1.10),
        ("p50: send / one INSERT", "ratio", paired_ratios(sent, plain), 1.25),
    ]
    return [
        Row(
            figure=figure,
            unit=unit,
            samples=tuple(samples),
            conditions=conditions,
            goal=None if bound is None else Goal(bound=bound, is_floor=False),
        )
        for figure, unit, samples, bound in figures
    ]


def run_turns(
    bench: Bench, broker_url: str, turns: int, transaction_count: int
) -> dict[str, list[list[float]]]:
    """The times of each transaction by kind and turn."""
    names = ("plain", "two", "send")
    engines = {name: open_database(bench.directory / f"{name}.sqlite") for name in names}
    messages = make_messages()
    with Producer(engines["send"], broker_url) as producer:

        def send(session: Session, i: int) -> None:
            session.add(make_order(i))
            producer.send(next(messages), session=session)

        callers = {
            "plain": Caller(engines["plain"], insert_one, after_turn=rest),
            "two": Caller(engines["two"], insert_two, after_turn=rest),
            "send": Caller(engines["send"], send, after_turn=lambda: drain(producer)),
        }
        for caller in callers.values():
            caller.turn(min(50, transaction_count))  # connections, imports, prepared statements
        times = interleave(
            {
                name: lambda caller=callers[name]: caller.turn(transaction_count)  # type: ignore[misc]
                for name in names
            },
            rounds=turns,
        )
    check_empty(engines["send"])
    for engine in engines.values():
        engine.dispose()
    return times


def insert_one(session: Session, i: int) -> None:
    """The plain transaction."""
    session.add(make_order(i))


def insert_two(session: Session, i: int) -> None:
    """The transaction that a send is measured against."""
    session.add(make_order(i))
    session.add(make_posting(i))


def rest() -> None:
    """Nothing goes on after a turn without sends."""


def drain(producer: Producer) -> None:
    """Wait until the broker has everything, so that the next turn runs alone."""
    producer.flush(FLUSH_DEADLINE_S)


def check_empty(engine: sa.Engine) -> None:
    """Every message was accepted and its row deleted; else the figures would leave work out."""
    with engine.connect() as connection:
        count = connection.scalar(sa.select(sa.func.count()).select_from(DEFAULT_TABLES.outbox))
    if count:
        raise LeftBehindError(f"{count} rows are still in the outbox after the producer's close")
