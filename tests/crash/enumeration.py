"""Crashing a life at every operation, and recovery at every operation of its own.

`QMQ_CRASH_SEED` chooses other random fates and lives; it is printed with every failure.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace

from qmq_broker.storage.store import Store
from qmq_client.wire.frame import MessageFrame
from qmq_client.wire.message_id import MessageIds
from tests.crash.power_cut import cut_states
from tests.crash.recording_disk import Image, RecordingDisk, images
from tests.crash.scenarios import Scenario
from tests.crash.world import (
    BrokenPromiseError,
    FakeClock,
    History,
    Sent,
    World,
    check,
    check_messages,
    make_frame,
    replayed,
)

SEED = int(os.environ.get("QMQ_CRASH_SEED", "1"))
#: Random fates at each operation, beside the regular ones.
SCATTERED = 6


def crash_everywhere(scenario: Scenario, disk: RecordingDisk, *, seed: int = SEED) -> int:
    """Check every crash state of a life; returns how many there were."""
    rng = random.Random(seed)
    history = scenario(disk).history
    states = 0
    for count, image in images(disk.first_image, disk.operations):
        for state in cut_states(image, rng, scattered=SCATTERED):
            states += 1
            _check(state, history, count, f"{scenario.__name__}, seed {seed}")
    return states


def crash_in_recovery(
    scenario: Scenario, disk: RecordingDisk, *, seed: int = SEED, every: int
) -> int:
    """Check every crash state of the openings after a sample of a life's crash states."""
    rng = random.Random(seed)
    history = scenario(disk).history
    states = 0
    for count, image in images(disk.first_image, disk.operations):
        for number, state in enumerate(_openings(image, rng)):
            if (count + number) % every:
                continue
            where = f"{scenario.__name__}, seed {seed}, opening after state {number} of {count}"
            states += _crash_one_recovery(state, history.up_to(count), rng, where)
    return states


def crash_again(scenario: Scenario, disk: RecordingDisk, *, seed: int = SEED, every: int) -> int:
    """Check crash states of second lives, which begin after a sample of a life's crash states.

    The second life sends frames of the lengths that the first one had, so that what was cut would
    stand at the right places if it were still there.
    """
    rng = random.Random(seed)
    history = scenario(disk).history
    states = 0
    for count, image in images(disk.first_image, disk.operations):
        for number, state in enumerate(_openings(image, rng)):
            if (count + number) % every:
                continue
            where = f"{scenario.__name__}, seed {seed}, second life after state {number} of {count}"
            states += _crash_second_life(state, history.up_to(count), rng, where)
    return states


def _crash_second_life(state: Image, known: History, rng: random.Random, where: str) -> int:
    second = RecordingDisk(state)
    world = World(second, history=known, ids=MessageIds(8))
    finished = len(second.operations)
    lost = _keep_survivors(world, finished)
    for one in lost:
        world.send(_twin(world, one))
    for length in (900, 700, 1500):
        world.send(world.frame(orders=length))
    world.disk.unlock()
    states = 0
    for count, image in images(second.first_image, second.operations):
        if count > finished and rng.random() < 0.5:
            for cut in cut_states(image, rng, scattered=1):
                states += 1
                _check(cut, known, count, where)
    return states


def _keep_survivors(world: World, finished: int) -> list[Sent]:
    """Let the history hold what the opening shows, as acknowledged; returns what is gone."""
    known = world.history
    survivors = check_messages(world.store, known.sent)
    lost = known.sent[survivors:]
    del known.sent[survivors:]
    for one in known.sent:
        one.acknowledged_at = one.submitted_at
    noted, rest = replayed(world.store)
    del known.actions[noted + len(rest) :]
    known.synced_actions.append((len(known.actions), finished))
    return lost


def _twin(world: World, one: Sent) -> MessageFrame:
    """Another frame with the same lengths."""
    lengths = iter(one.frame.lengths)
    fixed_bytes = len(make_frame(MessageIds(1), {"a": 0}).record(0))
    return world.frame(
        **{
            run.subject: [next(lengths) - fixed_bytes for _ in range(run.count)]
            for run in one.frame.runs
        }
    )


def _openings(image: Image, rng: random.Random) -> Iterator[Image]:
    """What an opening may begin with: after a power cut, or after a kill with the power on."""
    yield from cut_states(image, rng, scattered=3)
    yield image.copy()


def _crash_one_recovery(state: Image, known: History, rng: random.Random, where: str) -> int:
    second = RecordingDisk(state)
    store = Store.open(second, FakeClock(), known.options)
    finished = len(second.operations)
    survivors = check_messages(store, known.sent)
    # What the opening shows may have been seen: from then on it is as good as acknowledged.
    sent = [
        replace(one, acknowledged_at=finished)
        if number < survivors and one.acknowledged_at is None
        else one
        for number, one in enumerate(known.sent)
    ]
    history = replace(known, sent=sent, epochs=[*known.epochs, (store.epoch, finished)])
    states = 0
    for count, image in images(second.first_image, second.operations):
        for cut in cut_states(image, rng, scattered=2):
            states += 1
            _check(cut, history, count, where)
    return states


def _check(state: Image, history: History, count: int, where: str) -> None:
    try:
        check(state, history, count)
    except BrokenPromiseError as error:
        raise BrokenPromiseError(f"{where}, {count} operations: {error}") from error
