"""R14: what the client library itself costs: its import, and processor time of one send beside the SQL.

Import: fresh processes in pairs, one that does nothing and one that imports, by the wall and in
processor time. Send: a transaction with one send against the same transaction with the very same
INSERT statement given to the driver directly, in processor time of the calling thread; the difference
is what the library adds: checks, id, encoding, hooks at the commit, the hand-over to the publisher.
The broker is in memory.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from benchmarks.load import BODY_BYTES, make_messages
from benchmarks.measure import elapsed_s, interleave, percentile
from benchmarks.result import Conditions, Goal, Row
from benchmarks.shop import open_database
from benchmarks.suite import Bench
from qmq_client import Producer
from qmq_client.ids import MESSAGE_IDS
from qmq_client.transport.memory import MemoryBroker, MemoryTransport

PROGRAMS: Final = {
    "nothing": "pass",
    "client": "import qmq_client",
    "SQLAlchemy": "import sqlalchemy.orm",
    "all names": "import sqlalchemy.orm; from qmq_client import *",
}
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
    transaction_count = bench.effort.pick(tiny=5, quick=200, full=500)
    engine = open_database(f"sqlite:///{bench.directory}/sdk.sqlite")
    with Producer(engine, MemoryTransport(MemoryBroker())) as producer:
        sends = Sends(engine, producer)
        times = interleave(
            {
                "send": lambda: sends.median_us(sends.by_producer, transaction_count),
                "sql": lambda: sends.median_us(sends.by_driver, transaction_count),
            },
            rounds=bench.rounds,
        )
    engine.dispose()
    added = [send - sql for send, sql in zip(times["send"], times["sql"], strict=True)]
    conditions = Conditions(
        durability="SQLite WAL, synchronous=FULL",
        client="SQLAlchemy Session, one thread; broker in memory",
        batch_messages=1,
        message_bytes=BODY_BYTES,
        note=f"processor time of the calling thread, p50 of {transaction_count} transactions per round",
    )
    figures = [
        ("send beside its SQL", added, Goal(bound=30, is_floor=False)),
        ("transaction with a send", times["send"], None),
        ("transaction with the same INSERT by the driver", times["sql"], None),
    ]
    return [
        Row(figure=figure, unit="µs", samples=tuple(samples), conditions=conditions, goal=goal)
        for figure, samples, goal in figures
    ]


class Sends:
    """Transactions that write the same row, through the producer or past it."""

    def __init__(self, engine: sa.Engine, producer: Producer) -> None:
        self.engine = engine
        self.producer = producer
        self.messages = make_messages()
        self._numbers = count()
        self.statement, self.parameters, self.id_position = self._capture()

    def median_us(self, fill: Callable[[Session], None], transaction_count: int) -> float:
        """Processor time of one transaction, the median of many."""
        times_us = []
        for _ in range(transaction_count):
            with Session(self.engine) as session:
                session.connection()  # its begin is no part of the comparison
                started_ns = time.thread_time_ns()
                fill(session)
                session.commit()
                times_us.append((time.thread_time_ns() - started_ns) / 1000)
        self.producer.flush(30.0)
        return percentile(times_us, 0.5)

    def by_producer(self, session: Session) -> None:
        """What an application writes."""
        self.producer.send(next(self.messages), session=session)

    def by_driver(self, session: Session) -> None:
        """The statement that the producer was seen to use, with an id of its own."""
        parameters = list(self.parameters)
        parameters[self.id_position] = MESSAGE_IDS.next_id()
        session.connection().exec_driver_sql(self.statement, tuple(parameters))

    def _capture(self) -> tuple[str, tuple[Any, ...], int]:
        """The INSERT of one send: statement, parameters, and which of them is the message id."""
        seen: list[tuple[str, tuple[Any, ...]]] = []

        def on_execute(
            _connection: Any, _cursor: Any, statement: str, parameters: Any, *_rest: Any
        ) -> None:
            if statement.lstrip().upper().startswith("INSERT"):
                seen.append((statement, tuple(parameters)))

        sa.event.listen(self.engine, "before_cursor_execute", on_execute)
        with Session(self.engine) as session, session.begin():
            message_id = bytes.fromhex(self.producer.send(next(self.messages), session=session))
        sa.event.remove(self.engine, "before_cursor_execute", on_execute)
        ((statement, parameters),) = seen
        return statement, parameters, parameters.index(message_id)
