"""What is kept with a group means the same to the bundled broker and to the one in memory: tags, order by
key, broadcast, at most once, expiry, start."""

from __future__ import annotations

import time
from typing import Any

import pytest

from qmq_broker.service.limits import ServiceLimits
from qmq_client.consumer.options import (
    ATTEMPTS_MAX,
    BACKOFF_MS_MAX,
    LEASE_MS_MAX,
    LEASE_MS_MIN,
    WAIT_MS_MAX,
)
from qmq_client.errors import BrokerRefusedError
from qmq_client.transport.port import Transport
from qmq_client.wire.requests import Backoff, BroadcastMember, Tags
from tests.contract.asking import (
    LONG_LEASE_MS,
    WAIT_MS,
    acks,
    bodies,
    frame_of,
    nacks,
    pull,
    settle,
)

TAGGED = ((b"a", ("red",)), (b"b", ("red", "big")), (b"c", ("big",)), (b"d", ()))


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        (Tags(any=("red",)), [b"a", b"b"]),
        (Tags(all=("red", "big")), [b"b"]),
        (Tags(any=("red", "green"), all=("big",)), [b"b"]),
        (Tags(), [b"a", b"b", b"c", b"d"]),
    ],
    ids=["any", "all", "any and all", "every"],
)
def test_a_group_with_tags_gets_what_fits_and_is_done_with_the_rest(
    transport: Transport, subject: str, tags: Tags, expected: list[bytes]
) -> None:
    for body, own in TAGGED:
        transport.send(frame_of(subject, body, tags=own))
    got = pull(transport, subject, tags=tags, wait_ms=WAIT_MS)
    assert bodies(got) == expected
    settle(transport, subject, acks(got))
    assert pull(transport, subject, tags=tags).messages == ()


@pytest.mark.parametrize(
    "other",
    [{"tags": Tags(any=("green",))}, {"tags": Tags()}, {"ordered": True}],
    ids=["other tags", "no tags", "order"],
)
def test_a_pull_that_contradicts_its_group_is_refused(
    transport: Transport, subject: str, other: dict[str, Any]
) -> None:
    pull(transport, subject, tags=Tags(any=("red",)), ordered=False)
    with pytest.raises(BrokerRefusedError) as caught:
        pull(transport, subject, consumer="two", **other)
    assert (caught.value.status, caught.value.answer.code) == (409, "group_conflict")
    assert pull(transport, subject, consumer="two").messages == ()


def test_C7_of_one_key_the_next_comes_when_the_one_before_is_done(
    transport: Transport, subject: str
) -> None:
    for body in (b"a1", b"a2", b"b1", b"a3"):
        transport.send(frame_of(subject, body, key=body[:1].decode()))
    transport.send(frame_of(subject, b"-1", b"-2"))
    first = pull(transport, subject, ordered=True, wait_ms=WAIT_MS)
    assert bodies(first) == [b"a1", b"b1", b"-1", b"-2"]
    assert pull(transport, subject, consumer="two", ordered=True).messages == ()
    settle(transport, subject, acks(first))
    second = pull(transport, subject, consumer="two", ordered=True, wait_ms=WAIT_MS)
    assert bodies(second) == [b"a2"]
    settle(transport, subject, nacks(second, delay_ms=LONG_LEASE_MS), consumer="two")
    assert pull(transport, subject, ordered=True).messages == ()


def test_C10_every_consumer_of_a_broadcast_gets_every_message(
    transport: Transport, subject: str
) -> None:
    transport.send(frame_of(subject, b"a"))
    for consumer in ("one", "two"):
        got = pull(transport, subject, consumer=consumer, broadcast="ephemeral", wait_ms=WAIT_MS)
        assert bodies(got) == [b"a"]
        answer = settle(transport, subject, acks(got), consumer=consumer, broadcast="ephemeral")
        assert answer.settled == 1
    assert bodies(pull(transport, subject, wait_ms=WAIT_MS)) == [b"a"], "the group has its own"


def test_C10_of_two_processes_under_one_name_of_a_broadcast_the_earlier_is_refused(
    transport: Transport, subject: str
) -> None:
    """They would share its messages, each getting a part, and nobody would be told."""
    first, second = (
        BroadcastMember(kind="named", instance=instance) for instance in ("first", "second")
    )
    transport.send(frame_of(subject, b"a", b"b"))
    got = pull(transport, subject, broadcast=first, max_messages=1, wait_ms=WAIT_MS)
    assert bodies(got) == [b"a"]
    assert bodies(pull(transport, subject, broadcast=second, wait_ms=WAIT_MS)) == [b"b"]
    for _ in range(2):
        with pytest.raises(BrokerRefusedError) as caught:
            pull(transport, subject, broadcast=first)
        assert (caught.value.status, caught.value.answer.code) == (409, "consumer_replaced")
    assert settle(transport, subject, acks(got), broadcast="named").settled == 1
    pull(transport, subject, broadcast=second)
    pull(transport, subject, consumer="two", broadcast=first)


def test_a_message_that_is_given_at_most_once_is_done_before_it_is_given(
    transport: Transport, subject: str
) -> None:
    transport.send(frame_of(subject, b"a", b"b"))
    got = pull(transport, subject, at_most_once=True, max_messages=1, wait_ms=WAIT_MS, lease_ms=50)
    assert bodies(got) == [b"a"]
    assert settle(transport, subject, nacks(got, delay_ms=0)).settled == 0
    again = pull(transport, subject, at_most_once=True, wait_ms=WAIT_MS)
    assert bodies(again) == [b"b"]
    assert pull(transport, subject, wait_ms=200).messages == ()


def test_an_expired_message_is_not_given(transport: Transport, subject: str) -> None:
    transport.send(frame_of(subject, b"old", expires_at_ms=1))
    transport.send(frame_of(subject, b"new", expires_at_ms=253_000_000_000_000))
    assert bodies(pull(transport, subject, wait_ms=WAIT_MS)) == [b"new"]


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("sequence:1", [b"b", b"c"]),
        ("sequence:99", []),
        ("time:0", [b"a", b"b", b"c"]),
        ("time:99999999999999", []),
        ("latest", []),
    ],
)
def test_a_new_group_begins_where_it_says(
    transport: Transport, subject: str, start: str, expected: list[bytes]
) -> None:
    transport.send(frame_of(subject, b"a", b"b", b"c"))
    seen = pull(transport, subject, group="other", wait_ms=WAIT_MS)
    assert len(seen.messages) == 3
    assert bodies(pull(transport, subject, start=start)) == expected


def test_a_new_group_begins_at_what_was_stored_at_a_time_or_later(
    transport: Transport, subject: str
) -> None:
    before = transport.send(frame_of(subject, b"before"))
    while int(time.time() * 1000) <= before.stored_at_ms:
        pass
    after = transport.send(frame_of(subject, b"after"))
    assert after.stored_at_ms > before.stored_at_ms
    got = pull(transport, subject, start=f"time:{after.stored_at_ms}", wait_ms=WAIT_MS)
    assert bodies(got) == [b"after"]


def test_the_waits_of_a_group_are_its_own(transport: Transport, subject: str) -> None:
    transport.send(frame_of(subject, b"a"))
    quick = Backoff(first_ms=0, factor=1.0, max_ms=0)
    got = pull(transport, subject, backoff=quick, wait_ms=WAIT_MS)
    settle(transport, subject, nacks(got, delay_ms=None))
    assert bodies(pull(transport, subject, backoff=quick)) == [b"a"]


def test_what_a_handler_may_ask_for_is_what_the_broker_grants() -> None:
    granted = ServiceLimits()
    assert granted.attempts == ATTEMPTS_MAX
    assert granted.backoff_ms == BACKOFF_MS_MAX
    assert granted.lease_ms_min <= LEASE_MS_MIN < LEASE_MS_MAX <= granted.lease_ms
    assert granted.wait_ms == WAIT_MS_MAX
