"""R13, its part about groups: what a message costs the broker as groups and consumers grow in number.

Every variant pulls and acks the same number of messages in requests of the same size; what differs
is who asks. With 500 consumers of one group in turn each pull is of somebody who was not there the
time before: members join and leave with every request, and nothing is dealt out again. Compared is
the broker's processor time, within each round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count as counting
from itertools import cycle
from typing import Final

from benchmarks.backlog import fill
from benchmarks.load import SUBJECT
from benchmarks.measure import interleave, paired_ratios, percentile
from benchmarks.processes import Broker
from benchmarks.result import Conditions, Goal, Row
from benchmarks.suite import Bench
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.requests import PullRequest, Settlement, SettleRequest

PULL_MESSAGES: Final = 50
LEASE_MS: Final = 600_000
ALONE: Final = "1 group, 1 consumer"
#: For each, how its groups and consumers are called in turn.
CHURN: Final = "1 group, 500 consumers joining and leaving"
BESIDE: Final = "1 of 1,000 groups"
ALL: Final = "1,000 groups in turn"
GOAL: Final = Goal(bound=1.5, is_floor=False)

Asker = tuple[str, str]


class LossError(Exception):
    """A message was given twice, not at all, or its ack came too late."""


def run(bench: Bench) -> list[Row]:
    """Processor time of the broker per message, and its ratio to one group with one consumer."""
    groups = bench.effort.pick(tiny=10, quick=1_000, full=1_000)
    consumers = bench.effort.pick(tiny=10, quick=500, full=500)
    pulls = bench.effort.pick(tiny=20, quick=400, full=4_000)
    with bench.processes() as processes:
        few, many = processes.start_broker(), processes.start_broker()
        for broker in (few, many):
            fill(broker, pulls * PULL_MESSAGES)
        standing = [(f"standing-{number}", "one") for number in range(groups)]
        for asker in standing:
            Pulls(many, iter([asker])).step()
        numbers = counting()

        def churn() -> tuple[float, float]:
            group = f"churn-{next(numbers)}"
            askers = cycle((group, f"consumer-{number}") for number in range(consumers))
            return measure(few, askers, pulls)

        def alone(broker: Broker) -> tuple[float, float]:
            return measure(broker, cycle([(f"alone-{next(numbers)}", "one")]), pulls)

        variants: dict[str, Callable[[], tuple[float, float]]] = {
            ALONE: lambda: alone(few),
            CHURN: churn,
            BESIDE: lambda: alone(many),
            ALL: lambda: measure(many, cycle(standing), pulls, is_one_group=False),
        }
        outcomes = interleave(variants, rounds=bench.rounds)
    return rows_of(outcomes, pulls)


def rows_of(outcomes: dict[str, list[tuple[float, float]]], pulls: int) -> list[Row]:
    conditions = Conditions(
        durability="acks synced within 100 ms",
        client="HttpTransport, one connection, a pull and a settle each",
        batch_messages=PULL_MESSAGES,
        message_bytes=100,
        note=f"{pulls:,} pulls in each variant and round",
    )
    rows = []
    for name, figures in outcomes.items():
        for index, (figure, unit) in enumerate(
            (("processor time: broker", "µs per message"), ("pull and settle, p99", "ms"))
        ):
            rows.append(
                Row(
                    figure=f"{figure}, {name}",
                    unit=unit,
                    samples=tuple(each[index] for each in figures),
                    conditions=conditions,
                )
            )
    alone = [cpu for cpu, _ in outcomes[ALONE]]
    rows += [
        Row(
            figure=f"processor time: {name} / {ALONE}",
            unit="ratio",
            samples=tuple(paired_ratios([cpu for cpu, _ in outcomes[name]], alone)),
            conditions=conditions,
            goal=GOAL,
        )
        for name in (CHURN, BESIDE, ALL)
    ]
    return rows


def measure(
    broker: Broker, askers: Iterator[Asker], pulls: int, *, is_one_group: bool = True
) -> tuple[float, float]:
    """Microseconds of the broker for each message, and the 99th percentile of a pull and its ack."""
    asking = Pulls(broker, askers)
    cpu_s = broker.cpu_s()
    times_ms = [asking.step() for _ in range(pulls)]
    cpu_s = broker.cpu_s() - cpu_s
    if is_one_group and asking.sequences != set(range(asking.count)):
        raise LossError(f"{asking.count} messages, {len(asking.sequences)} different ones")
    return 1e6 * cpu_s / asking.count, percentile(times_ms, 0.99)


class Pulls:
    """Pulls and acks by whoever's turn it is."""

    def __init__(self, broker: Broker, askers: Iterator[Asker]) -> None:
        self._transport = HttpTransport(broker.url)
        self._askers = askers
        self.sequences: set[int] = set()
        self.count = 0

    def step(self) -> float:
        """One pull and its ack; milliseconds."""
        group, name = next(self._askers)
        started_s = time.perf_counter()
        given = self._transport.pull(
            PullRequest(
                subject=SUBJECT,
                group=group,
                consumer=name,
                max_messages=PULL_MESSAGES,
                lease_ms=LEASE_MS,
            )
        )
        first = given.head.first_pull_sequence
        acks = ((first, first + len(given.messages)),)
        answer = self._transport.settle(
            SettleRequest(
                subject=SUBJECT,
                group=group,
                consumer=name,
                settlements=(Settlement(token=given.head.token, acks=acks),),
            )
        )
        elapsed_ms = 1000 * (time.perf_counter() - started_s)
        if answer.stale or not given.messages:
            raise LossError(f"{len(given.messages)} messages for {name}, stale {answer.stale}")
        self.count += len(given.messages)
        self.sequences.update(one.sequence for one in given.messages)
        return elapsed_ms
