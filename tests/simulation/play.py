"""Plays one seed from its first moment to the verdict.

Trouble for a while, then the world heals; what was committed must arrive, and everything must come to
rest within a bounded time. At the end groups that only look are moved to the beginning and get everything
again, the power fails once more, and what is on the disk then is the truth that the history is judged by.
"""

from __future__ import annotations

import hashlib
import logging
import random
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.kit.events import Drained, Heal
from tests.simulation.broker import BrokerLife, PlayedStore
from tests.simulation.consuming import Worker
from tests.simulation.database import Databases
from tests.simulation.ears import as_lines
from tests.simulation.judging import Judge
from tests.simulation.people import Machine, Shop, Watch
from tests.simulation.plan import Plan, plan_of
from tests.simulation.scheduler import MS, StuckError
from tests.simulation.troubles import Troubles
from tests.simulation.world import World

_REST_MS = 120_000
_QUIET_MS = 1_200


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one seed."""

    plan: Plan
    #: What was found wrong, in sentences; nothing for a good world.
    faults: tuple[str, ...]
    world: World

    @property
    def fingerprint(self) -> str:
        """Equal for equal worlds: of every turn and of the whole history."""
        digest = hashlib.blake2b(digest_size=16)
        for at_us, name in self.world.scheduler.steps:
            digest.update(f"{at_us} {name}\n".encode())
        digest.update(as_lines(self.world.ears.events))
        return digest.hexdigest()

    def story(self) -> str:
        """Seed, faults, plan, every step and the history, for whoever looks for the reason."""
        steps = (f"{at_us / MS:12.3f} ms  {name}" for at_us, name in self.world.scheduler.steps)
        return "\n".join(
            (
                f"seed {self.plan.seed}",
                *self.faults,
                repr(self.plan),
                *steps,
                as_lines(self.world.ears.events).decode(),
            )
        )


def play(seed: int, databases: Databases) -> Outcome:
    """One seed."""
    plan = plan_of(seed)
    databases.empty()
    with _drawn_from(seed):
        world = World(plan)
        faults: list[str] = []
        try:
            _live(world, databases)
        except StuckError as error:
            faults += (*world.rows.faults, *world.handouts.faults, *world.host.remembered.faults)
            faults += world.archive.faults
            faults.append(f"O1: the world does not come to rest: {error}")
        except Exception:  # unexpected: the story is printed all the same
            faults.append(f"unforeseen: {traceback.format_exc(limit=-4)}")
        else:
            faults += Judge(world, databases).faults()
        finally:
            _end(world)
    return Outcome(plan=plan, faults=tuple(faults), world=world)


def _live(world: World, databases: Databases) -> None:
    plan, scheduler, host = world.plan, world.scheduler, world.host
    _watch_the_broker(world)
    _make_people(world, databases)
    host.start()
    for machine in world.machines:
        machine.start()
    if plan.has_archive:
        world.archive.begin()
    troubles = Troubles(world)
    troubles.begin()
    scheduler.run_for(plan.busy_ms * MS)
    scheduler.run(lambda: world.is_all_sent, for_us=_REST_MS * MS)
    scheduler.note("the world heals")
    troubles.heal()
    scheduler.run(lambda: troubles.is_over_for_good, for_us=_REST_MS * MS)
    troubles.resume_all()
    world.ears.tell(Heal)
    rest = Rest(world, databases)
    rest.wait()
    world.is_cured = True  # a group that looks at everything again gives nothing up for it
    if rest.has_dead_letters():
        troubles.operator.process.spawn("replays all", troubles.operator.replay_all)
        rest.wait()
    world.ears.tell(Drained)
    world.sought_at_ns = world.ears.now_ns()
    troubles.seek_audits()
    rest.wait()
    host.kill(is_power_cut=True)
    rest.wait()


class Rest:
    """Whether there is nothing left to do, for a while."""

    def __init__(self, world: World, databases: Databases) -> None:
        self._world = world
        self._databases = databases
        self._since_us = 0

    def wait(self) -> None:
        """Let time pass until there is rest; raises `StuckError`."""
        world = self._world
        self._since_us = world.scheduler.now_us
        end_us = world.scheduler.now_us + _REST_MS * MS
        while world.scheduler.now_us - self._since_us < _QUIET_MS * MS:
            world.scheduler.run_for(300 * MS)
            if (busy := self._busy()) is not None:
                self._since_us = world.scheduler.now_us
                if world.scheduler.now_us > end_us:
                    raise StuckError(busy)

    def has_dead_letters(self) -> bool:
        """Whether some group gave a message up. Requires: there is rest."""
        life = self._world.host.life
        assert life is not None
        groups = self._world.plan.groups
        return any(status.dead for one in groups if (status := life.status(one)) is not None)

    def _busy(self) -> str | None:
        """Who still has something to do."""
        world = self._world
        life = world.host.life
        if life is None:
            return "the broker is down"
        if any(machine.process.is_dead for machine in world.machines):
            return "a client is down"
        (live,) = self._databases.read("SELECT count(*) FROM qmq_outbox")[0]
        if live:
            return f"{live} rows in the outbox"
        if life.store.schedule.pending_by_subject() and any(
            life.store.schedule.pending_by_subject().values()
        ):
            return "delayed messages wait"
        return self._busy_group(life)

    def _busy_group(self, life: BrokerLife) -> str | None:
        for group in self._world.plan.groups:
            if life.store.queue(group.subject) is None:
                continue
            status = life.status(group)
            if status is None or status.lag or status.in_flight or status.redelivery or status.held:
                return f"group {group.name} is not done"
        return None


def _make_people(world: World, databases: Databases) -> None:
    plan, slot = world.plan, databases.slot
    shops = [f"shop-{number}" for number in range(plan.producers)]
    watches = [f"watch-{number}" for number in range(plan.watchdogs)]
    machines: list[Machine] = [Shop(world, name, slot(name)) for name in shops]
    machines += [Watch(world, name, slot(name)) for name in watches]
    for group in plan.groups:
        names = [f"{group.name}-{number}" for number in range(group.consumers)]
        machines += [Worker(world, name, slot(name), group) for name in names]
    world.machines = machines


def _watch_the_broker(world: World) -> None:
    host, ears, network = world.host, world.ears, world.network

    def on_begin(life: BrokerLife) -> None:
        ears.fault("crash", "broker", "end")
        life.on_tick = lambda: _look(world, life)
        world.archive.look_at_begin(life.store, is_forced=life.is_forced)
        assert isinstance(life.store, PlayedStore)
        life.store.before_giving_up = lambda: world.shelf.look(life.store)
        world.handouts.on_begin(life)
        network.on_begin(life)

    def on_death(life: BrokerLife) -> None:
        ears.fault("crash", "broker", "begin")
        world.handouts.on_death(life, is_power_cut=host.is_power_cut)
        network.on_death(life)

    host.on_begin, host.on_death = on_begin, on_death


def _look(world: World, life: BrokerLife) -> None:
    """See what is there before any of it may go, and whether what went was free to go."""
    if world.plan.has_retention:
        world.shelf.look(life.store)
    world.archive.look(life.store, is_forced=life.is_forced)


def _end(world: World) -> None:
    """Let go of everybody, so that no strand outlives its world."""
    for machine in world.machines:
        machine.is_wanted = False
        machine.process.kill()
    world.archive.process.kill()
    world.archive.remover.kill()
    world.host.end()


@contextmanager
def _drawn_from(seed: int) -> Iterator[None]:
    """The product's own draws are from the seed, too, and its logs, which nobody reads, are off."""
    state = random.getstate()
    random.seed(f"product {seed}")
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(level)
        random.setstate(state)
