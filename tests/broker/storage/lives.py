"""The next life of a store."""

from __future__ import annotations

from qmq_broker.storage.store import Store
from tests.crash.recording_disk import RecordingDisk
from tests.crash.world import World
from tests.kit.clock import FakeClock


def restarted(world: World) -> Store:
    """Open again what a killed store left; the power stayed on."""
    world.disk.unlock()
    return Store.open(RecordingDisk(world.disk.image), FakeClock(), world.options)
