"""The outbox beside other projects that keep messages in a table, all on the same PostgreSQL.

Drain: messages that were stored before are taken and their rows deleted. The others call a handler
that does nothing, so their figure is the most that they could hand on; the watchdog's sweep hands each
message to a real broker, which has it on the disk before it answers. The goal is against one job at a
time: procrastinate knows no other way; pgqueuer is measured so, and in the batches of its own pages.

Transaction: one business INSERT with and without one message, on the stack that each project's pages
show for it. Compared is what the message adds, for the INSERT alone costs differently on each stack.
Nobody consumes meanwhile but our publisher, which sends what was committed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

from benchmarks.load import BODY_BYTES, make_messages
from benchmarks.measure import interleave, paired_ratios, percentile
from benchmarks.outbox_caller import Caller, Fill, insert_one, send_one
from benchmarks.peers.environment import REQUIREMENTS, peers_python
from benchmarks.places import Place, open_places
from benchmarks.processes import Processes, Worker
from benchmarks.result import Conditions, Goal, Row
from benchmarks.suite import Bench
from benchmarks.watchdog_drain import Stuck
from qmq_client import Producer
from qmq_client.settings.sections import WatchdogSection

US: Final = "qmq"
ONE_BY_ONE: Final = "pgqueuer, job by job"
#: The module of each, how it was set, and how many messages it takes at a time.
PEERS: Final = {
    "faststream-outbox": ("with_faststream_outbox", "fetches of 100, terminal deletes of 100", 100),
    "procrastinate": ("with_procrastinate", "30 workers, one job at a time, deleted when done", 1),
    "pgqueuer": ("with_pgqueuer", "5 consumers, batches of 10", 10),
    ONE_BY_ONE: ("with_pgqueuer", "5 consumers, one job at a time", 1),
}
#: Some seconds of work for each; rates do not depend on it.
MESSAGES: Final = {
    US: {"tiny": 50, "quick": 10_000, "full": 30_000},
    "faststream-outbox": {"tiny": 20, "quick": 2_000, "full": 10_000},
    "procrastinate": {"tiny": 10, "quick": 150, "full": 600},
    "pgqueuer": {"tiny": 20, "quick": 500, "full": 3_000},
    ONE_BY_ONE: {"tiny": 10, "quick": 150, "full": 600},
}
DRAIN_GOALS: Final = {
    "procrastinate": Goal(bound=80, is_floor=True),
    ONE_BY_ONE: Goal(bound=80, is_floor=True),
}


def run(bench: Bench) -> list[Row]:
    """Rates and added milliseconds of each project, and ratios to ours."""
    python = peers_python()
    with ExitStack() as stack:
        (place,) = stack.enter_context(open_places(bench, ["postgresql"]))
        processes = stack.enter_context(bench.processes())
        workers = {name: start_peer(processes, place, python, name) for name in PEERS}
        drains = run_drains(bench, place, workers)
        added = run_transactions(bench, place, processes, workers)
    return [*drain_rows(place, bench, drains), *transaction_rows(place, bench, added)]


def start_peer(processes: Processes, place: Place, python: str, name: str) -> Worker:
    """The process of one project with a database of its own, ready for orders."""
    module = f"benchmarks.peers.{PEERS[name][0]}"
    database = "".join(each if each.isalnum() else "_" for each in name)
    dsn = place.make(database).replace("postgresql+psycopg://", "postgresql://")
    batch: dict[str, Any] = {"batch": PEERS[name][2]} if PEERS[name][0] == "with_pgqueuer" else {}
    worker = processes.start_worker(f"{module}:work", python=python, dsn=dsn, **batch)
    worker.hear()
    return worker


def run_drains(bench: Bench, place: Place, workers: dict[str, Worker]) -> dict[str, list[float]]:
    """Messages per second of each, round by round."""
    counts = {name: sizes[bench.effort.value] for name, sizes in MESSAGES.items()}
    stuck = Stuck(place, counts[US])

    def drain(name: str) -> float:
        workers[name].tell(("drain", counts[name]))
        return counts[name] / float(workers[name].hear())

    variants: dict[str, Callable[[], float]] = {US: lambda: stuck.drain(bench).rows_per_s}
    variants |= {name: partial(drain, name) for name in workers}
    outcomes = interleave(variants, rounds=bench.rounds)
    stuck.close()
    return outcomes


def run_transactions(
    bench: Bench, place: Place, processes: Processes, workers: dict[str, Worker]
) -> dict[str, list[tuple[float, float]]]:
    """Median milliseconds without and with a message of each, round by round."""
    count = bench.effort.pick(tiny=5, quick=150, full=400)
    broker = processes.start_broker()
    engine = place.open("callers")
    messages = make_messages()
    with Producer(engine, broker.url) as producer:
        send = partial(send_one, producer, messages)
        fills: dict[str, Fill] = {"plain": insert_one, "send": send}
        callers = {
            kind: Caller(engine, fill, place=place, broker=broker, after_turn=producer.flush)
            for kind, fill in fills.items()
        }

        def ours() -> tuple[float, float]:
            return callers["plain"].turn(count).p(0.5), callers["send"].turn(count).p(0.5)

        variants: dict[str, Callable[[], tuple[float, float]]] = {US: ours}
        variants |= {name: partial(turn_of, workers[name], count) for name in STACKS}
        interleave(variants, rounds=1)  # connections, imports, prepared statements
        outcomes = interleave(variants, rounds=bench.rounds)
    engine.dispose()
    return outcomes


def turn_of(worker: Worker, count: int) -> tuple[float, float]:
    """A peer's medians, in milliseconds, without and with a message."""
    medians = []
    for order in ("plain", "send"):
        worker.tell((order, count))
        medians.append(1000 * percentile(worker.hear(), 0.5))
    return medians[0], medians[1]


def drain_rows(place: Place, bench: Bench, drains: dict[str, list[float]]) -> list[Row]:
    """Rates, then ratios."""
    rows = []
    for name, rates in drains.items():
        rows.append(
            Row(
                figure=f"drained: {name}",
                unit="messages/s",
                samples=tuple(rates),
                conditions=drain_conditions(place, bench, name),
            )
        )
    for name in PEERS:
        rows.append(
            Row(
                figure=f"drained: {US} / {name}",
                unit="ratio",
                samples=tuple(paired_ratios(drains[US], drains[name])),
                conditions=drain_conditions(place, bench, name),
                goal=DRAIN_GOALS.get(name),
            )
        )
    return rows


def drain_conditions(place: Place, bench: Bench, name: str) -> Conditions:
    """What a drain was run with."""
    count = MESSAGES[name][bench.effort.value]
    if name == US:
        client = "the watchdog's sweep in a process of its own, to a durable broker"
        batch = WatchdogSection().batch_rows
    else:
        client = f"{version_of(name)}: {PEERS[name][1]}; a handler that does nothing"
        batch = PEERS[name][2]
    return Conditions(
        durability=place.durability if name == US else place.database,
        client=client,
        batch_messages=batch,
        message_bytes=BODY_BYTES,
        note=f"{count:,} messages per round",
    )


def transaction_rows(
    place: Place, bench: Bench, outcomes: dict[str, list[tuple[float, float]]]
) -> list[Row]:
    """Medians without and with a message, and what it adds."""
    rows = []
    for name, rounds in outcomes.items():
        client = "SQLAlchemy ORM and psycopg; the publisher sends meanwhile"
        figures = {
            "one INSERT": [plain for plain, _ in rounds],
            "with a message": [send for _, send in rounds],
            "added by it": [send - plain for plain, send in rounds],
        }
        conditions = Conditions(
            durability=place.durability if name == US else place.database,
            client=client if name == US else f"{version_of(name)}; {STACKS[name]}; nobody consumes",
            batch_messages=1,
            message_bytes=BODY_BYTES,
            note="p50 of one caller's transactions in each round",
        )
        rows += [
            Row(
                figure=f"transaction, {what}: {name}",
                unit="ms",
                samples=tuple(samples),
                conditions=conditions,
            )
            for what, samples in figures.items()
        ]
    return rows


#: On which each project shows a message in a transaction of the application.
STACKS: Final = {
    "faststream-outbox": "AsyncSession, SQLAlchemy Core, asyncpg, uvloop",
    "procrastinate": "psycopg's asynchronous connection, uvloop",
    "pgqueuer": "asyncpg, uvloop",
}


def version_of(name: str) -> str:
    """Name and version as installed."""
    project = name.partition(",")[0]
    (found,) = [one for one in REQUIREMENTS if one.partition("==")[0].partition("[")[0] == project]
    return f"{project} {found.partition('==')[2]}"
