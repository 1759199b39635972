"""Bounds of delivery, requests that make no sense, and what a group forgets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qmq_broker.errors import BusyError, NoRoomError
from qmq_broker.service.limits import ServiceLimits
from qmq_client.group.apply import move_back, must_move_back
from qmq_client.wire.errors import InvalidMessageError
from qmq_client.wire.requests import PullRequest, Settlement
from tests.broker.service.rig import GROUP, SUBJECT, Rig
from tests.kit.calls import called_by


def test_C12_a_group_never_stands_behind_the_durable_end(rig: Rig) -> None:
    rig.send(b"a", b"b")
    rig.pull(max_messages=1)
    rig.settle(rig.pull(max_messages=1).nack(delay_ms=0))
    state = rig.broker.delivery.group(SUBJECT, GROUP)
    assert state is not None
    move_back(state, 1, 0)
    assert (state.cursor, state.in_flight, state.waiting) == (1, 1, 0)
    move_back(state, 0, 0)
    assert (state.cursor, state.in_flight, state.waiting) == (0, 0, 0)
    assert rig.pull().bodies == [b"a", b"b"]


def test_C12_an_ordered_group_forgets_what_it_came_to_behind_the_durable_end(rig: Rig) -> None:
    """Else what is stored there next would be given out of its order, or twice."""
    rig.send(*[b"%d" % number for number in range(3)], key="a")
    rig.pull(max_messages=1, ordered=True)
    state = rig.broker.delivery.group(SUBJECT, GROUP)
    assert state is not None
    assert (state.cursor, state.held) == (3, 2)
    assert must_move_back(state, 1, 0)
    move_back(state, 1, 0)
    assert not must_move_back(state, 1, 0)
    assert (state.cursor, state.held, state.in_flight) == (1, 0, 1)


def test_C12_dead_letters_and_long_retries_after_the_durable_end_are_forgotten(rig: Rig) -> None:
    """What is stored there next is something else."""
    rig.send(*[b"%d" % number for number in range(4)])
    rig.settle(rig.pull(max_messages=2).reject())
    rig.settle(rig.pull(max_messages=2).nack(delay_ms=3_600_000))
    state = rig.broker.delivery.group(SUBJECT, GROUP)
    assert state is not None
    state.long_retries.begin(state.redeliveries.take(2, 4), retry_id=1)
    left = []
    for next_sequence in (3, 1):
        move_back(state, next_sequence, 0)
        left.append((sorted(state.dead), state.long_retries.count))
    assert left == [([0, 1], 1), ([0], 0)]


def test_B10_long_leases_that_were_acked_leave_nothing_behind(rig: Rig) -> None:
    for _ in range(30):
        rig.send(*[b"x"] * 100)
        for _ in range(100):
            rig.settle(rig.pull(max_messages=1, lease_ms=3_600_000).ack())
    state = rig.broker.delivery.group(SUBJECT, GROUP)
    assert state is not None
    assert len(state.deadlines) <= 1_100
    assert (state.in_flight, state.acked_count) == (0, 3_000)


def test_B10_messages_given_back_over_and_over_leave_nothing_behind(rig: Rig) -> None:
    rig.send(b"a")
    for _ in range(900):
        rig.settle(rig.pull(max_attempts=1_000).nack(delay_ms=0))
    state = rig.broker.delivery.group(SUBJECT, GROUP)
    assert state is not None
    assert len(state.redeliveries._by_time) <= 100
    assert rig.pull(max_attempts=1_000).attempts == [901]


def test_C12_a_log_that_knows_more_than_the_disk_is_cut_at_the_start(
    rig: Rig, tmp_path: Path
) -> None:
    rig.send(b"a", b"b", b"c")
    rig.pull(max_messages=2)
    rig.restart()
    other = Rig(tmp_path / "other")
    other.send(b"a")
    other.store.actions.append(list(rig.store.actions.replay()))
    other.restart()
    (status,) = other.broker.query.groups()
    assert (status.cursor, status.in_flight, status.lag) == (1, 1, 0)
    other.close()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"subject": "../etc"}, "subject"),
        ({"group": "a\n"}, "group"),
        ({"consumer": ""}, "consumer"),
        ({"lease_ms": 0}, "lease_ms"),
        ({"lease_ms": 2**40}, "lease_ms"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"max_messages": 0}, "max_messages"),
        ({"max_bytes": 0}, "max_bytes"),
        ({"start": "yesterday"}, "start"),
        ({"settlements": (Settlement(token=1, acks=((3, 3),)),)}, "range"),
        ({"settlements": (Settlement(token=1, acks=((9, 3),)),)}, "range"),
        ({"settlements": (Settlement(token=1, acks=((0, 1),) * 10_001),)}, "settlements"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_by_field(
    rig: Rig, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidMessageError) as refused:
        rig.pull(**changes)
    assert refused.value.field == field
    assert rig.broker.delivery.groups() == []


def test_B10_bounds_are_refusals_with_a_time_to_come_back(tmp_path: Path) -> None:
    limits = ServiceLimits(groups=2, consumers_per_group=2, in_flight_per_consumer=3)
    rig = Rig(tmp_path / "data", limits=limits)
    rig.send(*[b"%d" % number for number in range(10)])
    assert len(rig.pull("one").bodies) == 3
    with pytest.raises(BusyError, match="holds 3 unsettled messages"):
        rig.pull("one")
    assert len(rig.pull("two").bodies) == 3
    with pytest.raises(BusyError, match="has 2 consumers") as refused:
        rig.pull("three")
    assert refused.value.retry_after_s > 0
    rig.pull(group="second")
    with pytest.raises(BusyError, match="2 groups"):
        rig.pull(group="third")
    rig.close()


def test_B10_consumers_that_came_and_went_leave_their_room_to_others(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "data", limits=ServiceLimits(consumers_per_group=3))
    rig.send(*[b"%d" % number for number in range(8)])
    holding = rig.pull("holding", max_messages=1, lease_ms=600_000)
    for one in ("first", "second"):
        rig.settle(rig.pull(one, max_messages=1).ack(), one)
    with pytest.raises(BusyError, match="has 3 consumers") as refused:
        rig.pull("third", max_messages=1)
    rig.pass_ms(int(refused.value.retry_after_s * 1_000) + 1)
    for one in ("third", "fourth"):
        assert len(rig.pull(one, max_messages=1, lease_ms=600_000).bodies) == 1
    with pytest.raises(BusyError, match="has 3 consumers"):
        rig.pull("fifth", max_messages=1)
    assert rig.settle(holding.ack(), "holding").settled == 1
    rig.close()


def test_B10_a_group_with_too_much_unsettled_gets_no_new_messages(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "data", limits=ServiceLimits(unsettled_per_group=5))
    rig.send(*[b"%d" % number for number in range(10)])
    given = rig.pull("one")
    assert len(given.bodies) == 5
    assert rig.pull("two").bodies == []
    rig.settle(given.nack(delay_ms=0), "one")
    assert rig.pull("two").bodies == given.bodies
    rig.close()


def test_a_forgotten_consumer_never_gets_a_pull_sequence_twice(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "data", limits=ServiceLimits(consumers_per_group=1))
    rig.send(b"a", b"b", b"c")
    old = rig.pull("one", max_messages=2)
    rig.settle(old.ack(), "one")
    rig.pass_ms(2 * 3_600_000)
    new = rig.pull("two", max_messages=1)
    assert new.first == 2
    rig.settle(new.ack(), "two")
    rig.pass_ms(2 * 3_600_000)
    rig.send(b"d")
    assert rig.pull("one").first == 3
    rig.close()


@pytest.mark.parametrize(
    ("limits", "given"),
    [
        (ServiceLimits(pull_bytes=100), [[0], [1], [2]]),
        (ServiceLimits(pull_messages=2), [[0, 1], [2, 3], [4]]),
    ],
    ids=["bytes", "messages"],
)
def test_B10_a_pull_that_asks_for_more_than_the_broker_gives_is_given_that(
    tmp_path: Path, limits: ServiceLimits, given: list[list[int]]
) -> None:
    rig = Rig(tmp_path / "data", limits=limits)
    rig.send(*[b"x" * 60] * 5)
    pulls = [rig.pull(max_messages=1_000, max_bytes=1_000_000) for _ in range(3)]
    assert [pull.sequences for pull in pulls] == given
    rig.close()


def test_a_pull_is_given_what_just_fits_its_bytes_and_nothing_more(rig: Rig) -> None:
    rig.send(*[b"%d" % number for number in range(4)])
    (record,) = rig.pull(group="measured", max_messages=1).records
    assert rig.pull(max_bytes=2 * len(record)).sequences == [0, 1]
    assert rig.pull(max_bytes=2 * len(record) - 1).sequences == [2]


def calls_of_a_pull(rig: Rig, messages: int) -> int:
    """How many functions are called, of Python and of C, to hand out so many messages."""
    request = PullRequest(
        subject=SUBJECT, group=f"of-{messages}", consumer="counted", max_messages=messages
    )
    given, calls = called_by(lambda: rig.broker.delivery.pull(request, rig.clock.now_ms()))
    assert given is not None
    assert len(given.records) == messages
    return len(calls)


def test_a_pull_calls_nothing_for_each_message_but_its_checksum(rig: Rig) -> None:
    rig.send(*[b"x" * 50] * 1_000)
    calls_of_a_pull(rig, 10)
    assert calls_of_a_pull(rig, 900) - calls_of_a_pull(rig, 100) < 1.1 * 800


def test_B6_C3_leases_that_a_full_disk_kept_from_ending_end_when_there_is_room(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody pulls meanwhile, and what else is driven by time goes on."""

    def full(_: object) -> None:
        raise NoRoomError("no space left on device")

    groups = ("one", "two", "three")
    rig.send(b"a")
    for group in groups:
        rig.pull(group=group, lease_ms=1_000)
    with monkeypatch.context() as patch:
        patch.setattr(rig.store.actions, "append", full)
        rig.clock.pass_ms(1_000)
        rig.broker.step()
    assert [state.in_flight for state in rig.broker.delivery.groups()] == [1, 1, 1]
    rig.clock.pass_ms(1_000)
    rig.broker.step()
    assert [state.in_flight for state in rig.broker.delivery.groups()] == [0, 0, 0]


def test_B10_visits_of_a_group_are_forgotten_when_they_were_moved(rig: Rig) -> None:
    rig.send(b"held", b"failing")
    rig.pull("holder", max_messages=1, lease_ms=12 * 3_600_000)
    for _ in range(1_500):
        rig.settle(rig.pull("other", max_attempts=1_000).nack_untried(), "other")
        rig.pass_ms(1_000)
    assert len(rig.broker.delivery.registry._schedule) <= 1_024 + 4
    assert rig.pull("other", max_attempts=1_000).bodies == [b"failing"]
    rig.pass_ms(12 * 3_600_000)
    rig.pass_ms(600_000)
    assert sorted(rig.pull("other", max_attempts=1_000).bodies) == [b"failing", b"held"]
