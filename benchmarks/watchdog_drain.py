"""R10: the watchdog takes rows that were left behind to the broker.

The rows are live and due, as a dead application leaves them, made by copying them from a table that
was filled once. The watchdog's sweep runs in a process of its own, with its own settings, and hands
them to a real broker that is new in each round and so stores every one of them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice
from typing import Final

import sqlalchemy as sa

from benchmarks.load import BODY_BYTES, SUBJECT, make_messages
from benchmarks.places import Place, open_places
from benchmarks.result import Conditions, Goal, Row
from benchmarks.suite import Bench
from benchmarks.worker import Control
from qmq_client.ids import MESSAGE_IDS
from qmq_client.message import Message, message_to_record
from qmq_client.outbox.table import DEFAULT_TABLES, LIVE
from qmq_client.settings.sections import DatabaseSection, WatchdogSection
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.record import encode_record

ROWS_PER_INSERT: Final = 1_000
OUTBOX: Final = DEFAULT_TABLES.outbox.name


class NotDrainedError(Exception):
    """The watchdog did not send all rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """One round."""

    rows_per_s: float
    #: Of the watchdog's process and of the broker's, for each row.
    watchdog_us: float
    broker_us: float
    #: By the watchdog, the broker and the database's server.
    written_bytes: int


def run(bench: Bench) -> list[Row]:
    """Rows per second, one database after the other."""
    with open_places(bench) as places:
        return [row for place in places for row in run_place(bench, place)]


def run_place(bench: Bench, place: Place) -> list[Row]:
    """All figures on one database."""
    row_count = bench.effort.pick(tiny=50, quick=20_000, full=100_000)
    stuck = Stuck(place, row_count)
    rounds = [stuck.drain(bench) for _ in range(bench.rounds)]
    stuck.close()
    conditions = Conditions(
        durability=place.durability,
        client="the watchdog's sweep in a process of its own; HttpTransport",
        batch_messages=WatchdogSection().batch_rows,
        message_bytes=BODY_BYTES,
        written_bytes=sorted(drain.written_bytes for drain in rounds)[len(rounds) // 2],
        note=f"{row_count:,} rows per round",
    )
    goal = Goal(bound=25_000, is_floor=True)
    figures = [
        ("drained", "rows/s", [drain.rows_per_s for drain in rounds], goal),
        ("watchdog's processor time", "µs per row", [drain.watchdog_us for drain in rounds], None),
        ("broker's processor time", "µs per row", [drain.broker_us for drain in rounds], None),
    ]
    return [
        Row(
            figure=f"{place.name}: {figure}",
            unit=unit,
            samples=tuple(samples),
            conditions=conditions,
            goal=bound,
        )
        for figure, unit, samples, bound in figures
    ]


class Stuck:
    """A database whose outbox can be filled with the same rows again and again."""

    def __init__(self, place: Place, row_count: int) -> None:
        self.place = place
        self.row_count = row_count
        self.engine = place.open("stuck")
        with self.engine.begin() as connection:
            messages = make_messages()
            for first in range(0, row_count, ROWS_PER_INSERT):
                count = min(ROWS_PER_INSERT, row_count - first)
                connection.execute(
                    sa.insert(DEFAULT_TABLES.outbox),
                    [stuck_row(message) for message in islice(messages, count)],
                )
            connection.exec_driver_sql(f"CREATE TABLE stuck AS SELECT * FROM {OUTBOX}")
            connection.exec_driver_sql(f"DELETE FROM {OUTBOX}")

    def drain(self, bench: Bench) -> Drain:
        """Fill the outbox and let the watchdog empty it."""
        with self.engine.begin() as connection:
            if self.place.kind != "sqlite":  # what earlier rounds left of their rows
                connection.exec_driver_sql(f"TRUNCATE TABLE {OUTBOX}")
            connection.exec_driver_sql(f"INSERT INTO {OUTBOX} SELECT * FROM stuck")
        with bench.processes() as processes:
            broker = processes.start_broker()
            url = self.engine.url.render_as_string(hide_password=False)
            worker = processes.start_worker(f"{__name__}:sweep", url=url, broker_url=broker.url)
            worker.hear()
            before_bytes = self._written_bytes(worker.written_bytes() + broker.written_bytes())
            before_s = worker.cpu_s(), broker.cpu_s()
            worker.tell(self.row_count)
            duration_s, sent = worker.hear()
            after_s = worker.cpu_s(), broker.cpu_s()
            after_bytes = self._written_bytes(worker.written_bytes() + broker.written_bytes())
        if sent != self.row_count or self._count():
            raise NotDrainedError(
                f"{sent} of {self.row_count} rows were sent, {self._count()} are left"
            )
        return Drain(
            rows_per_s=sent / duration_s,
            watchdog_us=(after_s[0] - before_s[0]) / sent * 1e6,
            broker_us=(after_s[1] - before_s[1]) / sent * 1e6,
            written_bytes=after_bytes - before_bytes,
        )

    def close(self) -> None:
        """Let go of the database."""
        self.engine.dispose()

    def _written_bytes(self, by_processes: int) -> int:
        return by_processes + self.place.written_bytes()

    def _count(self) -> int:
        with self.engine.connect() as connection:
            count: int = connection.exec_driver_sql(f"SELECT count(*) FROM {OUTBOX}").scalar_one()
            return count


def stuck_row(message: Message) -> dict[str, object]:
    """A row whose takeover time is long past."""
    message_id = MESSAGE_IDS.next_id()
    record = message_to_record(message, new_id=message_id, now_ms=time.time_ns() // 1_000_000)
    return {
        "message_id": message_id,
        "subject": SUBJECT,
        "record": encode_record(record),
        "state": LIVE,
        "due_at_ms": 1,
        "token": bytes(16),
        "attempts": 0,
        "created_at_ms": 1,
    }


def sweep(control: Control, *, url: str, broker_url: str) -> None:
    """The watchdog's process: one order, one drain."""
    import httpx  # noqa: F401  # loaded with the first request otherwise; a daemon has it long since

    from qmq_watchdog.databases import open_database
    from qmq_watchdog.service import settle_memory
    from qmq_watchdog.sweep import Sweep

    transport = HttpTransport(broker_url)
    database = open_database(DatabaseSection(name="stuck", url=url), {})
    sweeping = Sweep(database, transport)
    settle_memory()  # as the daemon does
    control.tell("ready")
    row_count = control.hear()
    sent = 0
    started_s = time.monotonic()
    while sent < row_count:
        counts = sweeping.step()
        sent += counts.sent
        if not counts.sent:
            raise NotDrainedError(str(counts.as_fields()))
    control.tell((time.monotonic() - started_s, sent))
    control.hear()  # stays, so that its processor time can be read
