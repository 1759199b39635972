"""Filters by tags: kept with the group, by hash first and then by text, and changed on request only."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from qmq_broker.errors import GroupConflictError
from qmq_client.group.settings import TagFilter
from qmq_client.wire.operations import ConfigureRequest
from qmq_client.wire.record import tag_hash
from qmq_client.wire.requests import Tags
from tests.broker.service.rig import GROUP, SUBJECT, Rig


def send_tagged(rig: Rig) -> None:
    """a: red · b: red, big · c: big · d: none · e: green, big."""
    for body, tags in (
        (b"a", ("red",)),
        (b"b", ("red", "big")),
        (b"c", ("big",)),
        (b"d", ()),
        (b"e", ("green", "big")),
    ):
        rig.send(body, tags=tags)


def test_C1_what_fits_the_tags_and_not_into_one_answer_comes_with_the_next(rig: Rig) -> None:
    tags = Tags(any=("red",))
    for body in (b"a", b"b"):
        rig.send(body.ljust(1_000), tags=("red",))
    rig.send(b"c", tags=("green",))
    pulled = [rig.pull(tags=tags, max_bytes=1_500).sequences for _ in range(3)]
    assert pulled == [[0], [1], []]


@pytest.mark.parametrize(
    ("changes", "bodies"),
    [
        ({"tags": Tags(any=("red",))}, [b"a", b"b"]),
        ({"tags": Tags(any=("red", "green"))}, [b"a", b"b", b"e"]),
        ({"tags": Tags(all=("red", "big"))}, [b"b"]),
        ({"tags": Tags(any=("red", "green"), all=("big",))}, [b"b", b"e"]),
        ({"tags": Tags(any=("blue",))}, []),
        ({}, [b"a", b"b", b"c", b"d", b"e"]),
    ],
    ids=["any of one", "any of two", "all", "any and all", "nobody's", "no filter"],
)
def test_a_group_gets_the_messages_whose_tags_fit(
    rig: Rig, changes: dict[str, Any], bodies: list[bytes]
) -> None:
    send_tagged(rig)
    assert rig.pull(**changes).bodies == bodies
    (status,) = rig.broker.query.groups()
    assert (status.lag, status.in_flight) == (0, len(bodies))


def test_what_does_not_fit_is_passed_for_good_over_a_restart(rig: Rig) -> None:
    send_tagged(rig)
    rig.settle(rig.pull(tags=Tags(any=("big",)), max_messages=2).ack())
    rig.restart()
    assert rig.pull(tags=Tags(any=("big",))).bodies == [b"e"]
    rig.send(b"f", tags=("red",))
    assert rig.pull().bodies == []
    (status,) = rig.broker.query.groups()
    assert (status.cursor, status.lag) == (6, 0)
    assert rig.broker.delivery.needed_log.first_offset(0) > 0


def test_C1_members_of_a_group_cannot_take_each_others_messages_by_other_tags(rig: Rig) -> None:
    send_tagged(rig)
    rig.pull("one", tags=Tags(any=("red",)), max_messages=1)
    for wanted in (
        {"tags": Tags(any=("green",))},
        {"tags": Tags(all=("red",))},
        {"tags": Tags(any=())},
    ):
        with pytest.raises(GroupConflictError) as refused:
            rig.pull("two", **wanted)
        assert refused.value.field == "tags"
        assert refused.value.limit == "any of red"
    assert rig.pull("two", tags=Tags(any=("red",))).bodies == [b"b"], "the same filter is taken"
    assert rig.pull("three").bodies == [], "and so is none: the group's holds"


def test_the_order_of_tags_in_a_filter_says_nothing(rig: Rig) -> None:
    rig.pull(tags=Tags(any=("red", "green", "red")))
    assert rig.pull(tags=Tags(any=("green", "red"))).bodies == []


def test_a_filter_is_changed_on_request_for_what_comes(rig: Rig) -> None:
    send_tagged(rig)
    given = rig.pull(tags=Tags(any=("red",)), max_messages=1)
    change = ConfigureRequest(subject=SUBJECT, group=GROUP, tags=Tags(any=("green",)))
    rig.broker.changes.configure(change, rig.now_ms)
    rig.settle(given.nack(delay_ms=0))
    rig.restart()
    again = rig.pull(tags=Tags(any=("green",)))
    assert again.bodies == [b"a", b"e"], "what it was given before is still its own"


@pytest.mark.parametrize(
    "filter_", [Tags(any=("wanted",)), Tags(all=("wanted",))], ids=["any", "all"]
)
def test_two_tags_that_look_alike_to_the_hash_are_told_apart_by_the_text(
    rig: Rig, filter_: Tags
) -> None:
    wanted = tag_hash([b"wanted"])
    like = next(
        pair
        for number in count()
        if tag_hash(pair := [b"x%d" % number, b"y%d" % number]) & wanted == wanted
    )
    names = tuple(tag.decode() for tag in like)
    assert TagFilter(filter_.any, filter_.all).may_match(tag_hash(like))
    rig.send(b"no", tags=names)
    rig.send(b"yes", tags=("wanted",))
    rig.send(b"no", tags=names)
    assert rig.pull(tags=filter_).bodies == [b"yes"]
    (status,) = rig.broker.query.groups()
    assert status.lag == 0


def test_a_pull_that_has_to_look_far_continues_where_it_stopped(rig: Rig) -> None:
    for _ in range(5):
        rig.send(*[b"x"] * 10_000)
    rig.send(b"mine", tags=("red",))
    found: list[bytes] = []
    for _ in range(3):
        found += rig.pull(tags=Tags(any=("red",))).bodies
    assert found == [b"mine"]


def test_an_unfinished_look_wakes_a_waiting_pull_at_once(rig: Rig) -> None:
    for _ in range(4):
        rig.send(*[b"x"] * 10_000)
    woken: list[bool] = []
    rig.pull(tags=Tags(any=("red",)))
    rig.broker.delivery.waiting.add((SUBJECT, GROUP), lambda: woken.append(True))
    rig.broker.delivery.step(rig.now_ms)
    assert woken == [True]


@pytest.mark.parametrize("messages_max", [1, 2, 3, 100])
def test_every_message_is_given_once_whatever_the_size_of_pulls(
    rig: Rig, messages_max: int
) -> None:
    for number in range(40):
        rig.send(b"%d" % number, tags=("red",) if number % 3 == 0 else ("big",))
    found: list[bytes] = []
    while bodies := rig.pull(tags=Tags(any=("red",)), max_messages=messages_max).bodies:
        found += bodies
    assert found == [b"%d" % number for number in range(0, 40, 3)]
