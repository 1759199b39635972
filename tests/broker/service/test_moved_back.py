"""A group that a start moves back, because messages it knew are gone, stays there: for the next start, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from qmq_broker.storage.files import layout
from qmq_client.group.actions import BroughtBack, MovedBack, SetAside
from qmq_client.wire.frame import FRAME_HEADER_BYTES
from tests.broker.service.rig import GROUP, SUBJECT, Rig


def tear_last_frame(rig: Rig, offset: int) -> None:
    """Kill the broker and damage its last commit, which a start then takes for a torn write."""
    rig.kill()
    path = rig.directory / layout.segment_path(layout.COMMIT_LOG, 0)
    content = bytearray(path.read_bytes())
    content[offset + FRAME_HEADER_BYTES + 50] ^= 1
    path.write_bytes(content)
    (rig.directory / layout.SCHEDULE_TABLE).unlink(missing_ok=True)


def moved_back(rig: Rig) -> list[MovedBack]:
    return [one for one in rig.store.actions.replay() if isinstance(one, MovedBack)]


@pytest.mark.parametrize("is_killed", [True, False])
@pytest.mark.parametrize("is_ordered", [True, False])
def test_C12_messages_stored_after_a_torn_tail_are_delivered_after_any_number_of_starts(
    rig: Rig, is_killed: bool, is_ordered: bool
) -> None:
    """Else the acks of what was lost counted for what got its sequences."""
    rig.send(b"kept", key="a")
    last = rig.send(b"lost 1", b"lost 2", key="a")
    for _ in range(3):
        rig.settle(rig.pull(max_messages=1, ordered=is_ordered).ack())
    rig.store.actions.sync()
    tear_last_frame(rig, last.physical_offset)
    rig.start()
    assert rig.store.recovery.torn_bytes
    rig.send(b"new 1", b"new 2", key="a")
    for _ in range(2):
        if is_killed:
            rig.kill()
            rig.start()
        else:
            rig.restart()
        (status,) = rig.broker.query.groups()
        assert (status.cursor, status.lag) == (1, 2)
    given = rig.pull(ordered=is_ordered)
    assert given.bodies == ([b"new 1"] if is_ordered else [b"new 1", b"new 2"])


def test_C12_a_group_is_moved_back_durably_before_anything_is_served_and_only_once(
    rig: Rig,
) -> None:
    rig.send(b"kept")
    last = rig.send(b"lost")
    rig.pull(max_messages=2)
    rig.store.actions.sync()
    tear_last_frame(rig, last.physical_offset)
    rig.start()
    log = rig.store.actions.log
    assert log.durable_offset == log.written_offset
    written = log.written_offset
    rig.kill()  # the next start finds the same, and has nothing to add
    rig.start()
    assert rig.store.actions.log.written_offset == written
    (action,) = moved_back(rig)
    assert (action.subject, action.group, action.next) == (SUBJECT, GROUP, 1)


def test_C12_a_start_that_moves_nothing_back_writes_nothing(rig: Rig) -> None:
    rig.send(b"a", b"b", b"c")
    given = rig.pull(max_messages=2)
    rig.settle(given.nack(3_600_000))
    rig.restart()
    rig.restart()
    assert moved_back(rig) == []


def test_C12_a_dead_letter_that_a_broken_off_log_revives_is_not_dead_after_one_more_start(
    rig: Rig, tmp_path: Path
) -> None:
    """The log can end between a death and the end of its lease; the message is then delivered again."""
    rig.send(b"a")
    rig.settle(rig.pull().reject())
    rig.restart()
    other = Rig(tmp_path / "other")
    other.send(b"a")
    other.store.actions.append(list(rig.store.actions.replay())[:-1])
    other.restart()
    for _ in range(2):  # the end of the lease, then that of the wait
        other.pass_ms(60_000)
    other.settle(other.pull().ack())
    other.restart()
    (status,) = other.broker.query.groups()
    assert (status.dead, status.acked) == (0, 1)
    other.close()


def test_C12_copies_that_the_log_lost_are_forgotten_and_the_originals_are_delivered(
    rig: Rig,
) -> None:
    """Else the group read what took their places among the copies: messages of other groups."""
    rig.send(b"a", b"b")
    rig.settle(rig.pull(max_messages=1).nack(0))
    where = (rig.now_ms, SUBJECT, GROUP)
    rig.store.actions.append([SetAside(*where, 0, 1, 77), BroughtBack(*where, 0, 5)])
    rig.restart()
    state = rig.broker.delivery.group(SUBJECT, GROUP)
    assert state is not None
    assert state.long_retries.copies == {}
    assert rig.pull().bodies == [b"a", b"b"]
