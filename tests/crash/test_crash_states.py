"""Every crash state of every life opens, keeps what was acknowledged and goes on.

The least numbers of states stand in a table, so that a change that makes the enumeration blind is
found: together they are more than 20,000.
"""

from __future__ import annotations

import pytest

from tests.crash.enumeration import SEED, crash_again, crash_everywhere, crash_in_recovery
from tests.crash.recording_disk import RecordingDisk
from tests.crash.scenarios import (
    SCENARIOS,
    Scenario,
    actions_among_messages,
    appends_before_a_sync,
    checkpoints_and_flushes,
    first_start,
    kills,
    kills_among_recycled_segments,
    random_life,
    retention,
    rolls,
)

#: Random lives, in portions that several test processes can share.
RANDOM_PORTIONS = 11
LIVES_PER_PORTION = 5
#: Somewhat less than there are, so that they hold for other seeds too.
STATES_OF_SCENARIOS = 2_500
STATES_OF_A_PORTION = 1_000
STATES_OF_RECOVERIES = 5_400
STATES_OF_SECOND_LIVES = 2_000
assert (
    STATES_OF_SCENARIOS
    + RANDOM_PORTIONS * STATES_OF_A_PORTION
    + STATES_OF_RECOVERIES
    + STATES_OF_SECOND_LIVES
    > 20_000
)


def test_B3_whatever_a_power_cut_leaves_every_acknowledged_message_is_there() -> None:
    states = sum(crash_everywhere(scenario, RecordingDisk()) for scenario in SCENARIOS)
    print(f"{states} crash states, seed {SEED}")
    assert states >= STATES_OF_SCENARIOS


@pytest.mark.parametrize("portion", range(RANDOM_PORTIONS))
def test_B3_any_life_survives_a_power_cut_anywhere(portion: int) -> None:
    first = SEED * 1_000 + portion * LIVES_PER_PORTION
    lives = [random_life(seed) for seed in range(first, first + LIVES_PER_PORTION)]
    states = sum(crash_everywhere(life, RecordingDisk()) for life in lives)
    print(f"{states} crash states, seed {SEED}")
    assert states >= STATES_OF_A_PORTION


#: Which crash states of a life are opened: every n-th.
RECOVERED: tuple[tuple[Scenario, int], ...] = (
    (first_start, 3),
    (rolls, 7),
    (appends_before_a_sync, 7),
    (checkpoints_and_flushes, 17),
    (actions_among_messages, 11),
    (kills, 11),
    (retention, 41),
    (kills_among_recycled_segments, 67),
)


def test_B3_a_power_cut_during_recovery_is_a_power_cut_like_any_other() -> None:
    states = sum(
        crash_in_recovery(scenario, RecordingDisk(), every=every) for scenario, every in RECOVERED
    )
    print(f"{states} crash states, seed {SEED}")
    assert states >= STATES_OF_RECOVERIES


def test_B3_what_was_cut_never_comes_back_in_a_second_life() -> None:
    states = sum(
        crash_again(scenario, RecordingDisk(), every=every)
        for scenario, every in ((appends_before_a_sync, 13), (rolls, 13), (kills, 23))
    )
    print(f"{states} crash states, seed {SEED}")
    assert states >= STATES_OF_SECOND_LIVES
