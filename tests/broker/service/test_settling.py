"""Outcomes that contradict each other or come again: the first one counts, and memory of them is bounded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from qmq_broker.errors import BusyError
from qmq_broker.service.limits import ServiceLimits
from qmq_client.group.leases import ACKED_TOKENS_MAX, Deadlines, Lease, PullLog
from qmq_client.wire.requests import Extend, Nack, Reject, Settlement
from tests.broker.service.rig import GROUP, SUBJECT, Rig
from tests.kit.calls import called_by


def test_C2_of_several_outcomes_for_one_message_in_one_request_the_first_counts(rig: Rig) -> None:
    rig.send(b"acked", b"given back")
    given = rig.pull(max_attempts=1)
    acked, back = given.part(0), given.part(1)
    answer = rig.settle(
        Settlement(
            token=given.token,
            acks=(acked,),
            nacks=(Nack(range=back, delay_ms=0, error="first"), Nack(range=acked, delay_ms=0)),
            rejects=(Reject(range=acked, reason="late"), Reject(range=back, reason="late")),
            extends=(Extend(range=acked, lease_ms=1_000),),
        )
    )
    state = rig.broker.delivery.group(SUBJECT, GROUP)
    assert state is not None
    assert [(one.sequence, one.error) for one in state.dead.values()] == [(1, "first")]
    assert (state.acked_count, state.in_flight, state.waiting) == (1, 0, 0)
    assert answer.settled == 2


def test_C1_an_ack_around_what_was_settled_before_takes_what_stands_on_either_side(
    rig: Rig,
) -> None:
    rig.send(b"a", b"b", b"c", b"d")
    given = rig.pull()
    rig.settle(given.ack(given.part(1, 2)))
    assert rig.settle(given.ack()).settled == 4
    state = rig.broker.delivery.group(SUBJECT, GROUP)
    assert state is not None
    assert (state.acked_count, state.in_flight) == (4, 0)


@pytest.mark.parametrize("kind", ["nacks", "rejects", "extends"])
def test_B10_ranges_that_name_the_same_messages_again_and_again_cost_little_each(
    tmp_path: Path, kind: str
) -> None:
    calls = [_calls_of_overlapping(tmp_path / str(count), kind, count) for count in (100, 200)]
    assert calls[1] < 3 * calls[0], "with the square of their number, it would be four times"


def _calls_of_overlapping(directory: Path, kind: str, count: int) -> int:
    """Calls for so many ranges, each around as many leases with gaps between them."""
    rig = Rig(directory)
    rig.send(*[b"a"] * 4 * count)
    given = rig.pull(max_messages=4 * count)
    rig.settle(given.ack(*[given.part(index) for index in range(0, 4 * count, 2)]))
    acks = tuple(given.part(index) for index in range(1, 4 * count, 4))
    around = (0, 2**63 - 1)
    again: dict[str, Any] = {
        "nacks": Nack(range=around, delay_ms=0),
        "rejects": Reject(range=around, reason="no"),
        "extends": Extend(range=around, lease_ms=60_000),
    }
    settlement = Settlement(token=given.token, acks=acks, **{kind: count * (again[kind],)})
    answer, calls = called_by(lambda: rig.settle(settlement))
    rig.close()
    assert answer.settled == 2 * count
    return len(calls)


def test_C3_who_settled_just_now_is_remembered_however_long_ago_it_pulled(tmp_path: Path) -> None:
    """Its answer may have been lost, and a repeat must not be called late."""
    limits = ServiceLimits(consumers_per_group=1, consumer_idle_ms=60_000)
    rig = Rig(tmp_path / "data", limits=limits)
    rig.send(b"a")
    given = rig.pull("slow", lease_ms=600_000)
    rig.pass_ms(60_001)
    assert rig.settle(given.ack(), "slow").settled == 1
    with pytest.raises(BusyError, match="has 1 consumers"):
        rig.pull("other")
    assert rig.settle(given.ack(), "slow").stale == ()
    rig.close()


def test_B10_acks_under_very_old_tokens_are_forgotten() -> None:
    """Tokens are drawn: the oldest is not the least."""
    log = PullLog()
    tokens = [1_000 - number for number in range(ACKED_TOKENS_MAX + 3)]
    for number, token in enumerate(tokens):
        lease = Lease(
            first=number, next=number + 1, first_sequence=number, attempt=1, token=token, until_ms=1
        )
        log.hand_out(lease)
        log.ack(number, number + 1)
    assert list(log.acked()) == tokens[3:]
    assert log.unacked(3, 4, token=tokens[3]) == []
    assert log.unacked(2, 3, token=tokens[2]) == [(2, 3)]


def test_C1_two_copies_of_a_store_take_no_outcome_of_each_other(tmp_path: Path) -> None:
    """A stopped directory was copied and both are served: store, epoch and pull sequences are the same."""
    one = Rig(tmp_path / "one")
    one.close()
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    one.start()
    other = Rig(tmp_path / "other")
    assert one.store.epoch == other.store.epoch
    one.send(b"of the one")
    other.send(b"of the other")
    given, given_by_other = one.pull(), other.pull()
    assert (given.first, given.next) == (given_by_other.first, given_by_other.next)
    answer = other.settle(given.ack())
    assert (answer.settled, answer.stale) == (0, ((given.token, given.first, given.next),))
    assert other.settle(given_by_other.ack()).settled == 1
    one.close()
    other.close()


def test_tokens_are_of_one_length_and_exact_in_every_reader_of_json(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "data")
    for _ in range(4):
        rig.restart()
        assert rig.store.hand_out_token.bit_length() == 53
    rig.close()


def test_C3_leases_that_have_ended_are_reported_until_that_is_written() -> None:
    """A full disk may refuse the action, and nobody else looks after them."""
    log = PullLog()
    deadlines = Deadlines({"one": log})
    lease = Lease(first=0, next=2, first_sequence=0, attempt=1, token=1, until_ms=100)
    log.hand_out(lease)
    deadlines.watch("one", lease)
    assert deadlines.ended(99, 10) == []
    assert deadlines.ended(100, 10) == [("one", lease)]
    assert deadlines.ended(100, 10) == [("one", lease)]
    log.end(0, 2)
    assert deadlines.ended(100, 10) == []


def test_what_is_decided_while_the_action_log_is_synced_is_synced_by_the_next_pass(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.send(b"a")
    rig.pull()
    syncing, sync = rig.broker._action_sync, rig.store.actions.sync

    def sync_meanwhile() -> None:
        sync()
        monkeypatch.undo()
        rig.pull(group="another")

    monkeypatch.setattr(rig.store.actions, "sync", sync_meanwhile)
    assert [syncing.step(), syncing.step(), syncing.step()] == [1, 1, 0]
    actions = rig.store.actions.log
    assert actions.durable_offset == actions.written_offset
