"""Crashing a life at every operation, and recovery at every operation of its own.

`QMQ_CRASH_SEED` chooses other random outcomes and lives; it is printed with every failure. A state is
counted once: the same files with the same knowledge of what must be in them are the same state.

Every state is counted. A default run opens all states of rare outcomes and one in `CHECKED` of the others,
drawn by the seed. With `--release` each is opened.
"""

from __future__ import annotations

import gc
import logging
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from qmq_broker.storage.store import Store
from qmq_client.wire.frame import MessageFrame
from qmq_client.wire.message_id import MessageIds
from tests.crash.power_cut import cut_states
from tests.crash.promises import check, check_messages, replayed
from tests.crash.recording_disk import CutOutcome, Image, RecordingDisk, images
from tests.crash.scenarios import Scenario
from tests.crash.world import KEEPERS, BrokenPromiseError, History, Sent, Told, World, make_frame
from tests.kit.clock import FakeClock

SEED = int(os.environ.get("QMQ_CRASH_SEED", "1"))
#: Random outcomes at each operation, beside the regular ones.
SCATTERED = 8
#: By default one in so many states is opened and held to every promise; with `--release` each.
CHECKED = 10
#: Every n-th of them is also sent new messages and repeats; all others are read in full.
GOING_ON = 3


class Sample:
    """One in so many: one of each so many in turn, drawn by the seed."""

    def __init__(self, one_in: int, *, seed: int = SEED) -> None:
        self._one_in = one_in
        self._rng = random.Random(seed)
        self._seen = self._drawn = 0

    def takes_next(self) -> bool:
        """Whether the next one is in the sample."""
        place = self._seen % self._one_in
        if place == 0:
            self._drawn = self._rng.randrange(self._one_in)
        self._seen += 1
        return place == self._drawn


class Census:
    """Crash states, each once: the same state with the same knowledge is no other one."""

    def __init__(
        self, where: str, *, seed: int = SEED, one_in: int = 1, rare_one_in: int = 1
    ) -> None:
        """Check a sample of them: of rare outcomes, and of the others, one in so many."""
        self.where = where
        #: How many of them were checked.
        self.checked = 0
        self._rare = Sample(rare_one_in, seed=seed)
        self._others = Sample(one_in, seed=seed)
        #: How often a state was reached, seen before or not.
        self.reached = 0
        self._seen: set[tuple[int, tuple[int, ...]]] = set()

    def __len__(self) -> int:
        """Different states so far."""
        return len(self._seen)

    def check_cuts(
        self, image: Image, known: History, rng: random.Random, count: int, *, scattered: int
    ) -> None:
        """Hold what a power cut after `count` operations may leave to every promise."""
        for state in self.drawn_cuts(image, known.mark(), rng, scattered=scattered):
            self.checked += 1
            try:
                check(state, known, goes_on=self.checked % GOING_ON == 0)
            except BrokenPromiseError as error:
                where = f"{self.where}, {count} operations"
                raise BrokenPromiseError(f"{where}: {error}") from error

    def new_cuts(
        self, image: Image, known: History, rng: random.Random, *, scattered: int
    ) -> Iterator[Image]:
        """What a power cut may leave and was not seen before with this knowledge."""
        mark = known.mark()
        return cut_states(
            image,
            rng,
            scattered=scattered,
            is_wanted=lambda signature, _: self._add((signature, mark)),
        )

    def drawn_cuts(
        self, image: Image, mark: tuple[int, ...], rng: random.Random, *, scattered: int
    ) -> Iterator[Image]:
        """Those that are to be checked; equal marks are equal knowledge."""
        return cut_states(
            image,
            rng,
            scattered=scattered,
            is_wanted=lambda signature, outcome: (
                self._add((signature, mark)) and self._draws(outcome)
            ),
        )

    def _draws(self, outcome: CutOutcome) -> bool:
        return (self._rare if outcome.is_rare else self._others).takes_next()

    def is_new(self, state: Image, known: History) -> bool:
        """Whether this state comes with this knowledge for the first time."""
        return self._add((state.signature(), known.mark()))

    def _add(self, key: tuple[int, tuple[int, ...]]) -> bool:
        before = len(self._seen)
        self.reached += 1
        self._seen.add(key)
        return len(self._seen) > before


@contextmanager
def quietly() -> Iterator[None]:
    """Many thousand openings: without log lines, and without looking for cycles in what is short-lived."""
    logging.disable(logging.ERROR)
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()  # for good, as tests/conftest.py does with what is there to stay
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        logging.disable(logging.NOTSET)


class Lived:
    """A life that was led on a recording disk, and the crash states of it that were checked."""

    def __init__(
        self, scenario: Scenario, disk: RecordingDisk, *, seed: int = SEED, one_in: int = 1
    ) -> None:
        self.disk = disk
        self.history = scenario(disk).history
        self.rng = random.Random(seed)
        self.census = Census(f"{scenario.__name__}, seed {seed}", seed=seed, one_in=one_in)

    def crash_everywhere(self, *, first: int = 0) -> None:
        """Check every crash state of the life from its `first` operation on."""
        for count, image in images(self.disk.first_image, self.disk.operations):
            if count >= first:
                known = self.history.up_to(count)
                self.census.check_cuts(image, known, self.rng, count, scattered=SCATTERED)

    def crash_in_recovery(self, *, every: int, first: int = 0) -> None:
        """Check every crash state of the openings after a sample of those from `first` on."""
        for known, state in self._openings(every, first):
            _crash_one_recovery(state, known, self.rng, self.census)

    def crash_again(self, *, every: int) -> None:
        """Check crash states of second lives, which begin after a sample of the life's crash states.

        The second life sends frames of the lengths that the first one had, so that what was cut
        would stand at the right places if it were still there.
        """
        for known, state in self._openings(every):
            _crash_second_life(state, known, self.rng, self.census)

    def _openings(self, every: int, first: int = 0) -> Iterator[tuple[History, Image]]:
        """What openings may begin with, each once: after a power cut, or a kill with power on.

        The history that comes with each is the taker's own: a second life goes on writing in it.
        """
        seen = Census(self.census.where)
        number = 0
        for count, image in images(self.disk.first_image, self.disk.operations):
            if count < first:
                continue
            known = self.history.up_to(count)
            states = [*seen.new_cuts(image, known, self.rng, scattered=3)]
            if seen.is_new(image, known):
                states.append(image.copy())
            for n, state in enumerate(states, number):
                if n % every == 0:
                    yield self.history.up_to(count), state
            number += len(states)


def crash_everywhere(
    scenario: Scenario, disk: RecordingDisk, *, seed: int = SEED, one_in: int = 1
) -> int:
    """Check the crash states of a life, or a sample; returns how many different ones there were."""
    with quietly():
        life = Lived(scenario, disk, seed=seed, one_in=one_in)
        life.crash_everywhere()
    return len(life.census)


def crash_in_recovery(
    scenario: Scenario,
    disk: RecordingDisk,
    *,
    every: int,
    last: int | None = None,
    seed: int = SEED,
    one_in: int = 1,
) -> int:
    """The same for the openings after every n-th crash state of a life, or of its last operations."""
    with quietly():
        life = Lived(scenario, disk, seed=seed, one_in=one_in)
        first = 0 if last is None else len(disk.operations) - last
        life.crash_in_recovery(every=every, first=first)
    return len(life.census)


def crash_again(
    scenario: Scenario, disk: RecordingDisk, *, seed: int = SEED, every: int, one_in: int = 1
) -> int:
    """The same for second lives after every n-th crash state of a life."""
    with quietly():
        life = Lived(scenario, disk, seed=seed, one_in=one_in)
        life.crash_again(every=every)
    return len(life.census)


def _crash_second_life(state: Image, known: History, rng: random.Random, census: Census) -> None:
    second = RecordingDisk(state)
    world = World(second, history=known, ids=MessageIds(8))
    finished = len(second.operations)
    lost = _keep_survivors(world, finished)
    for one in lost:
        world.send(_twin(world, one))
    for part in (0.44, 0.34, 0.73):
        world.send(world.frame(orders=round(part * known.options.segment_bytes)))
    for told in list(known.told):
        if told.keeper is not None:
            world.keep(world.store.durable_offset, told.keeper.kept_actions_offset, name=told.name)
            world.give_up()
    world.disk.unlock()
    for count, image in images(second.first_image, second.operations):
        if count > finished and rng.random() < 0.5:
            census.check_cuts(image, known.up_to(count), rng, count, scattered=1)


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
    known.told = _told_by(world.store, finished)
    return lost


def _told_by(store: Store, finished: int) -> list[Told]:
    """What the opening shows of keepers, as answered."""
    found = {keeper.name: keeper for keeper in store.keepers.all}
    return [
        Told(name=name, keeper=found.get(name), submitted_at=0, acknowledged_at=finished)
        for name in KEEPERS
    ]


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


def _crash_one_recovery(state: Image, known: History, rng: random.Random, census: Census) -> None:
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
    history = replace(
        known,
        sent=sent,
        epochs=[*known.epochs, (store.epoch, finished)],
        told=[*known.told, *_told_by(store, finished)],
    )
    for count, image in images(second.first_image, second.operations):
        census.check_cuts(image, history.up_to(count), rng, count, scattered=2)
