"""Messages that may have ended their consumer are given alone (`suspects.py`)."""

from __future__ import annotations

from functools import partial

from qmq_client.group.suspects import DRAINING_MS_MAX
from tests.broker.service.rig import GROUP, SUBJECT, Given, Rig

LEASE_MS = 1_000
#: Of these consumers each ends in silence; what they held is suspect then.
CRASHES = 2


def pull(rig: Rig, consumer: str, **changes: object) -> Given:
    return rig.pull(consumer, **{"lease_ms": LEASE_MS, "max_attempts": 4, **changes})


def crash(rig: Rig, count: int, *, times: int = CRASHES) -> None:
    """Consumers that take all of these and are never heard of again."""
    for time in range(times):
        assert len(pull(rig, f"crashed-{time}").bodies) == count
        wait_for_all(rig)


def wait_for_all(rig: Rig) -> None:
    """Until leases have ended and what came back is due."""
    rig.pass_ms(LEASE_MS)
    rig.pass_ms(60_000)


def waiting_for(rig: Rig, *consumers: str) -> list[str]:
    """Who was woken of pulls that wait from now on."""
    woken: list[str] = []
    for consumer in consumers:
        rig.broker.delivery.waiting.add(
            (SUBJECT, GROUP), partial(woken.append, consumer), consumer=consumer
        )
    return woken


def test_C4_a_message_that_ends_its_consumers_takes_no_other_to_the_dead_letters(rig: Rig) -> None:
    rig.send(b"deadly", *[b"%d" % number for number in range(9)])
    done: list[bytes] = []
    for life in range(40):
        wait_for_all(rig)
        # Whoever has the deadly one in hand is never heard of again, with all that it has.
        while (given := pull(rig, f"life-{life}")).bodies and b"deadly" not in given.bodies:
            done += given.bodies
            rig.settle(given.ack(), f"life-{life}")
    state = rig.broker.delivery.group(SUBJECT, GROUP)
    assert state is not None
    assert list(state.dead) == [0]
    assert sorted(done) == [b"%d" % number for number in range(9)]


def test_C4_a_suspect_comes_alone_and_nothing_comes_while_nobody_says_a_word(rig: Rig) -> None:
    rig.send(b"a", b"b")
    crash(rig, 2)
    rig.send(b"new")
    first = pull(rig, "one")
    assert (first.bodies, first.attempts) == ([b"a"], [3])
    assert pull(rig, "one").bodies == []
    rig.settle(first.ack(), "one")
    assert pull(rig, "one").bodies == [b"new"], "behind a suspect the others come first"


def test_one_crash_makes_no_suspect(rig: Rig) -> None:
    rig.send(b"a", b"b")
    crash(rig, 2, times=1)
    assert pull(rig, "one").bodies == [b"a", b"b"]


def test_what_was_given_back_is_no_suspect(rig: Rig) -> None:
    rig.send(b"a", b"b")
    crash(rig, 2, times=1)
    rig.settle(pull(rig, "one").nack(0), "one")
    assert pull(rig, "one").bodies == [b"a", b"b"]


def test_C6_an_extension_is_a_word_and_the_others_come(rig: Rig) -> None:
    rig.send(b"a")
    crash(rig, 1)
    rig.send(b"new")
    given = pull(rig, "one")
    assert given.bodies == [b"a"]
    rig.clock.pass_ms(10)
    rig.settle(given.extend(LEASE_MS), "one")
    assert pull(rig, "one").bodies == [b"new"]


def work(rig: Rig, *consumers: str, suspects: int = 1) -> dict[str, Given]:
    """Consumers that have one message each in hand, for long, when suspects become due."""
    rig.send(*[b"suspect"] * suspects)
    crash(rig, suspects, times=1)
    assert len(pull(rig, "crashed").bodies) == suspects
    rig.pass_ms(LEASE_MS)  # it waits for its next attempt from now on
    held = {}
    for name in consumers:
        rig.send(name.encode())
        held[name] = pull(rig, name, lease_ms=60_000)
        assert held[name].bodies == [name.encode()]
    rig.pass_ms(5_000)
    return held


def test_C4_one_consumer_at_a_time_gets_nothing_until_its_hands_are_empty(rig: Rig) -> None:
    held = work(rig, "one", "two")
    rig.send(b"new")
    woken = waiting_for(rig, "two")
    assert pull(rig, "one").bodies == []
    assert woken == ["two"], "what it does not get is for somebody else"
    assert pull(rig, "two").bodies == [b"new"]
    woken = waiting_for(rig, "one", "two")
    rig.send(b"newer")
    assert woken == ["two"], "who gets nothing is not woken for it"
    rig.settle(held["one"].ack(), "one")
    assert woken == ["two", "one"]
    assert pull(rig, "one").bodies == [b"suspect"]


def test_C6_a_handler_that_hangs_keeps_the_others_from_its_consumer_for_a_while_only(
    rig: Rig,
) -> None:
    work(rig, "one")
    rig.send(b"new")
    assert pull(rig, "one").bodies == []
    woken = waiting_for(rig, "one")
    rig.pass_ms(LEASE_MS - 1)
    assert woken == []
    rig.pass_ms(1)
    assert woken == ["one"], "nothing else happens that would wake it"
    suspect = pull(rig, "one")
    assert suspect.bodies == [b"suspect"], "with the one that hangs, and no other"
    rig.settle(suspect.ack(), "one")
    assert pull(rig, "one").bodies == [b"new"]


def test_C6_the_longest_lease_keeps_nobody_from_messages_for_longer_than_ten_seconds(
    rig: Rig,
) -> None:
    work(rig, "one")
    assert pull(rig, "one", lease_ms=60_000).bodies == []
    woken = waiting_for(rig, "one")
    rig.pass_ms(DRAINING_MS_MAX - 1)
    assert woken == []
    rig.pass_ms(1)
    assert woken == ["one"]


def test_C4_hands_that_were_full_for_too_long_are_emptied_the_next_time(rig: Rig) -> None:
    for _ in range(2):
        held = work(rig, "one")
        assert pull(rig, "one").bodies == []
        rig.pass_ms(LEASE_MS)
        suspect = pull(rig, "one")
        assert suspect.bodies == [b"suspect"]
        rig.settle(suspect.ack(), "one")
        rig.settle(held["one"].ack(), "one")
        assert pull(rig, "one").bodies == []


def test_C4_a_consumer_that_is_slow_for_one_suspect_is_waited_for_again_with_empty_hands_between(
    rig: Rig,
) -> None:
    held = work(rig, "one", suspects=2)
    assert pull(rig, "one").bodies == []
    rig.pass_ms(LEASE_MS)
    suspect = pull(rig, "one")
    rig.settle(suspect.ack(), "one")
    rig.settle(held["one"].ack(), "one")
    rig.send(b"new")
    others = pull(rig, "one", lease_ms=60_000)
    assert others.bodies == [b"new"]
    assert pull(rig, "one").bodies == [], "its hands are emptied for the other one"


def test_C4_another_consumers_hands_are_emptied_when_the_first_has_them_empty(rig: Rig) -> None:
    held = work(rig, "one", "two")
    rig.send(b"new")
    assert pull(rig, "one").bodies == []
    rig.settle(held["one"].ack(), "one")  # and it is not heard of again
    assert pull(rig, "two").bodies == []


def test_B10_suspects_that_come_and_go_leave_nothing_behind(rig: Rig) -> None:
    rig.send(b"suspect")
    for _ in range(400):
        assert pull(rig, "one", max_attempts=1_000).bodies == [b"suspect"]
        rig.pass_ms(LEASE_MS)
        rig.pass_ms(600_000)
    state = rig.broker.delivery.group(SUBJECT, GROUP)
    assert state is not None
    assert len(state.redeliveries._suspects_by_time) <= 100


def test_C1_a_consumer_that_dies_while_its_hands_are_emptied_leaves_the_suspect_to_others(
    rig: Rig,
) -> None:
    work(rig, "one", "two")
    assert pull(rig, "one").bodies == []
    rig.pass_ms(60_000)  # and so do all leases
    assert b"suspect" in {*pull(rig, "two").bodies, *pull(rig, "three").bodies}


def test_a_consumer_with_empty_hands_takes_the_suspect_at_once(rig: Rig) -> None:
    work(rig, "one")
    assert pull(rig, "one").bodies == []
    assert pull(rig, "idle").bodies == [b"suspect"]
    rig.send(b"new")
    assert pull(rig, "one").bodies == [b"new"], "and nobody waits for it any more"


def test_suspects_are_known_after_a_restart(rig: Rig) -> None:
    rig.send(b"a", b"b")
    crash(rig, 2)
    rig.restart()
    assert pull(rig, "one").bodies == [b"a"]
    assert pull(rig, "two").bodies == [b"b"]


def test_a_suspect_that_expired_is_no_answer_to_a_pull(rig: Rig) -> None:
    rig.send(b"a", expires_at_ms=rig.now_ms + 100_000)
    crash(rig, 1)
    rig.send(b"new")
    assert pull(rig, "one").bodies == [b"new"]


def test_ordered_suspects_keep_their_place(rig: Rig) -> None:
    rig.send(b"a", b"b", key="17")
    rig.send(b"other", key="18")
    for time in range(CRASHES):
        assert pull(rig, f"crashed-{time}", ordered=True).bodies == [b"a", b"other"]
        wait_for_all(rig)
    for expected in (b"a", b"b", b"other"):
        given = pull(rig, "one", ordered=True)
        assert given.bodies == [expected]
        rig.settle(given.ack(), "one")
