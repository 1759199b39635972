"""What was withdrawn stays out, whatever a power cut leaves after the answer."""

from __future__ import annotations

import random
from collections.abc import Callable

from qmq_broker.storage.store import Store
from qmq_client.wire.message_id import MessageIds
from tests.crash.enumeration import SEED, Census, quietly
from tests.crash.recording_disk import Image, PassingDisk, RecordingDisk, images
from tests.crash.world import OPTIONS, World, make_frame
from tests.kit.clock import FakeClock

STATES = 500


def late_sends(store: Store) -> int:
    """How many of the withdrawn messages are taken for known when they arrive after all."""
    (placed,) = store.append([make_frame(MessageIds(77), {"orders": [3, 4]})])
    return placed.duplicates


def test_D4_what_was_withdrawn_stays_out_whatever_a_power_cut_leaves(
    one_in: int, count_states: Callable[[int], None]
) -> None:
    disk, ids = RecordingDisk(), MessageIds(77)
    world = World(disk)
    world.send(world.frame(orders=30))
    world.store.cancel([], {"orders": [ids.next_id(), ids.next_id()]})
    answered = len(disk.operations)
    for _ in range(9):  # some segments, checkpoints, and ids in their journal
        world.send(world.frame(orders=[100, 100]))
        world.clock.pass_ms(1_000)
        world.store.step()
    world.store.close()
    rng, census = random.Random(SEED), Census("withdrawn", one_in=one_in)
    with quietly():
        for count, image in images(disk.first_image, disk.operations):
            if count < answered:
                continue
            for state in census.drawn_cuts(image, (), rng, scattered=8):
                assert late_sends(opened(state)) == 2, f"{count} operations, seed {SEED}"
    count_states(len(census))
    assert len(census) >= STATES


def opened(state: Image) -> Store:
    return Store.open(PassingDisk(state), FakeClock(), OPTIONS)
