"""A send in JSON whose messages are due later."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qmq_client.wire.limits import DEFAULT_LIMITS
from tests.broker.delay.delay_rig import DelayRig
from tests.broker.face.asgi import Client
from tests.broker.service.rig import GROUP, SUBJECT

YEAR_MS = 366 * 24 * 3_600_000
PULL = {"subject": SUBJECT, "group": GROUP, "consumer": "one"}


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DelayRig]:
    made = DelayRig(tmp_path / "data")
    yield made
    made.close()


@pytest.fixture
def client(rig: DelayRig) -> Client:
    return Client(rig)


def send(client: Client, *messages: dict[str, Any]) -> Any:
    given = [{"subject": SUBJECT, "body": "b", **message} for message in messages]
    return client.post("/v1/send", {"messages": given})


def test_a_json_send_may_say_after_how_long_or_when(rig: DelayRig, client: Client) -> None:
    now_ms = rig.now_ms
    reply = send(client, {"delay_ms": 5_000}, {"deliver_at_ms": now_ms + 9_000})
    assert (reply.status, reply.json["count"], reply.json["places"]) == (200, 2, [])
    assert client.post("/v1/pull", PULL).json["messages"] == []
    for passed_ms, deliver_at_ms in ((5_000, now_ms + 5_000), (4_000, now_ms + 9_000)):
        rig.pass_and_release(passed_ms - 1)
        assert client.post("/v1/pull", PULL).json["messages"] == []
        rig.pass_and_release(1)
        (message,) = client.post("/v1/pull", PULL).json["messages"]
        assert message["deliver_at_ms"] == deliver_at_ms


def test_what_is_due_already_is_given_at_once(rig: DelayRig, client: Client) -> None:
    assert send(client, {"delay_ms": 0}, {"deliver_at_ms": 1}).status == 200
    assert rig.release() == 2
    assert len(client.post("/v1/pull", PULL).json["messages"]) == 2


@pytest.mark.parametrize(
    ("messages", "field", "limit"),
    [
        ([{"delay_ms": 1, "deliver_at_ms": 1}], "delay_ms", "delay_ms or deliver_at_ms"),
        ([{"delay_ms": 1}, {}], "messages", "all of them"),
        ([{"delay_ms": 3 * YEAR_MS}], "delay_ms", r"\d+ ms ahead"),
        ([{"deliver_at_ms": 2**62}], "deliver_at_ms", r"\d+ ms ahead"),
    ],
)
def test_D5_a_time_that_cannot_be_is_refused_by_field_limit_and_remedy(
    client: Client, messages: list[dict[str, Any]], field: str, limit: str
) -> None:
    reply = send(client, *messages)
    assert (reply.status, reply.json["field"]) == (422, field)
    assert re.match(limit, reply.json["limit"])
    assert reply.json["remedy"]


@pytest.mark.parametrize("value", [-1, 1.5, "soon", True])
def test_a_time_that_is_no_number_is_refused(client: Client, value: object) -> None:
    reply = send(client, {"delay_ms": value})
    assert (reply.status, reply.json["field"]) == (422, "messages[0].delay_ms")


def test_B7_a_json_send_that_is_repeated_later_is_stored_once(
    rig: DelayRig, client: Client
) -> None:
    message = {"message_id": "ab" * 16, "delay_ms": 5_000}
    send(client, message)
    rig.clock.pass_ms(1_000)
    assert send(client, message).json["duplicates"] == 1
    assert send(client, {**message, "delay_ms": 6_000}).status == 409
    assert rig.pass_and_release(60_000) == 1


def test_D5_times_are_counted_from_a_clock_that_was_put_right(
    rig: DelayRig, client: Client
) -> None:
    rig.clock.wall_ms += YEAR_MS  # it was a year behind when the broker started
    now_ms, far_ms = rig.clock.wall_ms, rig.clock.wall_ms + DEFAULT_LIMITS.delay_ms
    assert send(client, {"delay_ms": 5_000}, {"deliver_at_ms": far_ms}).status == 200
    listed = client.get("/v1/delayed").json["delayed"]
    assert [one["due_at_ms"] for one in listed] == [now_ms + 5_000, far_ms]
    wanted = {"message_id": listed[0]["message_id"], "deliver_at_ms": far_ms}
    reply = client.post("/v1/delayed/reschedule", wanted)
    assert reply.json["outcomes"] == ["rescheduled"]
