"""The broker's disk in the played world: a sync takes time, and the machine may die at any call.

It is the disk of the crash tests, without its memory of operations. What a power cut leaves is drawn
as there (`tests/crash/power_cut.py`): sectors and names that were not synced each have a fate.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tests.crash.image import Image, Moment
from tests.crash.power_cut import Kept, Lost, Scattered, Torn
from tests.crash.recording_disk import Operation, PassingDisk
from tests.simulation.scheduler import Died, Process, Scheduler

#: The longest sync of a quick disk, and of a slow one.
SYNC_US: Final = 2_000
SLOW_SYNC_US: Final = 400_000


class PlayedDisk(PassingDisk):
    """The disk for one life of the broker."""

    def __init__(self, image: Image, scheduler: Scheduler, process: Process) -> None:
        super().__init__(image)
        self._scheduler = scheduler
        self._process = process
        #: Calls until the machine dies; None for never.
        self.calls_left: int | None = None
        #: Above 0 a lock may be held, and nobody may give his turn back.
        self._holds = 0
        #: The longest time that a sync takes.
        self.sync_us = SYNC_US
        #: Never more room than this is told of; None for all there is.
        self.room_bytes_max: int | None = None

    @contextmanager
    def hold(self) -> Iterator[None]:
        """While this lasts a sync takes no time: whoever waits would hold a lock."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1

    def free_bytes(self) -> int:
        """See `Disk.free_bytes`."""
        free_bytes = super().free_bytes()
        return free_bytes if self.room_bytes_max is None else min(free_bytes, self.room_bytes_max)

    def used_bytes(self) -> int:
        """Of all files."""
        image = self.image
        return sum(len(image.inodes[one].seen) for one in image.names.values() if one is not None)

    def perform(self, call: str, path: str, operation: Operation) -> None:
        """One change of the disk."""
        if self._process.is_dead:
            raise Died
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left <= 0:
                self._process.die()
        if call == "sync" and not self._holds and self._scheduler.is_in_strand:
            self._process.sleep(self._scheduler.rng.randrange(self.sync_us), f"syncs {path}")
        super().perform(call, path, operation)


def after_kill(image: Image) -> Image:
    """A killed process: all it did stays, synced or not."""
    return image


def after_power_cut(image: Image, rng: random.Random) -> Image:
    """A machine without power: what was not synced has a fate."""
    fate = rng.choice((Lost(), Kept(), Scattered(rng), Scattered(rng), Torn(rng.randrange(1, 4))))
    return Moment(image).after_cut(fate).image()
