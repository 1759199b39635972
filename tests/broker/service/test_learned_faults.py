"""Faults by which another broker of this kind loses messages or repeats them for ever, as found by
reading it: here they must not come back."""

from __future__ import annotations

import pytest

from qmq_broker.errors import GroupConflictError
from qmq_client.wire.requests import Tags
from tests.broker.service.rig import GROUP, SUBJECT, Rig


@pytest.mark.parametrize("restarts", [False, True], ids=["running", "restarted"])
def test_C1_what_a_dead_consumer_had_not_acked_goes_to_the_living(rig: Rig, restarts: bool) -> None:
    """Not acked on its behalf, neither by its silence nor by a hole in what it acked."""
    rig.send(*[b"%d" % number for number in range(6)])
    given = rig.pull("dies", lease_ms=30_000)
    rig.settle(given.ack(given.part(0), given.part(3)), "dies")
    if restarts:
        rig.restart()
    rig.pass_ms(30_000)
    rig.pass_ms(1_000)
    survivor = rig.pull("lives")
    assert survivor.bodies == [b"1", b"2", b"4", b"5"]
    assert rig.settle(survivor.ack(), "lives").settled == 4


def test_C1_a_consumer_that_comes_again_under_its_name_acks_nothing_it_was_not_given_again(
    rig: Rig,
) -> None:
    rig.send(b"a", b"b", b"c")
    before = rig.pull("same", max_messages=2, lease_ms=1_000)
    rig.pass_ms(1_000)
    rig.pass_ms(1_000)
    after = rig.pull("same")
    assert sorted(after.bodies) == [b"a", b"b", b"c"]
    rig.settle(after.ack(after.part(2)), "same")
    assert rig.settle(before.ack(), "same").settled == 0
    (status,) = rig.broker.query.groups()
    assert (status.acked, status.in_flight) == (1, 2)


def test_C4_a_message_that_kills_every_consumer_ends_as_a_dead_letter(rig: Rig) -> None:
    """Nobody ever reports anything: silence counts as an attempt like every other."""
    rig.send(b"poison", b"good")
    for number in range(5):
        rig.pull(f"victim {number}".replace(" ", "-"), max_messages=1, max_attempts=5)
        rig.restart()
        rig.pass_ms(30_000)
        rig.pass_ms(600_000)
    survivor = rig.pull("survivor", max_attempts=5)
    assert survivor.bodies == [b"good"]
    (letter,) = rig.broker.query.dead_letters(SUBJECT, GROUP)
    assert (letter.attempts, letter.reason) == (5, "attempts used up")
    assert [one.consumer for one in letter.history] == [f"victim-{number}" for number in range(5)]


def test_C6_a_retry_at_a_chosen_time_is_seen_by_its_own_group_only(rig: Rig) -> None:
    """Neither the subject nor another group gets a copy."""
    rig.send(b"a")
    rig.settle(rig.pull(group="other").ack(), group="other")
    rig.settle(rig.pull().nack(delay_ms=60_000))
    (before,) = rig.broker.query.subjects()
    rig.pass_ms(60_000)
    assert rig.pull(group="other").bodies == []
    assert rig.pull().bodies == [b"a"]
    assert rig.broker.query.subjects() == [before]
    assert before.next_sequence == 1


def test_C1_consumers_of_one_group_with_different_tags_take_nothing_from_each_other(
    rig: Rig,
) -> None:
    """A filter of each request would pass over, for all, what the one that asked does not want."""
    rig.send(b"a", tags=("red",))
    rig.send(b"b", tags=("blue",))
    assert rig.pull("one", tags=Tags(any=("red",))).bodies == [b"a"]
    with pytest.raises(GroupConflictError):
        rig.pull("two", tags=Tags(any=("blue",)))
    assert rig.pull("two", group="blue", tags=Tags(any=("blue",))).bodies == [b"b"]


def test_C6_one_message_that_is_never_acked_stops_nothing_behind_it(rig: Rig) -> None:
    """No prefix has to be whole, and no number of them stops the pulls."""
    rig.send(*[b"%d" % number for number in range(500)])
    stuck = rig.pull(max_messages=1, lease_ms=600_000)
    for _ in range(499):
        one = rig.pull(max_messages=1)
        assert rig.settle(one.ack()).settled == 1
    rig.restart()
    (status,) = rig.broker.query.groups()
    assert (status.lag, status.acked, status.in_flight) == (0, 499, 1)
    rig.pass_ms(600_000)
    rig.pass_ms(1_000)
    assert rig.pull("two").bodies == stuck.bodies
