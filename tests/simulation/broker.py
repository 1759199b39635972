"""The broker in the played world: the real service on a played disk, its threads as strands.

What the threads of `Broker` do in loops is done here pass by pass: the writer, the sync of the action
log, the releases and the tick of the loop. The loop is `loop.py`, the face before it `face.py`. A life ends by a kill, a power cut, a stop in order, or by the broker's own hand when its disk
fails; the next one begins on what that left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from qmq_broker.errors import DiskFullError, NoRoomError
from qmq_broker.options import StoreOptions
from qmq_broker.service.broker import Broker, BrokerSettings
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.service.query import GroupStatus
from qmq_broker.storage.store import Placed, Store
from qmq_client.wire.backoff import ExponentialBackoff
from qmq_client.wire.errors import QmqError
from qmq_client.wire.frame import MessageFrame
from tests.crash.image import Image
from tests.crash.recording_disk import UNLIMITED
from tests.simulation.disk import PlayedDisk, after_kill, after_power_cut
from tests.simulation.loop import PlayedLoop
from tests.simulation.plan import GroupPlan, Plan, Trouble
from tests.simulation.remembered import Remembered
from tests.simulation.scheduler import (
    MS,
    Died,
    PlayedClock,
    Process,
    Scheduler,
    Signal,
    StuckError,
)

#: Segments so short that a few messages roll them, snapshots so near that each life writes some.
STORE: Final = StoreOptions(
    segment_bytes=4096,
    action_segment_bytes=4096,
    growth_bytes=1024,
    queue_entries_per_file=16,
    reserve_bytes=0,
    snapshot_bytes=4096,
    index_entries=0,
    spare_segments=0,
    checkpoint_ms=500,
    queue_flush_bytes=4096,
    bucket_ms=5 * 60_000,
)
#: Where there is retention the log is kept so short, with short segments, and so few ids are known.
RETAINED_BYTES: Final = 1_024
_WINDOW_IDS: Final = 16
#: Where it is forced: a start needs what was sent last, and so that stays whoever is behind.
_WINDOW_IDS_BY_FORCE: Final = 4
#: Where room is short the broker keeps this much of it, and is told of no more than some messages'
#: room above: then it asks again soon.
RESERVE_BYTES: Final = 8_192
ROOM_BYTES: Final = RESERVE_BYTES + 2_000
#: Redeliveries later than this are long retries, where handlers ask for them.
_HORIZON_MS: Final = 1_500
_TICK_US: Final = 100 * MS
_IDLE_US: Final = 500 * MS
_POWER_ON_US: Final = 300 * MS


def window_ids(plan: Plan) -> int:
    """How many ids the broker of this world is promised to know, at the least."""
    if not plan.has_retention:
        return STORE.dedupe_ids
    return _WINDOW_IDS_BY_FORCE if Trouble.FORCE in plan.troubles else _WINDOW_IDS


def settings_of(plan: Plan) -> BrokerSettings:
    """How the broker of this world serves."""
    store, limits = STORE, ServiceLimits(own_frame_bytes=RETAINED_BYTES // 3)
    if plan.has_retention:
        store = replace(
            store,
            segment_bytes=1_024,
            retain_bytes=RETAINED_BYTES,
            dedupe_ids=window_ids(plan),
            queue_entries_per_file=4,
            queue_flush_bytes=512,
        )
    if Trouble.FULL_DISK in plan.troubles:
        store = replace(store, reserve_bytes=RESERVE_BYTES)
    if plan.has_long_waits:
        limits = replace(limits, redelivery_horizon_ms=_HORIZON_MS)
    return BrokerSettings(
        store=store, limits=limits, backoff=ExponentialBackoff(first_ms=200, max_ms=5_000)
    )


class PlayedStore(Store):
    """The store, which says where its writer may give its turn back, and what it has taken."""

    remembered: Remembered
    #: Told before anything is given up.
    before_giving_up: Callable[[], None]

    def append(self, frames: Sequence[MessageFrame]) -> list[Placed]:
        """See `Store.append`; a roll syncs under the log's lock."""
        assert isinstance(self.disk, PlayedDisk)
        try:
            with self.disk.hold():
                placed = super().append(frames)
        except NoRoomError:  # nothing is written
            raise
        except BaseException:
            self.remembered.on_failure(frames)
            raise
        self.remembered.on_taken(frames, placed)
        return placed

    def give_up_below(self, offset: int) -> int:
        """See `Store.give_up_below`, which holds the log's lock, too."""
        assert isinstance(self.disk, PlayedDisk)
        with self.disk.hold():
            self.before_giving_up()
            return super().give_up_below(offset)


class BrokerLife:
    """One process of the broker, from its start until it dies."""

    def __init__(
        self,
        scheduler: Scheduler,
        process: Process,
        disk: PlayedDisk,
        clock: PlayedClock,
        settings: BrokerSettings,
    ) -> None:
        self.process = process
        self.disk = disk
        self._scheduler = scheduler
        self._has_work = Signal()
        self._delay_is_wanted = Signal()
        self._is_stopping = False
        self._busy_strands = 0
        self._strand_ended = Signal()
        #: Called before each look of the broker at what is to be done by time.
        self.on_tick: Callable[[], None] = lambda: None
        #: Whether retention waits for nobody.
        self.is_forced = settings.store.force_retention
        self.store = PlayedStore.open(disk, clock, settings.store)
        self.broker = Broker(
            self.store, clock, settings, post=self._post, draw=scheduler.rng.random
        )
        self.broker.on_end = self._end
        self.loop = PlayedLoop(scheduler, process)
        self.loop.on_turn = self._wake_strands

    def status(self, group: GroupPlan) -> GroupStatus | None:
        """How far a group has come, as an operator sees it; None for one that is not there yet."""
        found = self.broker.query.groups(
            subject=group.subject, group=group.name, now_ms=self.broker.time.now_ms()
        )
        return found[0] if found else None

    def start(self) -> None:
        """Rebuild the groups and begin the strands."""
        broker, process = self.broker, self.process
        broker.delivery.start(broker.time.now_ms())
        broker.delayed.releaser.begin()
        for name, work in (
            ("writer", self._write),
            ("action sync", self._sync_actions),
            ("delay", self._release),
        ):
            self._busy_strands += 1
            process.spawn(name, work)
        self.in_loop("tick", self._tick)

    def in_loop(self, name: str, call: Callable[[], None], delay_us: int = 0) -> None:
        """Let this be done in a turn of the broker's loop, if it lives then."""
        name = f"{self.process.name} {name}"
        self._scheduler.after(delay_us, name, lambda: self.loop.turn(call))

    def stop(self) -> None:
        """Begin to end in order. Only in the hub."""
        if self._is_stopping:
            return
        self._is_stopping = True
        self.broker.writer.stop()
        self.loop.turn(lambda: self.broker.drain("asked to"))
        self._scheduler.give(self._has_work)
        self._scheduler.give(self._delay_is_wanted)
        self.process.spawn("stop", self._close)

    def _close(self) -> None:
        """Close the store behind all strands, as `Broker.stop` does it behind its threads."""
        while self._busy_strands:
            self.process.wait(self._strand_ended, _IDLE_US, "waits for its strands")
        try:
            with self.disk.hold():
                self.store.close()
        except QmqError as error:  # its disk failed: it ends all the same
            self._scheduler.note(f"broker did not stop in order: {error!r:.200}")
        self.process.die()

    def _end(self) -> None:
        self._scheduler.after(0, f"{self.process.name} ends by itself", self.process.kill)

    def _post(self, call: Callable[[], None]) -> None:
        self.in_loop("loop", call, self._scheduler.rng.randrange(200))

    def _wake_strands(self) -> None:
        if self._has_writer_work:
            self._scheduler.give(self._has_work)
        releaser = self.broker.delayed.releaser
        if releaser.is_busy or releaser.has_news:  # what its thread is notified of
            self._scheduler.give(self._delay_is_wanted)

    @property
    def _has_writer_work(self) -> bool:
        """Whether the writer's thread, which waits for requests and tasks alike, would find one."""
        writer = self.broker.writer
        return not (writer._submissions.empty() and writer._tasks.empty())

    def _write(self) -> None:
        is_stopped = False
        while not is_stopped:
            if not self._has_writer_work:
                self.process.wait(self._has_work, _IDLE_US, "writer waits")
            is_stopped = self.broker.writer.step().is_stopped
        self._end_strand()

    def _sync_actions(self) -> None:
        interval_us = self.broker.settings.limits.action_sync_ms * MS
        while not self._is_stopping:
            self.process.sleep(interval_us, "action sync sleeps")
            try:
                self.broker._action_sync.step()
            except QmqError as error:  # as the thread's loop does
                self.broker._on_poisoned(f"action log sync: {error}")
        self._end_strand()

    def _release(self) -> None:
        while not self._is_stopping:
            try:
                wait_s = self.broker.delayed.releaser.step()
            except QmqError as error:  # as the thread's loop does
                self._scheduler.note(f"releases failed: {error!r:.200}")
                wait_s = 1.0
            wait_us = min(500_000, max(10_000, round(wait_s * 1_000_000)))
            self.process.wait(self._delay_is_wanted, wait_us, "delay waits")
        self._end_strand()

    def _end_strand(self) -> None:
        self._busy_strands -= 1
        self._scheduler.give(self._strand_ended)

    def _tick(self) -> None:
        self.on_tick()
        try:
            self.broker.step()
        except QmqError as error:  # as the server's loop does
            self._scheduler.note(f"tick failed: {error!r:.200}")
        self.in_loop("tick", self._tick, _TICK_US)


class BrokerHost:
    """The machine that the broker runs on: power, restarts, and its clock."""

    def __init__(self, scheduler: Scheduler, plan: Plan) -> None:
        self.clock = PlayedClock(scheduler)
        self.life: BrokerLife | None = None
        #: How the next death takes the disk: a power cut, or only the process.
        self.is_power_cut = True
        #: Disk calls after which each new life dies once more, as long as there are some.
        self.deaths_at_start: list[int] = []
        #: Told when a life has begun, and when one has ended.
        self.on_begin: Callable[[BrokerLife], None] = lambda life: None
        self.on_death: Callable[[BrokerLife], None] = lambda life: None
        #: Room for all files together.
        self.capacity_bytes = UNLIMITED
        #: Whether retention waits for nobody in the lives to come, and whether it ever did.
        self.is_forced = self.was_forced = False
        self._settings = settings_of(plan)
        self.remembered = Remembered(self._settings.store.dedupe_ids)
        self._room_bytes_max = ROOM_BYTES if self._settings.store.reserve_bytes else None
        self._scheduler = scheduler
        self._image = Image()
        self._lives = 0
        self._is_kept_down = False

    def start(self) -> None:
        """Begin a life, which may die before it is there."""
        if self.life is not None or self._is_kept_down:
            return
        self._lives += 1
        process = Process(self._scheduler, f"broker.{self._lives}")
        disk = PlayedDisk(self._image, self._scheduler, process)
        disk.calls_left = self.deaths_at_start.pop() if self.deaths_at_start else None
        disk.room_bytes_max = self._room_bytes_max
        disk.capacity_bytes = self.capacity_bytes
        try:
            life = BrokerLife(self._scheduler, process, disk, self.clock, self._settings_now())
            assert isinstance(life.store, PlayedStore)
            life.store.remembered = self.remembered
            self.remembered.on_begin(life.store.durable_offset)
            life.start()
        except Died:
            self._after_death(disk)
            return
        except DiskFullError as error:  # it is begun again and again until there is room
            self._scheduler.note(f"the broker does not start: {error!r:.200}")
            process.kill()
            self.is_power_cut = False
            self._after_death(disk)
            return
        except QmqError as error:
            raise StuckError(f"the broker does not start: {error}") from error
        disk.calls_left = None
        self.life = life
        process.on_death = lambda: self._on_death(life)
        self._scheduler.note(f"broker began: epoch {life.store.epoch}")
        self.on_begin(life)

    def _settings_now(self) -> BrokerSettings:
        self.was_forced = self.was_forced or self.is_forced
        store = replace(self._settings.store, force_retention=self.is_forced)
        if self.is_forced and store.retain_bytes:
            store = replace(store, retain_bytes=1)
        return replace(self._settings, store=store)

    def limit_room(self, free_bytes: int | None) -> None:
        """Leave so much room on the disk; None for more than anybody needs."""
        if free_bytes is None:
            self.capacity_bytes = UNLIMITED
        elif self.life is not None:
            self.capacity_bytes = self.life.disk.used_bytes() + free_bytes
        if self.life is not None:
            self.life.disk.capacity_bytes = self.capacity_bytes

    def kill(self, *, is_power_cut: bool) -> None:
        """End the life, if there is one. Only in the hub."""
        self.is_power_cut = is_power_cut
        if self.life is not None:
            self.life.process.kill()

    def restart(self) -> None:
        """Stop in order and start again."""
        if self.life is not None:
            self.is_power_cut = False
            self.life.stop()

    def end(self) -> None:
        """Begin no life any more."""
        self._is_kept_down = True
        self.kill(is_power_cut=False)

    def _on_death(self, life: BrokerLife) -> None:
        self.life = None
        life.loop.end()
        self.on_death(life)
        self._after_death(life.disk)

    def _after_death(self, disk: PlayedDisk) -> None:
        rng = self._scheduler.rng
        kind = "power cut" if self.is_power_cut else "kill"
        self._scheduler.note(f"broker died: {kind}")
        if self.is_power_cut:
            self._image = after_power_cut(disk.image, rng)
        else:
            self._image = after_kill(disk.image)
        self._scheduler.after(rng.randrange(_POWER_ON_US), "broker starts", self.start)
