"""R15: what a handler costs: processor time and rate of `Consumers` with handlers that do nothing.

All run in one process, one kind after the other, each with a group of its own on messages that were stored
before. In the same rounds the same messages are read by a bare loop of pulls over the transport, which is the
least that a handler could cost, and, where it can be had, by confluent-kafka with one `poll()` for each message
and its own commits. A handler with an inbox inserts one row of the business in the session that it is
given, and counts what its database was asked: every statement, and every transaction.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count as counting
from itertools import islice
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from benchmarks.load import BATCH_MESSAGES, BODY_BYTES, encode_message
from benchmarks.measure import interleave
from benchmarks.peers import with_qmq
from benchmarks.peers.contenders import CONTENDERS, Rig, Servers, reason
from benchmarks.peers.environment import NoPeersError
from benchmarks.peers.traffic import bodies
from benchmarks.places import Place, open_places
from benchmarks.processes import Broker, ProcessError, Worker
from benchmarks.result import Cell, Conditions, Goal, Row
from benchmarks.shop import make_order, set_durability
from benchmarks.suite import Bench
from benchmarks.worker import Control
from qmq_client import Consumers, Message, consumer
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.frame import build_message_frame

WORKERS: Final = (1, 8, 32)
BATCH: Final = 500
#: Messages with the same one are handled one after the other by an ordered group.
KEYS: Final = 1_000
PLAIN, ASYNC, IN_BATCHES, ORDERED = "plain", "async", f"batch_size={BATCH}", "ordered"
INBOX, INBOX_IN_BATCHES = "inbox", f"inbox, batch_size={BATCH}"
LOOP, POLL = "bare transport loop", "confluent-kafka, poll()"
#: Messages of a full round.
MESSAGES: Final = {
    PLAIN: 100_000,
    ASYNC: 50_000,
    IN_BATCHES: 200_000,
    ORDERED: 20_000,
    INBOX: 2_000,
    INBOX_IN_BATCHES: 20_000,
    LOOP: 200_000,
    POLL: 200_000,
}
DATABASES: Final = ("sqlite", "postgresql")
CPU, RATE, STATEMENTS, TRANSACTIONS = "µs", "messages/s", "statements", "transactions"
UNITS: Final = {
    CPU: "µs per message",
    RATE: "messages/s",
    STATEMENTS: "per message",
    TRANSACTIONS: "per message",
}
GOALS: Final = {
    (PLAIN, CPU): Goal(bound=5, is_floor=False, number="R15"),
    (PLAIN, RATE): Goal(bound=120_000, is_floor=True, number="R15"),
    (IN_BATCHES, RATE): Goal(bound=200_000, is_floor=True, number="R15b"),
}
TABLE: Final = "Handlers that do nothing, messages of 1 KiB"
TABLE_OF_INBOXES: Final = "Handlers with an inbox that insert one row, messages of 1 KiB"
#: A handler that never sees its last message has lost it.
DONE_S_MAX: Final = 110.0

Figures = dict[str, float]


class CountError(Exception):
    """A handler was not called once for each message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One kind of handler with so many workers, on a database or none."""

    kind: str
    workers: int
    place: Place | None = None

    @property
    def line(self) -> str:
        """Of the table."""
        return self.kind if self.place is None else f"{self.kind}, {self.place.name}"


def run(bench: Bench) -> list[Row]:
    """Processor time of the consumer's process, and messages per second, of each kind of handler."""
    with bench.processes() as processes, ExitStack() as stack:
        broker = processes.start_broker()
        for kind in set(MESSAGES) - {POLL}:
            fill(broker, subject_of(kind), count_of(bench, kind))
        worker = processes.start_worker(f"{__name__}:work", broker_url=broker.url)
        worker.hear()
        numbers = counting()
        variants: dict[Variant, Callable[[], Figures]] = {
            variant: partial(measure, bench, worker, variant, numbers)
            for variant in variants_of(places(bench, stack))
        }
        if (rig := kafka(bench, stack)) is not None:
            variants[Variant(kind=POLL, workers=1)] = partial(poll, bench, rig)
        named = {f"{one.line}, {one.workers}": work for one, work in variants.items()}
        outcomes = interleave(named, rounds=bench.rounds)
    return [
        row
        for variant, rounds in zip(variants, outcomes.values(), strict=True)
        for row in rows_of(bench, variant, rounds)
    ]


def places(bench: Bench, stack: ExitStack) -> Iterator[Place]:
    """The databases that can be had."""
    from tests.services.rungs import RungError  # late: only a server needs the tests

    for kind in DATABASES:
        try:
            (place,) = stack.enter_context(open_places(bench, [kind]))
        except RungError as error:
            bench.notes.append(f"Without an inbox on {kind}: {error}")
        else:
            yield place


def kafka(bench: Bench, stack: ExitStack) -> Rig | None:
    """A Kafka and its client, where they can be had and nobody asked for others only."""
    from tests.services.ladder import ServiceMissingError

    if bench.asked.systems and "kafka" not in bench.asked.systems:
        return None
    try:
        contender = next(one for one in CONTENDERS if one.engine == "kafka")
        servers = Servers(bench, [contender])
        stack.callback(servers.close)
        rig = Rig(bench, contender, servers)
    except (ServiceMissingError, NoPeersError, ProcessError) as error:
        bench.notes.append(f"Without Kafka's poll: {reason(error)}")
        return None
    stack.callback(rig.close)
    return rig


def variants_of(databases: Iterator[Place]) -> Iterator[Variant]:
    """All kinds with each number of workers."""
    yield Variant(kind=LOOP, workers=1)
    for kind in (PLAIN, ASYNC, IN_BATCHES, ORDERED):
        for workers in WORKERS:
            yield Variant(kind=kind, workers=workers)
    for place in databases:
        for kind in (INBOX, INBOX_IN_BATCHES):
            for workers in WORKERS:
                yield Variant(kind=kind, workers=workers, place=place)


def subject_of(kind: str) -> str:
    """Each kind has its own messages."""
    return f"handled.{list(MESSAGES).index(kind)}"


def count_of(bench: Bench, kind: str) -> int:
    """Messages of one round."""
    per_mille = bench.effort.pick(tiny=5, quick=100, full=1_000)
    return max(10, int(MESSAGES[kind] * per_mille * bench.asked.scale / 1_000))


def fill(broker: Broker, subject: str, count: int) -> None:
    """Store messages of 1 KiB with a thousand keys in turn."""
    transport = HttpTransport(broker.url)
    messages = (
        Message(subject, body, key=f"key-{i % KEYS}")
        for i, body in enumerate(bodies(BODY_BYTES, count))
    )
    while records := [encode_message(message) for message in islice(messages, BATCH_MESSAGES)]:
        transport.send(build_message_frame({subject: records}))
    transport.close()


def measure(bench: Bench, worker: Worker, variant: Variant, numbers: counting[int]) -> Figures:
    """One kind of handler on all its messages."""
    count = count_of(bench, variant.kind)
    number = next(numbers)
    database = "" if variant.place is None else database_of(variant.place, number)
    cpu_s = worker.cpu_s()
    worker.tell((variant.kind, variant.workers, f"group-{number}", count, database))
    told: dict[str, float] = worker.hear()
    cpu_s = worker.cpu_s() - cpu_s
    figures = {CPU: 1e6 * cpu_s / count, RATE: count / told["elapsed_s"]}
    if variant.place is not None:
        figures |= {what: told[what] / count for what in (STATEMENTS, TRANSACTIONS)}
    return figures


def database_of(place: Place, number: int) -> str:
    """The URL of a new database with business tables and inbox."""
    engine = place.open(f"handlers_{number}")
    url = engine.url.render_as_string(hide_password=False)
    engine.dispose()
    return url


def poll(bench: Bench, rig: Rig) -> Figures:
    """Kafka's client on as many messages."""
    count, subject = count_of(bench, POLL), rig.subject()
    rig.producer.tell(("produce", subject, BODY_BYTES, count))
    rig.producer.hear()
    cpu_s = rig.consumer.cpu_s()
    rig.consumer.tell(("handle", subject, BODY_BYTES, count))
    rig.consumer.hear()  # it begins
    started_s, ended_s = rig.consumer.hear()
    cpu_s = rig.consumer.cpu_s() - cpu_s
    return {CPU: 1e6 * cpu_s / count, RATE: count / (ended_s - started_s)}


def rows_of(bench: Bench, variant: Variant, rounds: list[Figures]) -> list[Row]:
    """One row for each figure, in its place of the table."""
    workers = f"{variant.workers} worker{'' if variant.workers == 1 else 's'}"
    durability = "acks synced within 100 ms"
    if variant.place is not None:
        durability = f"{variant.place.database}; {durability}"
    conditions = Conditions(
        durability="offsets committed every 5 s" if variant.kind == POLL else durability,
        client=variant.kind if variant.kind in {LOOP, POLL} else "Consumers, one process",
        batch_messages=BATCH if str(BATCH) in variant.kind else 1,
        message_bytes=BODY_BYTES,
        note=f"{count_of(bench, variant.kind):,} messages per round",
    )
    return [
        Row(
            figure=f"{variant.line}, {workers}: {what}",
            unit=UNITS[what],
            samples=tuple(figures[what] for figures in rounds),
            conditions=conditions,
            goal=GOALS.get((variant.kind, what)) if variant.workers == 1 else None,
            cells=(
                Cell(
                    table=TABLE if variant.place is None else TABLE_OF_INBOXES,
                    line=variant.line,
                    column=f"{workers}, {what}",
                ),
            ),
        )
        for what in rounds[0]
    ]


# ---- in the consumer's process ---------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Tally:
    """What handlers have seen, and what their database was asked."""

    count: int
    done: threading.Event = field(default_factory=threading.Event)
    statements: int = 0
    transactions: int = 0
    _seen: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _calls: counting[int] = field(default_factory=lambda: counting(1))

    def see_one(self) -> None:
        """Of a handler of single messages; without a lock, which would cost as much as the handler."""
        if next(self._calls) == self.count:
            self.done.set()

    def see(self, messages: int) -> None:
        """Of a handler of batches."""
        with self._lock:
            self._seen += messages
            if self._seen >= self.count:
                self.done.set()

    def seen(self) -> int:
        """How many there were. Requires: no handler runs any more."""
        return self._seen or next(self._calls) - 1


def work(control: Control, *, broker_url: str) -> None:
    """Run the handlers that the parent names until it is gone."""
    control.tell("ready")
    while True:
        kind, workers, group, count, database = control.hear()
        if kind == LOOP:
            system = with_qmq.Qmq(broker_url, group=group)
            control.tell({"elapsed_s": loop(system, count)})
            continue
        tally = Tally(count=count)
        engine = counted_engine(database, workers, tally) if database else None
        handler = handler_of(kind, workers, group, tally, engine)
        started_s = time.monotonic()
        consumers = Consumers(handler, broker_url)
        consumers.start()
        if not tally.done.wait(DONE_S_MAX):
            raise CountError(f"{kind}: not all of {count} messages after {DONE_S_MAX:.0f} s")
        elapsed_s = time.monotonic() - started_s
        consumers.stop()
        if tally.seen() != count:
            raise CountError(f"{kind}: {tally.seen()} calls for {count} messages")
        if engine is not None:
            engine.dispose()
        control.tell(
            {
                "elapsed_s": elapsed_s,
                STATEMENTS: tally.statements,
                TRANSACTIONS: tally.transactions,
            }
        )


def loop(system: with_qmq.Qmq, count: int) -> float:
    """Seconds of a loop of pulls that acks each with the next one."""
    started_s = time.monotonic()
    system.consume(subject_of(LOOP), count, len, lambda: None)
    elapsed_s = time.monotonic() - started_s
    system.transport.close()
    return elapsed_s


def counted_engine(url: str, workers: int, tally: Tally) -> sa.Engine:
    """With a connection for each worker."""
    is_file = url.startswith("sqlite")
    engine = sa.create_engine(url, pool_size=workers + 1)
    if is_file:
        sa.event.listen(engine, "connect", set_durability)

    def on_statement(*_: Any) -> None:
        tally.statements += 1

    def on_commit(_: Any) -> None:
        tally.transactions += 1

    sa.event.listen(engine, "before_cursor_execute", on_statement)
    sa.event.listen(engine, "commit", on_commit)
    return engine


def handler_of(
    kind: str, workers: int, group: str, tally: Tally, engine: sa.Engine | None
) -> Callable[..., Any]:
    """A handler of this kind that does nothing, or one INSERT in the inbox's session."""
    place = partial(consumer, subject_of(kind), group=group, concurrency=workers)

    def handle(message: Message) -> None:
        tally.see_one()

    async def handle_in_loop(message: Message) -> None:
        tally.see_one()

    def handle_batch(messages: list[Message]) -> None:
        tally.see(len(messages))

    def book(message: Message, session: Session) -> None:
        session.add(make_order(len(message.body)))
        tally.see_one()

    def book_batch(messages: list[Message], session: Session) -> None:
        session.add_all([make_order(len(message.body)) for message in messages])
        tally.see(len(messages))

    handlers: dict[str, Callable[[], Callable[..., Any]]] = {
        PLAIN: lambda: place()(handle),
        ASYNC: lambda: place()(handle_in_loop),
        IN_BATCHES: lambda: place(batch_size=BATCH)(handle_batch),
        ORDERED: lambda: place(ordered=True)(handle),
        INBOX: lambda: place(inbox=engine)(book),
        INBOX_IN_BATCHES: lambda: place(inbox=engine, batch_size=BATCH)(book_batch),
    }
    return handlers[kind]()
