"""Every crash state of every life opens, keeps what was acknowledged and goes on.

The least numbers of states stand in a table, so that a change that makes the enumeration blind is
found: together they are more than 20,000. A default run checks a sample of them, and with `--release`
each, and ten million by `campaign.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.crash.campaign import Campaign, crash_seeds
from tests.crash.enumeration import (
    SEED,
    Lived,
    Sample,
    crash_again,
    crash_everywhere,
    crash_in_recovery,
    quietly,
)
from tests.crash.recording_disk import RecordingDisk
from tests.crash.scenarios import (
    GIVING_UP,
    SCENARIOS,
    Scenario,
    actions_among_messages,
    appends_before_a_sync,
    checkpoints_and_flushes,
    first_start,
    keepers,
    keepers_by_force,
    kills,
    kills_among_recycled_segments,
    retention,
    retention_once,
    rolls,
)

CountStates: TypeAlias = Callable[[int], None]

#: Random lives, in portions that several test processes can share.
RANDOM_PORTIONS = 4
STATES_OF_A_PORTION = 4_720
#: Lives of the next seed, so that no portion reaches into another.
SEEDS_OF_A_PORTION = 1_000
#: Somewhat less than there are, so that they hold for other seeds too.
STATES_OF_A_SCENARIO = 100
STATES_OF_RECOVERIES = 2_500
STATES_OF_SECOND_LIVES = 1_000
#: In `test_backups.py`.
STATES_OF_BACKUPS = 2_000
assert (
    len(SCENARIOS) * STATES_OF_A_SCENARIO
    + RANDOM_PORTIONS * STATES_OF_A_PORTION
    + STATES_OF_RECOVERIES
    + STATES_OF_SECOND_LIVES
    + STATES_OF_BACKUPS
    > 20_000
)
STATES_BEFORE_A_RELEASE = 10_000_000
#: Where a run before a release keeps what is done, to go on there when it was interrupted.
JOURNAL = Path(os.environ.get("QMQ_CRASH_JOURNAL", ".cache/crash-states.jsonl"))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_B3_whatever_a_power_cut_leaves_every_acknowledged_message_is_there(
    scenario: Scenario, one_in: int, count_states: CountStates
) -> None:
    states = crash_everywhere(scenario, RecordingDisk(), one_in=one_in)
    count_states(states)
    assert states >= STATES_OF_A_SCENARIO


@pytest.mark.parametrize("portion", range(RANDOM_PORTIONS))
def test_B3_any_life_survives_a_power_cut_anywhere(
    portion: int, one_in: int, count_states: CountStates
) -> None:
    """Also during recovery, and after a second life: `campaign.crash_seed` takes turns."""
    first = (SEED * RANDOM_PORTIONS + portion) * SEEDS_OF_A_PORTION
    states, lives = crash_seeds(first, states=STATES_OF_A_PORTION, one_in=one_in)
    count_states(states)
    assert lives < SEEDS_OF_A_PORTION


#: Which crash states of a life are opened: every n-th, and in a default run every n-th of these.
RECOVERED: tuple[tuple[Scenario, int], ...] = (
    (first_start, 3),
    (rolls, 7),
    (appends_before_a_sync, 7),
    (checkpoints_and_flushes, 17),
    (actions_among_messages, 11),
    (kills, 11),
    (retention, 41),
    (keepers, 53),
    (keepers_by_force, 97),
    (kills_among_recycled_segments, 67),
)


def test_B3_a_power_cut_during_recovery_is_a_power_cut_like_any_other(
    one_in: int, sparser: int, count_states: CountStates
) -> None:
    states = sum(
        crash_in_recovery(scenario, RecordingDisk(), every=every * sparser, one_in=one_in)
        for scenario, every in RECOVERED
    )
    states += crash_in_recovery(
        retention_once, RecordingDisk(), every=sparser, last=GIVING_UP, one_in=one_in
    )
    count_states(states)
    assert states >= STATES_OF_RECOVERIES


#: In those behind keepers each tells again, and retention goes as far as all have come.
SECOND_LIVES: tuple[tuple[Scenario, int], ...] = (
    (appends_before_a_sync, 13),
    (rolls, 13),
    (kills, 23),
    (keepers, 71),
)


def test_B3_what_was_cut_never_comes_back_in_a_second_life(
    one_in: int, sparser: int, count_states: CountStates
) -> None:
    states = sum(
        crash_again(scenario, RecordingDisk(), every=every * sparser, one_in=one_in)
        for scenario, every in SECOND_LIVES
    )
    count_states(states)
    assert states >= STATES_OF_SECOND_LIVES


@pytest.mark.parametrize("seed", range(3))
def test_a_sample_has_one_of_each_so_many_in_turn(seed: int) -> None:
    sample = Sample(10, seed=seed)
    turns = [[sample.takes_next() for _ in range(10)] for _ in range(50)]
    assert all(sum(turn) == 1 for turn in turns)
    assert len({turn.index(True) for turn in turns}) > 5, "not always the same one"


def test_each_state_is_checked_where_no_sample_is_asked_for() -> None:
    with quietly():
        life = Lived(rolls, RecordingDisk())
        life.crash_everywhere()
    assert life.census.checked == len(life.census) > STATES_OF_A_SCENARIO


def test_second_lives_that_begin_after_the_same_operation_know_nothing_of_each_other() -> None:
    """What a second life adds to its history and takes out of it, no other one sees."""
    alone, together = (Lived(kills, RecordingDisk())._openings(1) for _ in range(2))
    for before, (known, _) in zip([known for known, _ in alone], together, strict=True):
        assert known == before
        known.sent.clear()
        known.told.clear()
        known.actions.clear()


@pytest.mark.timeout(0)
def test_B3_ten_million_crash_states(
    request: pytest.FixtureRequest, count_states: CountStates
) -> None:
    if not request.config.getoption("--release"):
        pytest.skip("only before a release")
    campaign = Campaign(JOURNAL, first_seed=10**9, workers=os.cpu_count() or 1)
    campaign.run(STATES_BEFORE_A_RELEASE)
    count_states(campaign.tally.states)
    assert campaign.tally.states >= STATES_BEFORE_A_RELEASE
