"""The list of benchmarks, and how one of them is run.

A benchmark is a function `run(bench) -> list[Row]`, or a generator of rows where it takes minutes, in a module of its own; it is imported
only when it is run, so that `--list` is quick and one that cannot start takes no other with it.
"""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, cast

from benchmarks.machine import Neighbours, code_version, describe_machine, load_average
from benchmarks.measure import Effort
from benchmarks.processes import Processes
from benchmarks.result import Result, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the caller wants otherwise than the effort has it."""

    #: 0 for as many as the effort has.
    rounds: int = 0
    #: Times as many messages, in the benchmarks that heed it.
    scale: float = 1.0
    #: Short names of the peers to run; all when there are none.
    systems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What a benchmark is given to run with."""

    effort: Effort
    #: On a disk, empty at the start, removed at the end.
    directory: Path
    #: As much data as the goals speak of, where that takes far longer than a full run.
    is_full_size: bool = False
    asked: Asked = field(default_factory=Asked)
    #: What the result says beside its rows, such as who was left out and why.
    notes: list[str] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        """Rounds to run."""
        return self.asked.rounds or self.effort.rounds

    @contextmanager
    def processes(self) -> Iterator[Processes]:
        """A new directory with the processes of one round; both gone at the end."""
        with (
            tempfile.TemporaryDirectory(dir=self.directory) as name,
            Processes(Path(name)) as processes,
        ):
            yield processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One entry of the list."""

    #: Number of the performance goal, or the name again where there is none.
    number: str
    name: str
    module: str
    summary: str
    #: The goal in words; rows carry its bounds.
    goal: str
    #: Name for several that belong together.
    group: str = ""
    #: Shown for comparison: no figure of it has a goal, nor a verdict.
    is_indicator: bool = False


BENCHMARKS: Final = (
    Benchmark(
        number="peers",
        name="peers",
        module="message_peers",
        summary="the same work by Kafka, RocketMQ, Redis Streams, NATS JetStream and RabbitMQ",
        goal="those of R1, R2, R3, R16, R17 and R18, in the table of goals",
        group="delivery",
    ),
    Benchmark(
        number="R15",
        name="handlers",
        module="handlers",
        summary="what a handler costs, compared with the bare transport loop and Kafka's poll",
        goal="plain ≤ 5 µs and ≥ 120,000 messages/s; in batches of 500 ≥ 200,000 messages/s",
        group="delivery",
    ),
    Benchmark(
        number="R2",
        name="produce-consume",
        module="produce_consume",
        summary="durable produce and consume at the same time",
        goal="≥ 100,000 messages/s on two cores (200,000 on a quiet machine)",
        group="delivery",
    ),
    Benchmark(
        number="R3",
        name="consume-peers",
        module="consume_peers",
        summary="consume and ack what is stored already, beside Redis Streams",
        goal="≥ 2.3 times XREADGROUP and XACK",
        group="delivery",
    ),
    Benchmark(
        number="R4",
        name="disk",
        module="close_to_disk",
        summary="durable frames over HTTP against a bare pwrite + fdatasync loop",
        goal="none: what one interpreter leaves of the bare disk",
        group="store",
        is_indicator=True,
    ),
    Benchmark(
        number="R5",
        name="append-core",
        module="append_core",
        summary="processor time of an append against that of a bare pwrite",
        goal="none: what one interpreter adds to a bare pwrite",
        group="store",
        is_indicator=True,
    ),
    Benchmark(
        number="R6",
        name="sustained",
        module="sustained",
        summary="a log of more than 8 GiB, third by third, on recycled segments and on new ones",
        goal="last third ≥ 0.5 of the first one, recycled",
        group="store",
    ),
    Benchmark(
        number="R11",
        name="restart",
        module="restart",
        summary="a start after kill -9, and a full verification, of 10 GiB of log",
        goal="restart ≤ 2 s, verification ≤ 5 s",
        group="store",
    ),
    Benchmark(
        number="R12",
        name="delay",
        module="delay",
        summary="delayed messages: releases, their cost, memory and lateness",
        goal="≥ 50,000 releases/s, p99 of the lateness ≤ 200 ms at 5,000/s, bounded memory",
    ),
    Benchmark(
        number="R13",
        name="growth",
        module="growth",
        summary="cost of a send, a pull and a start with many subjects, groups and messages",
        goal="≤ 1.5 times the small case, per message",
        group="store",
    ),
    Benchmark(
        number="R7",
        name="long-poll",
        module="long_poll",
        summary="from the send of one message to its handler, idle",
        goal="p50 ≤ 1.5 ms, p99 ≤ 5 ms",
        group="delivery",
    ),
    Benchmark(
        number="many-groups",
        name="many-groups",
        module="many_groups",
        summary="pulls and acks as groups and consumers grow in number",
        goal="≤ 1.5 times the processor time of one group with one consumer",
        group="delivery",
    ),
    Benchmark(
        number="backlog",
        name="backlog",
        module="backlog",
        summary="a backlog drained by one, two and four consumers of one group",
        goal="two drain ≥ 1.6 times, four ≥ 3.2 times as fast as one",
        group="delivery",
    ),
    Benchmark(
        number="R8",
        name="outbox-caller",
        module="outbox_caller",
        summary="what a send adds to the caller's transaction while the publisher is sending",
        goal="p50 ≤ 1.10 of two business INSERTs, of the plain commit ≤ 1.25 (SQLite) or ≤ 1.40",
        group="outbox",
    ),
    Benchmark(
        number="R9",
        name="commit-to-accepted",
        module="commit_to_accepted",
        summary="from the commit to the broker's durable answer, idle",
        goal="p50 ≤ 3 ms, p99 ≤ 15 ms",
        group="outbox",
    ),
    Benchmark(
        number="cancelled-commits",
        name="cancelled-commits",
        module="cancelled_commits",
        summary="from the cancellation of a task in its COMMIT to the broker's durable answer",
        goal="p99 ≤ 250 ms",
        group="outbox",
    ),
    Benchmark(
        number="R10",
        name="watchdog-drain",
        module="watchdog_drain",
        summary="the watchdog takes stuck rows to the broker",
        goal="≥ 25,000 rows/s",
        group="outbox",
    ),
    Benchmark(
        number="outbox-peers",
        name="outbox-peers",
        module="outbox_peers",
        summary="faststream-outbox, procrastinate and pgqueuer on the same PostgreSQL",
        goal="drain ≥ 80 times procrastinate and pgqueuer, job by job",
        group="outbox",
    ),
    Benchmark(
        number="R14",
        name="sdk",
        module="sdk_cost",
        summary="import time of the client and our own processor time of one send",
        goal="import ≤ 120 ms, send ≤ 30 µs beside the SQL",
    ),
    Benchmark(
        number="P",
        name="pipeline",
        module="pipeline.run",
        summary="the pipeline's scans, ingest and whole runs beside Parquet, JDBC and plain Python",
        goal="a scan ≥ 0.5 of Parquet's and ≥ 4 times plain Python's, ingest ≤ 1.3 of a scan",
    ),
    Benchmark(
        number="wire",
        name="wire",
        module="wire_cost",
        summary="processor time of encoding, framing, parsing and decoding one message",
        goal="none",
    ),
)


class UnknownBenchmarkError(Exception):
    """No benchmark has this number, name or group."""


def select(names: Iterable[str]) -> tuple[Benchmark, ...]:
    """Those with these numbers, names or groups in the list's order; all when there are none."""
    wanted = {name.lower() for name in names}
    if not wanted:
        return BENCHMARKS
    known = {word for entry in BENCHMARKS for word in words_of(entry)}
    if unknown := sorted(wanted - known):
        raise UnknownBenchmarkError(
            f"no benchmark {', '.join(unknown)}; there are: "
            + ", ".join(f"{entry.number} {entry.name}" for entry in BENCHMARKS)
        )
    return tuple(entry for entry in BENCHMARKS if wanted & words_of(entry))


def words_of(entry: Benchmark) -> set[str]:
    """What it may be asked for by."""
    return {entry.number.lower(), entry.name, entry.group} - {""}


def run_benchmark(
    benchmark: Benchmark,
    *,
    effort: Effort,
    directory: Path,
    is_full_size: bool = False,
    asked: Asked | None = None,
) -> Result:
    """Run one benchmark; what goes wrong in it becomes the result's failure, beside the rows that it had given."""
    machine = describe_machine(directory)
    load_before, started_at, started_s = load_average(), datetime.now(UTC), time.monotonic()
    rows: list[Row] = []
    notes: list[str] = []
    failure = ""
    with Neighbours() as neighbours:
        try:
            work = importlib.import_module(f"benchmarks.{benchmark.module}").run
            with tempfile.TemporaryDirectory(prefix="qmq-bench-", dir=directory) as name:
                bench = Bench(
                    effort=effort,
                    directory=Path(name),
                    is_full_size=is_full_size,
                    asked=asked or Asked(),
                    notes=notes,
                )
                for row in cast("Callable[[Bench], Iterable[Row]]", work)(bench):
                    rows.append(row)
        except Exception as error:  # the top of the loop over benchmarks: the others still run
            failure = f"{type(error).__name__}: {error}"
    return Result(
        number=benchmark.number,
        name=benchmark.name,
        summary=benchmark.summary,
        goal=benchmark.goal,
        version=code_version(),
        effort=effort.value,
        machine=machine,
        started_at=started_at.isoformat(timespec="seconds"),
        duration_s=round(time.monotonic() - started_s, 1),
        load_before=load_before,
        load_after=load_average(),
        others_share=neighbours.share(),
        rows=tuple(rows),
        notes=tuple(notes),
        failure=failure,
    )
