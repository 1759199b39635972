"""R14: what the client library itself costs: its import, and processor time of one send beside the SQL.

Import: fresh processes in pairs, one that does nothing and one that imports, by the wall and in
processor time. Send: a transaction with one business INSERT and one send, against the same transaction
with the very same second INSERT given to the driver's cursor, one after the other; the difference of each
pair, in processor time of the calling thread, is what the library adds: checks, id, encoding, hooks at
the commit, the hand-over to the publisher. The publisher rests meanwhile, and nothing is flushed to a
disk: after that sleep a processor has forgotten so much that the same work takes it twice as long, or
not, and the figure was of that.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import Session

from benchmarks.load import BODY_BYTES, make_messages
from benchmarks.measure import elapsed_s, interleave, percentile
from benchmarks.result import Conditions, Goal, Row
from benchmarks.shop import Order, open_database
from benchmarks.suite import Bench
from qmq_client import Producer
from qmq_client.ids import MESSAGE_IDS
from qmq_client.options import ProducerOptions
from qmq_client.transport.memory import MemoryBroker, MemoryTransport

PROGRAMS: Final = {
    "nothing": "pass",
    "client": "import qmq_client",
    "SQLAlchemy": "import sqlalchemy.orm",
    "all names": "import sqlalchemy.orm; from qmq_client import *",
}
_BUSINESS: Final = sa.insert(Order).values(customer="customer-17", amount=1, note="window seat")
#: Seconds by the wall, seconds of processor time.
Times = tuple[float, float]


def run(bench: Bench) -> list[Row]:
    """Import times in milliseconds, send in microseconds."""
    return [*import_rows(bench), *send_rows(bench)]


def import_rows(bench: Bench) -> list[Row]:
    """What an import takes beyond the start of Python, and beyond SQLAlchemy's own."""
    pairs = bench.effort.pick(tiny=1, quick=3, full=7)
    rounds = []
    for _ in range(bench.rounds):
        starts = {name: start_of(program) for name, program in PROGRAMS.items()}
        rounds.append(interleave(starts, rounds=pairs))
    conditions = Conditions(
        durability="none",
        client="fresh processes, files in the page cache",
        note=f"beyond the other process of the pair; median of {pairs} pairs in each round",
    )
    figures = [
        ("import qmq_client", "client", "nothing", 0, Goal(bound=120, is_floor=False)),
        ("its processor time", "client", "nothing", 1, None),
        ("all public names, beyond SQLAlchemy: processor time", "all names", "SQLAlchemy", 1, None),
        (
            "SQLAlchemy with its ORM, for comparison: processor time",
            "SQLAlchemy",
            "nothing",
            1,
            None,
        ),
    ]
    return [
        Row(
            figure=figure,
            unit="ms",
            samples=tuple(added_ms(times[name], times[other], clock) for times in rounds),
            conditions=conditions,
            goal=goal,
        )
        for figure, name, other, clock, goal in figures
    ]


def added_ms(times: list[Times], times_of_other: list[Times], clock: int) -> float:
    """The median of what the pairs differ by, on one of the two clocks."""
    pairs = zip(times, times_of_other, strict=True)
    return 1000 * percentile([one[clock] - other[clock] for one, other in pairs], 0.5)


def start_of(program: str) -> Callable[[], Times]:
    """A function that runs the program in a fresh process and returns its seconds."""
    return lambda: start(program)


def start(program: str) -> Times:
    """Seconds by the wall and of processor time of one fresh process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall_s = elapsed_s(lambda: subprocess.run([sys.executable, "-c", program], check=True))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def send_rows(bench: Bench) -> list[Row]:
    """Processor time of a send beside its SQL."""
    pairs = bench.effort.pick(tiny=5, quick=500, full=2_000)
    url = f"sqlite:///{bench.directory}/sdk.sqlite"
    engine = open_database(url)
    sa.event.listen(engine, "connect", flush_nothing)
    engine.dispose()
    statement = seen_statement(url)
    resting = ProducerOptions(background=False, queue_messages=100_000)
    transport = MemoryTransport(MemoryBroker())
    with Producer(engine, transport, options=resting) as producer:
        sends = Sends(engine, producer, statement)
        sends.times_us(min(100, pairs))  # caches of statements
        rounds = [sends.times_us(pairs) for _ in range(bench.rounds)]
    engine.dispose()
    conditions = Conditions(
        durability="SQLite WAL, synchronous=OFF",
        client="SQLAlchemy Session, one thread; broker in memory",
        batch_messages=1,
        message_bytes=BODY_BYTES,
        note=f"processor time of the calling thread from the business INSERT to the end of the commit, "
        f"p50 of {pairs} pairs per round",
    )
    added = [[send - sql for send, sql in times] for times in rounds]
    figures = [
        ("send beside its SQL", added, Goal(bound=30, is_floor=False)),
        ("transaction with a send", [[send for send, _ in times] for times in rounds], None),
        (
            "transaction with the same INSERT by the driver",
            [[sql for _, sql in times] for times in rounds],
            None,
        ),
    ]
    return [
        Row(
            figure=figure,
            unit="µs",
            samples=tuple(percentile(times, 0.5) for times in samples),
            conditions=conditions,
            goal=goal,
        )
        for figure, samples, goal in figures
    ]


def flush_nothing(connection: Any, _record: Any) -> None:
    """Called with each new connection of the driver, after what makes it durable."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous=OFF")
    cursor.close()


class Statement(NamedTuple):
    """The INSERT of one send."""

    text: str
    parameters: tuple[Any, ...]
    #: Which of them is the message id.
    id_position: int


def seen_statement(url: str) -> Statement:
    """What a producer gives to the driver; on an engine of its own, which stays listened to."""
    seen: list[tuple[str, tuple[Any, ...]]] = []

    def on_execute(_connection: Any, _cursor: Any, text: str, parameters: Any, *_rest: Any) -> None:
        if text.lstrip().upper().startswith("INSERT"):
            seen.append((text, tuple(parameters)))

    engine = sa.create_engine(url)
    with Producer(engine, MemoryTransport(MemoryBroker())) as producer:
        sa.event.listen(engine, "before_cursor_execute", on_execute)
        with Session(engine) as session, session.begin():
            message_id = bytes.fromhex(producer.send(next(make_messages()), session=session))
    engine.dispose()
    ((text, parameters),) = seen
    return Statement(text, parameters, parameters.index(message_id))


class Sends:
    """Transactions that write the same two rows, the second through the producer or past it."""

    def __init__(self, engine: sa.Engine, producer: Producer, statement: Statement) -> None:
        self.engine = engine
        self.producer = producer
        self.statement = statement
        self.messages = make_messages()

    def times_us(self, pairs: int) -> list[tuple[float, float]]:
        """Processor times of a transaction with a send and of one without, pair by pair."""
        times = []
        for i in range(pairs):
            if i % 2:
                send_us = self._transaction_us(self.by_producer)
                times.append((send_us, self._transaction_us(self.by_driver)))
            else:
                sql_us = self._transaction_us(self.by_driver)
                times.append((self._transaction_us(self.by_producer), sql_us))
        self.producer.flush(30.0)
        return times

    def _transaction_us(self, fill: Callable[[Session], None]) -> float:
        with Session(self.engine) as session:
            session.execute(_BUSINESS)  # so that neither has to begin
            started_ns = time.thread_time_ns()
            fill(session)
            session.commit()
            return (time.thread_time_ns() - started_ns) / 1000

    def by_producer(self, session: Session) -> None:
        """What an application writes."""
        self.producer.send(next(self.messages), session=session)

    def by_driver(self, session: Session) -> None:
        """The statement that a producer was seen to use, with an id of its own."""
        text, seen, id_position = self.statement
        parameters = (*seen[:id_position], MESSAGE_IDS.next_id(), *seen[id_position + 1 :])
        cursor = session.connection().connection.cursor()
        cursor.execute(text, parameters)
        cursor.close()
