"""Copies for long retries, damaged on the disk: their group waits for none of them in vain."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from qmq_broker.service.delivery.snapshot import decode_groups, encode_groups
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.upkeep.quarantine import quarantine_damage
from qmq_client.wire.requests import Nack, Settlement
from tests.broker.delay.long_retry_rig import DAY_MS, MONTH_MS, LongRetryRig
from tests.broker.delay.test_backup_and_damage import faults

#: Longer than a copy is waited for when all others have come.
WAITED_MS = 2 * 60_000
BAD = b"the damaged one"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[LongRetryRig]:
    made = LongRetryRig.forgetful(tmp_path)
    yield made
    made.close()


def spoil(rig: LongRetryRig, pattern: str) -> str:
    """Damage the last body of that message in these files; which of them that was."""
    for path in sorted(rig.directory.glob(pattern), reverse=True):
        data = bytearray(path.read_bytes())
        at = data.rfind(BAD)
        if at >= 0:
            data[at] ^= 1
            path.write_bytes(data)
            return str(path.relative_to(rig.directory))
    raise AssertionError(f"no file of {pattern} has it")


def copied(rig: LongRetryRig) -> None:
    """Let the copies come to the schedule log."""
    for _ in range(4):
        rig.store.step()
    assert list(rig.directory.glob("schedule/*/*"))


def test_D3_the_group_of_a_copy_that_is_damaged_gets_the_original_and_others_are_not_held(
    rig: LongRetryRig,
) -> None:
    rig.start_long_retries(b"whole", BAD)
    copied(rig)
    file = spoil(rig, "schedule/*/*")
    rig.close()
    assert ("damaged", file) in faults(rig.directory)
    rig.start()
    rig.pass_and_turn(MONTH_MS)
    status = rig.broker.delayed.query.status()
    assert (status.damaged, status.pending) == (1, 1)
    back = rig.pull()
    assert back.bodies == [b"whole"]
    rig.settle(back.ack())
    rig.pass_and_turn(WAITED_MS)
    original = rig.pull()
    assert (original.bodies, original.attempts, original.sequences) == ([BAD], [2], [1])
    rig.settle(original.ack())
    rig.restart()
    rig.release()
    rig.turn()
    assert (rig.state.long_retries.count, rig.state.unsettled, rig.state.lost_count) == (0, 0, 0)
    status = rig.broker.delayed.query.status()
    assert (status.damaged, status.pending) == (0, 0), "nobody waits for it any more"


def test_D3_without_copy_and_original_a_message_is_reported_as_lost_and_its_group_continues(
    rig: LongRetryRig,
) -> None:
    rig.start_long_retries(BAD)
    rig.let_segments_go()
    spoil(rig, "schedule/*/*")
    rig.restart()
    rig.pass_and_turn(MONTH_MS + WAITED_MS)
    rig.turn()
    assert rig.pull().bodies == []
    assert (rig.state.long_retries.count, rig.state.waiting, rig.state.lost_count) == (0, 0, 1)
    (status,) = rig.broker.query.groups()
    assert (status.lost, status.redelivery, status.long_retries) == (1, 0, 0)


def test_C7_the_key_of_a_message_lost_during_its_long_retry_continues(rig: LongRetryRig) -> None:
    rig.send(BAD, key="k")
    given = rig.pull(ordered=True)
    nack = Nack(range=given.part(0), delay_ms=MONTH_MS)
    rig.settle(Settlement(token=given.token, nacks=(nack,)))
    rig.turn()
    copied(rig)
    rig.let_segments_go(is_ordered=True)
    spoil(rig, "schedule/*/*")
    rig.restart()
    rig.send(b"next", key="k")
    assert rig.pull(ordered=True).bodies == []
    rig.pass_and_turn(MONTH_MS + WAITED_MS)
    rig.turn()
    assert rig.pull(ordered=True).bodies == [b"next"]
    assert rig.state.lost_count == 1


def test_D3_a_copy_that_is_damaged_after_its_release_is_made_up_for_by_the_original(
    rig: LongRetryRig,
) -> None:
    rig.start_long_retries(BAD)
    rig.clock.pass_ms(MONTH_MS)
    rig.release()
    spoil(rig, "commitlog/*")
    rig.turn()
    assert rig.state.long_retries.count == 1
    rig.pass_and_turn(WAITED_MS)
    assert (rig.pull().bodies, rig.state.long_retries.count) == ([BAD], 0)


def test_D3_a_copy_that_was_given_up_by_force_after_it_came_back_is_made_up_for_by_the_original(
    rig: LongRetryRig,
) -> None:
    rig.start_long_retries(BAD)
    rig.pass_and_turn(MONTH_MS)
    assert len(rig.state.long_retries.copies) == 1
    rig.close()
    spoil(rig, "commitlog/*")
    disk = OsDisk(str(rig.directory))
    quarantine_damage(disk, rig.clock)
    disk.close()
    rig.start()
    assert rig.pull().bodies == [BAD]


def test_D3_a_clock_that_was_set_back_over_a_stop_takes_no_copy_for_lost(rig: LongRetryRig) -> None:
    rig.start_long_retries(BAD)
    rig.let_segments_go()
    rig.close()
    rig.clock.wall_ms -= 5 * DAY_MS
    rig.start()
    for _ in range(8):
        rig.pass_and_turn(4 * DAY_MS)
    assert rig.state.lost_count == 0
    rig.pass_and_turn(4 * DAY_MS)
    back = rig.pull()
    assert (back.bodies, back.attempts, rig.state.lost_count) == ([BAD], [2], 0)


def test_D3_what_a_group_knows_of_its_copies_is_not_moved_with_a_clock_that_went_back(
    rig: LongRetryRig,
) -> None:
    rig.start_long_retries(BAD)
    snapshot = encode_groups([rig.state], rig.now_ms)
    (state,) = decode_groups(snapshot, rig.now_ms - 5 * DAY_MS)
    assert list(state.long_retries.runs.runs()) == list(rig.state.long_retries.runs.runs())
