"""Lives that are drawn from a seed: anything a broker may go through, in any order."""

from __future__ import annotations

import random
from dataclasses import replace

from qmq_broker.errors import NoRoomError
from qmq_broker.options import StoreOptions
from qmq_client.wire.frame import MessageFrame
from tests.crash.recording_disk import UNLIMITED, RecordingDisk
from tests.crash.scenarios import Scenario, after_kill, next_life
from tests.crash.world import KEEPERS, OPTIONS, RETAINING, History, World

#: Segments so short that a few messages roll them, and few ids remembered, so that they may go.
TINY = replace(RETAINING, segment_bytes=1024, dedupe_ids=4, queue_flush_bytes=700)
#: The same on a disk with a reserve: below it the action log waits for no keeper.
RESERVED = replace(TINY, reserve_bytes=900)
PROFILES: tuple[StoreOptions, ...] = (OPTIONS, RETAINING, TINY, RESERVED)


def random_life(seed: int) -> Scenario:
    """Anything a broker may go through, drawn from `seed`."""

    def life(disk: RecordingDisk) -> World:
        rng = random.Random(seed)
        world = World(disk, history=History(options=rng.choice(PROFILES)))
        for _ in range(rng.randrange(3, 9)):
            world = rng.choices(_STEPS, weights=_WEIGHTS)[0](world, rng)
        return world

    life.__name__ = f"random_life_{seed}"
    return life


def _send(world: World, rng: random.Random) -> World:
    world.send(*(_frame(world, rng) for _ in range(rng.randrange(1, 4))))
    return world


def _append(world: World, rng: random.Random) -> World:
    world.append(_frame(world, rng))
    return world


def _send_again(world: World, rng: random.Random) -> World:
    # Only what the shortest window of ids still knows.
    frames = [one.frame for one in world.history.sent[-1:]]
    if frames:
        world.send(rng.choice(frames), _frame(world, rng))
    return world


def _act(world: World, rng: random.Random) -> World:
    world.act(rng.randrange(1, 5))
    if rng.random() < 0.5:
        world.sync_actions()
    return world


def _note_groups(world: World, rng: random.Random) -> World:
    world.act(rng.randrange(3))
    world.note_groups()
    return world


def _wait(world: World, rng: random.Random) -> World:
    world.sync()
    world.clock.pass_ms(rng.randrange(2_000))
    world.store.step()
    return world


def _give_up(world: World, rng: random.Random) -> World:
    for _ in range(rng.randint(1, 4)):
        world.send(_frame(world, rng), _frame(world, rng))
        world.clock.pass_ms(1_100)
        world.store.step()
    world.give_up()
    return world


def _keep(world: World, rng: random.Random) -> World:
    """A keeper comes, or has got further; it may not say what it said before."""
    world.sync()
    name = rng.choice(KEEPERS)
    known, actions = world.keeper(name), world.store.actions
    commit = kept_actions = 0
    if known is not None:  # what it has nothing of yet it tells as 0
        is_new = known.kept_offset == known.first_offset
        commit = 0 if is_new else known.kept_offset
        is_new = known.kept_actions_offset == known.first_actions_offset
        kept_actions = 0 if is_new else known.kept_actions_offset
    if rng.random() < 0.7:
        commit = rng.randint(commit, world.store.durable_offset)
    if rng.random() < 0.7:
        kept_actions = rng.randint(kept_actions, actions.log.durable_offset)
    world.keep(commit, kept_actions, name=name)
    return world


def _end_keeper(world: World, rng: random.Random) -> World:
    world.end_keeper(rng.choice(KEEPERS))
    return world


def _force(world: World, rng: random.Random) -> World:
    """A life in which retention waits for nobody, and another one in which it does again."""
    world = _end_life(world, rng, is_forced=True)
    for _ in range(rng.randint(1, 3)):
        world.act(rng.randrange(60))  # some segments of the action log
        world = rng.choice((_give_up, _note_groups, _keep))(world, rng)
    return _end_life(world, rng)


def _end_life(world: World, rng: random.Random, *, is_forced: bool = False) -> World:
    if rng.random() < 0.5:
        world.disk.unlock()
        return after_kill(world, is_forced=is_forced)
    world.sync()
    world.store.close()
    return next_life(world, world.disk, is_forced=is_forced)


def _fill_the_disk(world: World, rng: random.Random) -> World:
    """No room for a while; what does not fit is refused as a whole."""
    world.sync()
    disk = world.disk
    disk.capacity_bytes -= disk.free_bytes() - rng.randrange(1_500)
    for _ in range(2):
        try:
            world.send(_frame(world, rng))
            world.act()
            world.note_groups()
            _keep(world, rng)
        except NoRoomError:
            disk.capacity_bytes = UNLIMITED
    disk.capacity_bytes = UNLIMITED
    return world


def _stop(world: World, rng: random.Random) -> World:
    world.sync()
    world.store.close()
    return next_life(world, world.disk)


def _kill(world: World, rng: random.Random) -> World:
    world.disk.unlock()
    return after_kill(world)


_WEIGHTED = {
    _send: 6,
    _append: 4,
    _send_again: 1,
    _act: 3,
    _note_groups: 1,
    _wait: 3,
    _give_up: 2,
    _fill_the_disk: 1,
    _keep: 3,
    _end_keeper: 1,
    _force: 1,
    _stop: 1,
    _kill: 1,
}
_STEPS, _WEIGHTS = tuple(_WEIGHTED), tuple(_WEIGHTED.values())


def _frame(world: World, rng: random.Random) -> MessageFrame:
    subjects = rng.sample(["orders", "Orders", "invoices"], rng.randrange(1, 3))
    is_tiny = world.options.segment_bytes < OPTIONS.segment_bytes
    longest, most = (60, 3 // len(subjects)) if is_tiny else (rng.choice((5, 60, 180)), 3)
    return world.frame(
        **{
            subject: [rng.randrange(longest) for _ in range(rng.randint(1, most))]
            for subject in subjects
        }
    )
