"""The same work by other message systems and by this one, in turns within each round: messages and processor time.

Produce: bodies that were made before are sent by the client's way for many, until each was accepted. Drain: the same
messages are read and acked. Both: others are sent and read at the same time. One by one: single sends, each
awaited; and 1,000 messages a second from their making to the reader's hands. A system is durable, that is, each
message is on the disk before its answer, or as its own documentation starts it; ours is always durable and stands
in both tables. The processor time of server and clients is that of their processes. Before its first round each
system does a seventh of a turn, which is not counted.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks import interruption
from benchmarks.measure import Effort, paired_ratios
from benchmarks.peers.contenders import CONTENDERS, MODES, US, Contender, Mode, Rig, Servers, reason
from benchmarks.peers.environment import NoPeersError
from benchmarks.peers.turns import (
    BATCH_WORK,
    BOTH,
    BROKER,
    CLIENT,
    DRAIN,
    LONE,
    LONE_SIZE,
    P50,
    PACED,
    PRODUCE,
    RATE,
    SHARE,
    SIZES,
    UNITS,
    Figures,
    Key,
    Load,
    take_turn,
    warm_up,
)
from benchmarks.processes import ProcessError
from benchmarks.result import Cell, Conditions, Goal, Row
from benchmarks.suite import Bench

#: That start only after some seconds: a short run has them in one mode.
SLOW: Final = {"kafka", "rocketmq"}
MESSAGES_MIN: Final = 100
WARM_UP: Final = 1 / 7
SIDES: Final = "both sides µs"

#: Bounds of our own figures.
GOALS: Final[dict[Key, Goal]] = {
    (1024, BOTH, RATE): Goal(bound=160_000, is_floor=True, number="R2"),
    (1024, BOTH, SIDES): Goal(bound=9, is_floor=False, number="R2"),
    (1024, DRAIN, RATE): Goal(bound=300_000, is_floor=True, number="R3"),
    (1024, DRAIN, SIDES): Goal(bound=3.5, is_floor=False, number="R3"),
    (LONE_SIZE, LONE, BROKER): Goal(bound=250, is_floor=False, number="R16"),
    (LONE_SIZE, PACED, P50): Goal(bound=1.0, is_floor=False, number="R18"),
    (LONE_SIZE, PACED, SHARE): Goal(bound=0.4, is_floor=False, number="R18"),
}
KAFKA, NATS = "Kafka, durable", "NATS JetStream, durable"
#: Bounds of our figure divided by a peer's of the same round.
RATIO_GOALS: Final[dict[tuple[str, Key], Goal]] = {
    (KAFKA, (1024, PRODUCE, RATE)): Goal(bound=1.1, is_floor=True, number="R1"),
    (KAFKA, (100, PRODUCE, RATE)): Goal(bound=0.9, is_floor=True, number="R17"),
    (KAFKA, (100, DRAIN, RATE)): Goal(bound=0.9, is_floor=True, number="R17"),
    (KAFKA, (100, PRODUCE, SIDES)): Goal(bound=1.0, is_floor=False, number="R17"),
    (KAFKA, (100, DRAIN, SIDES)): Goal(bound=1.0, is_floor=False, number="R17"),
    (NATS, (LONE_SIZE, LONE, P50)): Goal(bound=1.2, is_floor=False, number="R16"),
}


class NoSystemError(Exception):
    """`--systems` names one that is not known."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """A contender's rounds; of one that failed, those before."""

    contender: Contender
    load: Load
    durability: str = ""
    client: str = ""
    rounds: list[Figures] = field(default_factory=list)
    has_failed: bool = False

    def samples(self, key: Key) -> tuple[float, ...]:
        """Of all its rounds; the processor time of both sides is the sum of theirs."""
        size, work, what = key
        parts = (BROKER, CLIENT) if what == SIDES else (what,)
        return tuple(sum(one[size, work, part] for part in parts) for one in self.rounds)


def run(bench: Bench) -> list[Row]:
    """Rates, processor time and latencies of each, and our figures divided by theirs."""
    outcomes = [
        Outcome(contender=contender, load=load_of(bench, contender)) for contender in wanted(bench)
    ]
    measure(bench, outcomes)
    ours, *others = [outcome for outcome in outcomes if outcome.rounds]
    modes = {other.contender.mode for other in others} | {"durable"}
    rows = table_rows(ours, [mode for mode in MODES if mode in modes])
    rows += [row for other in others for row in table_rows(other, [other.contender.mode])]
    for key in ((size, work, SIDES) for size in SIZES for work in BATCH_WORK):
        rows.append(row_of(ours, key, ours.samples(key), goal=GOALS.get(key)))
    return rows + [row for other in others for row in ratio_rows(ours, other)]


def wanted(bench: Bench) -> list[Contender]:
    """Ours first, and of the others those that were asked for."""
    known = {contender.engine for contender in CONTENDERS} - {""}
    if unknown := set(bench.asked.systems) - known:
        raise NoSystemError(f"no system {min(unknown)}; there are: {', '.join(sorted(known))}")
    found = [
        contender
        for contender in CONTENDERS
        if contender.name == US or contender.engine in (bench.asked.systems or known)
    ]
    if bench.effort is Effort.FULL:
        return found
    slow = [one for one in found if one.mode == "default" and one.engine in SLOW]
    bench.notes.extend(f"{one.key}: in a full run only, because it starts slowly." for one in slow)
    return [one for one in found if one not in slow]


def load_of(bench: Bench, contender: Contender) -> Load:
    """How much this one has to do in a round."""
    per_mille = bench.effort.pick(tiny=5, quick=50, full=1_000)

    def part(count: int) -> int:
        return max(MESSAGES_MIN, int(count * per_mille * bench.asked.scale / 1_000))

    return Load(
        stored=part(contender.stored),
        both=part(contender.both),
        lone=bench.effort.pick(tiny=20, quick=100, full=500),
        paced=bench.effort.pick(tiny=100, quick=300, full=3_000),
    )


def measure(bench: Bench, outcomes: Sequence[Outcome]) -> None:
    """Fill in the rounds of each that can be had; why another cannot is noted."""
    from tests.services.ladder import ServiceMissingError  # late: only peers need the tests
    from tests.services.rungs import RungError

    servers = Servers(bench, [outcome.contender for outcome in outcomes])
    rigs: dict[str, Rig] = {}
    try:
        for i in range(bench.rounds):
            for outcome in outcomes[:: 1 if i % 2 == 0 else -1]:
                name = outcome.contender.key
                if outcome.has_failed:
                    continue
                interruption.check()
                try:
                    add_round(bench, outcome, rigs, servers)
                except (ServiceMissingError, RungError, NoPeersError, ProcessError) as error:
                    if name == US:
                        raise
                    outcome.has_failed = True
                    bench.notes.append(
                        f"{name} was left out from round {i + 1} on: {reason(error)}"
                    )
                if i + 1 == bench.rounds or outcome.has_failed:
                    if name in rigs:
                        rigs.pop(name).close()
                    servers.release(outcome.contender)
    finally:
        for rig in rigs.values():
            rig.close()
        servers.close()


def add_round(bench: Bench, outcome: Outcome, rigs: dict[str, Rig], servers: Servers) -> None:
    """One turn, on the system that is up or is started now."""
    contender, load = outcome.contender, outcome.load
    if contender.key not in rigs:
        rig = rigs[contender.key] = Rig(bench, contender, servers)
        outcome.durability, outcome.client = rig.server.durability, rig.client
        first = (max(MESSAGES_MIN, int(WARM_UP * count)) for count in (load.stored, load.both))
        warm_up(rig, Load(stored=next(first), both=next(first), lone=0, paced=0))
    outcome.rounds.append(take_turn(rigs[contender.key], load))
    os.sync()  # what this one has in the page cache is not written during the next one's turn


def table_rows(outcome: Outcome, modes: Sequence[Mode]) -> list[Row]:
    """Every figure of one contender, each in its place in the tables of these modes."""
    name, rows = outcome.contender.name, []
    for key in outcome.rounds[0]:
        size, work, what = key
        kind = "" if work in BATCH_WORK else ", one by one"
        cells = tuple(
            Cell(
                table=f"{mode.capitalize()}, {'1 KiB' if size == 1024 else f'{size} B'}{kind}",
                line=f"{name}, durable as always" if (name, mode) == (US, "default") else name,
                column=f"{work}, {what}",
            )
            for mode in modes
        )
        goal = GOALS.get(key) if name == US else None
        rows.append(row_of(outcome, key, outcome.samples(key), goal=goal, cells=cells))
    return rows


def ratio_rows(ours: Outcome, other: Outcome) -> list[Row]:
    """Our figures divided by a peer's, round by round."""
    name = other.contender.key
    keys = [(size, work, RATE) for size in SIZES for work in BATCH_WORK]
    keys += [key for peer, key in RATIO_GOALS if peer == name and key not in keys]
    rows = []
    for key in keys:
        theirs = other.samples(key)
        ratios = paired_ratios(ours.samples(key)[: len(theirs)], theirs)
        goal = RATIO_GOALS.get((name, key))
        row = row_of(other, key, tuple(ratios), goal=goal, beside=f": {US} / {name}")
        rows.append(row)
    return rows


def row_of(
    outcome: Outcome,
    key: Key,
    samples: tuple[float, ...],
    *,
    goal: Goal | None,
    cells: tuple[Cell, ...] = (),
    beside: str = "",
) -> Row:
    """One figure with what it was measured with."""
    size, work, what = key
    load = outcome.load
    count = {PRODUCE: load.stored, DRAIN: load.stored, BOTH: load.both, LONE: load.lone}
    unit = UNITS.get(what, "µs per message")
    # Of ratios, that of rates goes without saying.
    figure = ", ".join([work, f"{size} B", *([] if beside and what == RATE else [what])])
    return Row(
        figure=figure + (beside or f": {outcome.contender.key}"),
        unit="ratio" if beside else unit,
        samples=samples,
        conditions=Conditions(
            durability=outcome.durability,
            client=outcome.client,
            message_bytes=size,
            note=f"{count.get(work, load.paced):,} messages per round",
        ),
        goal=goal,
        cells=cells,
    )
