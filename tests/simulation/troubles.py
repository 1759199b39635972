"""What goes wrong in a played world, and when: kinds, times and victims drawn from its seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from qmq_broker.service.serving import Serving
from qmq_client.wire.errors import QmqError
from qmq_client.wire.start import Start, StartKind
from tests.simulation.broker import RESERVE_BYTES
from tests.simulation.consuming import Worker
from tests.simulation.disk import SLOW_SYNC_US, SYNC_US, PlayedDisk
from tests.simulation.operators import Operator
from tests.simulation.people import Machine, Shop, Watch
from tests.simulation.plan import GroupPlan, Kind, Trouble
from tests.simulation.scheduler import MS
from tests.simulation.world import World

#: Whoever is not killed at once dies within so many of the points at which he could.
_POINTS: Final = 60
_DISK_CALLS: Final = 40
_SOON_US: Final = 30 * MS
_WHILE_MS: Final = 3_000
#: Clocks are wrong by less than leases, takeovers and the broker's window of ids forgive.
_WRONG_MS: Final = 5_000


class Troubles:
    """Lets things go wrong until the world is healed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.scheduler.rng
        self._is_over = False
        self.operator = Operator(world)
        self._ways: dict[Trouble, Callable[[], None]] = {
            Trouble.POWER_CUT: lambda: world.host.kill(is_power_cut=True),
            Trouble.BROKER_KILL: lambda: world.host.kill(is_power_cut=False),
            Trouble.BROKER_RESTART: world.host.restart,
            Trouble.DISK_CALL: self._die_at_a_call,
            Trouble.HAND_OUT_CUT: self._cut_after_a_hand_out,
            Trouble.SLOW_DISK: self._slow_the_disk,
            Trouble.BAD_DISK: self._fail_a_sync,
            Trouble.FULL_DISK: self._fill_the_disk,
            Trouble.READ_ONLY: lambda: self.operator.close_for(self._rng.randrange(_WHILE_MS * MS)),
            Trouble.PRODUCER_CRASH: lambda: self._crash(Shop),
            Trouble.CONSUMER_CRASH: lambda: self._crash(Worker),
            Trouble.CONSUMER_STOP: self._stop_a_consumer,
            Trouble.WATCHDOG_CRASH: lambda: self._crash(Watch),
            Trouble.LOST_REQUESTS: lambda: self._weather("loses_requests", 0.3),
            Trouble.LOST_ANSWERS: lambda: self._weather("loses_answers", 0.4),
            Trouble.DOUBLED: lambda: self._weather("doubles", 0.4),
            Trouble.SLOW: lambda: self._weather("delays", 0.3),
            Trouble.PARTITION: self._cut_off,
            Trouble.DATABASE: lambda: self._database("fails", 0.3),
            Trouble.COMMITS: lambda: self._database("spoils_commits", 0.4),
            Trouble.CLOCKS: self._set_a_clock,
            Trouble.PAUSE: self._pause,
            Trouble.SEEK: self._seek,
            Trouble.REPLAY: lambda: self.operator.replay(self._rng.choice(world.plan.groups)),
            Trouble.FORCE: self._force_retention,
            Trouble.REMOVAL: world.archive.remove,
        }

    def begin(self) -> None:
        """From now on things go wrong."""
        self._next()

    def heal(self) -> None:
        """Nothing goes wrong any more; who is dead begins again by himself."""
        world = self._world
        self._is_over = True
        weather = world.network.weather
        weather.loses_requests = weather.loses_answers = weather.doubles = weather.delays = 0.0
        weather.cut_off.clear()
        world.played.fails = world.played.spoils_commits = 0.0
        for machine in world.machines:
            machine.process.points_left = None
        if world.host.life is not None:
            world.host.life.disk.calls_left = None
            world.host.life.disk.sync_us = SYNC_US
            world.host.life.disk.fails_sync = lambda path: False
        world.host.deaths_at_start.clear()
        world.host.limit_room(None)
        self._wait_for_all()

    @property
    def is_over_for_good(self) -> bool:
        """Whether the broker lives as it is to live from now on, whatever arrives late."""
        life = self._world.host.life
        return life is not None and not life.is_forced and not self.operator.is_closing

    def _next(self) -> None:
        delay_us = round(self._rng.expovariate(1.0) * self._world.plan.trouble_every_ms * MS)
        self._world.scheduler.after(delay_us, "trouble", self._happen)

    def _happen(self) -> None:
        if self._is_over:
            return
        kind = self._rng.choice(self._world.plan.troubles)
        self._world.scheduler.note(f"trouble: {kind}")
        self._ways[kind]()
        self._next()

    def _later(self, call: Callable[[], None]) -> None:
        delay_us = self._rng.randrange(_WHILE_MS * MS)
        self._world.scheduler.after(delay_us, "trouble is over", call)

    def _disk(self) -> PlayedDisk | None:
        life = self._world.host.life
        return None if life is None else life.disk

    def _die_at_a_call(self) -> None:
        host, rng = self._world.host, self._rng
        host.is_power_cut = rng.random() < 0.7
        if (disk := self._disk()) is not None:
            disk.calls_left = rng.randrange(1, _DISK_CALLS)
        # Recoveries die, too, but not for ever.
        host.deaths_at_start = [rng.randrange(1, _DISK_CALLS) for _ in range(rng.randrange(3))]

    def _cut_after_a_hand_out(self) -> None:
        """What was answered a moment ago is what a power cut takes first."""
        host, scheduler = self._world.host, self._world.scheduler

        def cut() -> None:
            if not self._is_over:
                host.kill(is_power_cut=True)

        delay_us = self._rng.randrange(_SOON_US)
        self._world.handouts.on_next = lambda: scheduler.after(delay_us, "trouble comes", cut)

    def _slow_the_disk(self) -> None:
        if (disk := self._disk()) is not None:
            disk.sync_us = SLOW_SYNC_US
            self._later(lambda: setattr(disk, "sync_us", SYNC_US))

    def _fail_a_sync(self) -> None:
        if (disk := self._disk()) is not None:
            log = self._rng.choice(("commitlog", "actionlog"))
            self._world.host.is_power_cut = self._rng.random() < 0.5
            disk.fails_sync = lambda path: path.startswith(log)

    def _fill_the_disk(self) -> None:
        """Somebody else takes room: some of what the broker keeps, or so much that a few writes fit."""
        host = self._world.host
        host.limit_room(self._rng.randrange(2 * RESERVE_BYTES))
        self._later(lambda: host.limit_room(None))

    def _force_retention(self) -> None:
        """From its next life on the broker waits for nobody, for a while.

        Only once all groups are there for good: what a group has lost is counted from its first pull on.
        """
        host, groups = self._world.host, self._world.plan.groups
        life = host.life
        if life is None or not all(life.status(group) for group in groups):
            return
        try:
            life.store.actions.sync()
        except QmqError as error:
            self._world.scheduler.note(f"retention is not forced: {error!r:.200}")
            return
        # Who is behind then has something to lose.
        for group in groups:
            self._pause_for_a_while(group)
        self._world.archive.rest_for(2 * _WHILE_MS * MS)
        host.is_forced = True
        host.restart()
        self._later(self._wait_for_all)

    def _wait_for_all(self) -> None:
        host = self._world.host
        host.is_forced = False
        if host.life is not None and host.life.is_forced:
            host.restart()

    def _victim(self, *kinds: type[Machine]) -> Machine | None:
        """One of these kinds, or of all."""
        found = [one for one in self._world.machines if not kinds or isinstance(one, kinds)]
        return self._rng.choice(found) if found else None

    def _crash(self, kind: type[Machine]) -> None:
        machine = self._victim(kind)
        if machine is None:
            return
        if self._rng.random() < 0.3:
            machine.process.kill()
        else:
            machine.process.points_left = self._rng.randrange(1, _POINTS)

    def _stop_a_consumer(self) -> None:
        worker = self._victim(Worker)
        if isinstance(worker, Worker):
            worker.stop()

    def _weather(self, name: str, chance: float) -> None:
        weather = self._world.network.weather
        setattr(weather, name, chance)
        self._later(lambda: setattr(weather, name, 0.0))

    def _cut_off(self) -> None:
        machine = self._victim()
        if machine is not None:
            cut_off, name = self._world.network.weather.cut_off, machine.process.name
            cut_off.add(name)
            self._later(lambda: cut_off.discard(name))

    def _database(self, name: str, chance: float) -> None:
        played = self._world.played
        setattr(played, name, chance)
        self._later(lambda: setattr(played, name, 0.0))

    def _set_a_clock(self) -> None:
        world, rng = self._world, self._rng
        clocks = [world.host.clock, world.played.clock]
        clocks += [machine.clock for machine in world.machines]
        world.handouts.note_time()
        rng.choice(clocks).ahead_ms = rng.randint(-_WRONG_MS, _WRONG_MS)

    def _pause(self) -> None:
        self._pause_for_a_while(self._rng.choice(self._world.plan.groups))

    def _pause_for_a_while(self, group: GroupPlan) -> None:
        self._in_broker(lambda: self._set_pause(group.name, is_paused=True))

        def resume() -> None:
            self._in_broker(lambda: self._set_pause(group.name, is_paused=False))

        self._later(resume)

    def resume_all(self) -> None:
        """Let every group go on, and the broker take messages. Requires: the broker lives."""
        life = self._world.host.life
        assert life is not None
        life.broker.serving.become(Serving.SERVING, "")
        for group in self._world.plan.groups:
            self._set_pause(group.name, is_paused=False)

    def _set_pause(self, name: str, *, is_paused: bool) -> None:
        life = self._world.host.life
        assert life is not None
        (group,) = (one for one in self._world.plan.groups if one.name == name)
        self._world.handouts.pause(life, group, is_paused=is_paused)

    def _seek(self) -> None:
        self._in_broker(self.seek_audits)

    def seek_audits(self) -> None:
        """Move the groups that only look to the beginning. Requires: the broker lives."""
        life = self._world.host.life
        assert life is not None
        broker = life.broker
        for group in self._world.plan.groups:
            known = broker.delivery.group(group.subject, group.name)
            if group.kind is Kind.AUDIT and known is not None:
                start, now_ms = Start(StartKind.EARLIEST), broker.time.now_ms()
                first = broker.changes.seek(group.subject, group.name, start, now_ms)
                self._world.sought[group.subject] = first

    def _in_broker(self, call: Callable[[], None]) -> None:
        """As an operator does, who may be refused."""

        def ask() -> None:
            try:
                call()
            except QmqError as error:
                self._world.scheduler.note(f"an operator is refused: {error!r:.200}")

        life = self._world.host.life
        if life is not None:
            life.in_loop("an operator", ask)
