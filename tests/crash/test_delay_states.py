"""D1, D3 and D4 in every crash state: copies, loads, releases, dispatches, cancellations, cleaning."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from qmq_broker.storage.files.background import Work, at_once
from qmq_broker.storage.schedule import copy
from qmq_broker.storage.schedule.copy import ScheduleCopier
from qmq_broker.storage.schedule.files import ScheduleFiles
from qmq_broker.storage.schedule.schedule import Schedule
from qmq_broker.storage.schedule.states import DelayedState, DelayedStates
from qmq_broker.storage.store import Store
from qmq_client.wire.errors import QmqError
from tests.crash.delay_world import OPTIONS as DELAY_OPTIONS
from tests.crash.delay_world import START_MS, DelayLife, check_delayed
from tests.crash.enumeration import CHECKED, SEED, Census, Sample, quietly
from tests.crash.image import Image
from tests.crash.power_cut import cut_states
from tests.crash.recording_disk import RecordingDisk, images
from tests.crash.world import BrokenPromiseError
from tests.kit.clock import FakeClock

Scenario = Callable[[DelayLife], None]


def waits_and_comes(life: DelayLife) -> None:
    """Sent, released in several turns."""
    life.send(1, 2, 7)
    life.send(3, body_bytes=200)
    for _ in range(8):
        life.pass_minutes(1)


def copies(life: DelayLife) -> None:
    """Enough log for several copies, into several buckets, while messages are released."""
    for round_ in range(5):
        life.send(1, 4, 9, 30, body_bytes=120)
        life.pass_minutes(1.5 if round_ % 2 else 0)
    life.pass_minutes(8)


def copies_in_background(life: DelayLife) -> None:
    """The same, one message after the other, while the disk takes its time for each sync of a copy."""
    waiting: list[Work] = []
    life.store.schedule.background.start = waiting.append
    with pytest.MonkeyPatch.context() as small:
        small.setattr(copy, "PART_MESSAGES_MAX", 1)
        for round_ in range(7):
            life.send(1, 4, 4, 30, body_bytes=120)
            life.pass_minutes(1.5 if round_ % 2 else 0)
            while waiting and round_ % 3:
                waiting.pop()()
                life.store.step()
    assert life.store.schedule.copied_offset > 0
    while waiting:
        waiting.pop()()
    life.kill()
    life.pass_minutes(8)


def cancellations(life: DelayLife) -> None:
    """Taken back before and after a copy; one of them put off first."""
    bodies = life.send(5, 6, 7, 20)
    life.cancel(bodies[0])
    life.move(bodies[1], 12)
    life.send(40, 50, body_bytes=700)
    life.send(41, 51, body_bytes=700)
    life.pass_minutes(1)
    life.cancel(bodies[3])
    life.cancel(bodies[1])
    life.move(bodies[2], 15)
    life.pass_minutes(20)


def cleaning(life: DelayLife) -> None:
    """Buckets that are done with lose their files, beside the writer, while others go on."""
    waiting: list[Work] = []
    life.store.schedule.background.start = waiting.append
    for round_ in range(6):
        life.send(0.5, 3, 9, body_bytes=300)
        life.pass_minutes(6)
        while waiting and round_ % 2:
            waiting.pop()()
            life.store.step()
    life.store.schedule.background.start = at_once
    while waiting:
        waiting.pop()()
    life.pass_minutes(20)
    life.send(1, body_bytes=900)
    life.pass_minutes(2)


def retention(life: DelayLife) -> None:
    """The commit log's segments go; what waits is in the schedule logs."""
    life.send(200, 201, 202, body_bytes=60)
    for round_ in range(7):
        life.send(1, 100 + round_, body_bytes=400)
        life.pass_minutes(2)
        if round_ % 2:
            life.give_up()
    assert life.store.first_offset > 0
    life.pass_minutes(220)


def kills(life: DelayLife) -> None:
    """Killed with the power on, again and again, and stopped in order once."""
    for round_ in range(4):
        bodies = life.send(1, 3, 8, body_bytes=150)
        life.kill()
        life.pass_minutes(2)
        life.cancel(bodies[2])
        if round_ == 2:
            life.stop()
        else:
            life.kill()
    life.pass_minutes(10)


def everything_due_at_once(life: DelayLife) -> None:
    """More messages at one moment than are held in memory."""
    life.send(*[5] * 25, body_bytes=10)
    life.pass_minutes(5)


SCENARIOS: tuple[Scenario, ...] = (
    waits_and_comes,
    copies,
    copies_in_background,
    cancellations,
    cleaning,
    retention,
    kills,
    everything_due_at_once,
)
#: Somewhat less than there are; a change that makes the enumeration blind is found.
STATES_MIN = 120
#: A default run checks one in so many of rare outcomes, of which there are many in these lives.
RARE_CHECKED = 4


def enumerate_life(scenario: Scenario, *, one_in: int) -> int:
    """Check the crash states of a life, or a sample; how many different ones there were."""
    rng = random.Random(SEED)
    life = DelayLife(RecordingDisk())
    scenario(life)
    rare_one_in = min(one_in, RARE_CHECKED)
    census = Census(scenario.__name__, one_in=one_in, rare_one_in=rare_one_in)
    with quietly():
        for count, image in images(life.disk.first_image, life.disk.operations):
            answered = sum(_answers(life, count))
            for state in census.drawn_cuts(image, (answered,), rng, scattered=2):
                _check(state, life, count, f"{census.where}, {count} operations")
    return len(census)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_D1_D3_D4_hold_whatever_a_power_cut_leaves(scenario: Scenario, one_in: int) -> None:
    states = enumerate_life(scenario, one_in=one_in)
    print(f"{states} crash states, seed {SEED}")
    assert states >= STATES_MIN


#: Every n-th crash state of a life is opened, and of each of these openings every m-th again.
OPENED, OPENED_BEFORE_A_RELEASE, OPENED_AGAIN = 185, 37, 11
#: Of what these leave, a default run checks one in so many.
RECOVERED_CHECKED = 4
#: Together, somewhat less than there are.
RECOVERY_STATES_MIN = 80


@pytest.mark.parametrize("scenario", [copies, cancellations, retention, kills])
def test_D1_D3_D4_hold_when_the_power_goes_while_the_schedule_is_recovered(
    scenario: Scenario, request: pytest.FixtureRequest
) -> None:
    """And when it goes once more while that is recovered."""
    is_release = request.config.getoption("--release")
    every = OPENED_BEFORE_A_RELEASE if is_release else OPENED
    sample = Sample(1 if is_release else RECOVERED_CHECKED)
    rng = random.Random(SEED)
    life = DelayLife(RecordingDisk())
    scenario(life)
    states = number = 0
    with quietly():
        for count, image in images(life.disk.first_image, life.disk.operations):
            for state in [*cut_states(image, rng, scattered=1), image.copy()]:
                number += 1
                if number % every == 0:
                    where = f"{scenario.__name__}, {count} operations"
                    states += _crash_openings(state, life, count, rng, where, sample)
    print(f"{states} crash states of openings, seed {SEED}")
    assert states >= RECOVERY_STATES_MIN


def _crash_openings(
    state: Image, life: DelayLife, count: int, rng: random.Random, where: str, sample: Sample
) -> int:
    """Crash at every operation of an opening, and somewhere in some openings after that."""
    states = 0
    opening = _opened(state)
    for step, image in images(opening.first_image, opening.operations):
        for cut in cut_states(image, rng, scattered=1):
            states += 1
            if states % OPENED_AGAIN == 0:
                for deeper in _cuts_of_another(cut.copy(), rng):
                    states += 1
                    if sample.takes_next():
                        _check(deeper, life, count, f"{where}, opened twice")
            if sample.takes_next():
                _check(cut, life, count, f"{where}, opened, {step} operations")
    return states


def _cuts_of_another(state: Image, rng: random.Random) -> list[Image]:
    """What a power cut at one moment of the opening after this state may leave."""
    opening = _opened(state)
    last = rng.randrange(len(opening.operations))
    for step, image in images(opening.first_image, opening.operations):
        if step == last:
            return list(cut_states(image, rng, scattered=1))
    raise AssertionError("the step is one of them")


def _opened(state: Image) -> RecordingDisk:
    """The operations of one opening."""
    disk = RecordingDisk(state)
    clock = FakeClock()
    clock.wall_ms = START_MS
    Store.open(disk, clock, DELAY_OPTIONS)
    return disk


def _check(state: Image, life: DelayLife, count: int, where: str) -> None:
    try:
        check_delayed(state, life, count)
    except BrokenPromiseError as error:
        raise BrokenPromiseError(f"{where}, seed {SEED}: {error}") from error


def _answers(life: DelayLife, count: int) -> list[int]:
    """How much the callers had been told by then."""
    return [
        sum(
            at is not None and at <= count
            for at in (note.submitted_at, note.accepted_at, note.cancelling_at, note.cancelled_at)
        )
        for note in life.notes.values()
    ]


#: Mistakes that one could make, each found by the enumeration of one life.
PLANTED: dict[str, tuple[Scenario, Callable[[pytest.MonkeyPatch], None]]] = {}


def planted(scenario: Scenario) -> Callable[[Callable[[pytest.MonkeyPatch], None]], None]:
    """Name a mistake, and the life that shows it."""

    def note(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
        PLANTED[plant.__name__] = (scenario, plant)

    return note


@planted(copies)
def the_table_is_written_before_the_files(patch: pytest.MonkeyPatch) -> None:
    real, sync = ScheduleCopier._save, ScheduleFiles.sync

    def save(self: ScheduleCopier, all_of_it: Any) -> None:
        with pytest.MonkeyPatch.context() as without:
            without.setattr(ScheduleFiles, "sync", lambda _: None)
            real(self, all_of_it)
        sync(self._schedule.files)

    patch.setattr(ScheduleCopier, "_save", save)


@planted(copies_in_background)
def files_say_that_parts_are_durable_that_are_not(patch: pytest.MonkeyPatch) -> None:
    def append(
        self: ScheduleFiles, log: str, bucket: int, position: int, *rest: Any, **more: Any
    ) -> int:
        self._unsynced[log, bucket] = position
        return real(self, log, bucket, position, *rest, **more)

    real = ScheduleFiles.append
    patch.setattr(ScheduleFiles, "append", append)


@planted(waits_and_comes)
def a_release_is_not_marked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Schedule, "_release", lambda *_: None)


@planted(cancellations)
def the_writer_does_not_look_at_states(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Schedule, "state", lambda *_: DelayedState.PENDING)
    patch.setattr(Schedule, "unsettled", lambda _, frame, __: frame)
    patch.setattr(DelayedStates, "get", lambda *_: DelayedState.PENDING)


@planted(copies)
def the_journal_says_that_all_is_copied(patch: pytest.MonkeyPatch) -> None:
    told = property(lambda self: self._schedule.visible_offset)
    patch.setattr(ScheduleCopier, "quiet_offset", told)


@planted(retention)
def retention_does_not_wait_for_the_copy(patch: pytest.MonkeyPatch) -> None:
    def step(self: ScheduleCopier, _: object) -> bool:
        self._schedule.copied_offset = self._schedule.visible_offset
        return False

    patch.setattr(ScheduleCopier, "step", step)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, plant = PLANTED[name]
    plant(monkeypatch)
    with pytest.raises((BrokenPromiseError, AssertionError, QmqError)):
        enumerate_life(scenario, one_in=CHECKED)
