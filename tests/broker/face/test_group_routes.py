"""The routes that change groups and dead letters, without sockets."""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker.face.asgi import Client, error_of
from tests.broker.service.rig import GROUP, SUBJECT, Rig

WHERE = {"subject": SUBJECT, "group": GROUP}


def pull(client: Client, **changes: Any) -> list[str]:
    request = {**WHERE, "consumer": "one", **changes}
    answer = client.post("/v1/pull", request).json
    return [message["body_base64"] for message in answer["messages"]]


def test_a_group_is_paused_resumed_sought_configured_and_removed(rig: Rig, client: Client) -> None:
    rig.send(b"a", b"b")
    assert len(pull(client)) == 2
    assert client.post("/v1/groups/pause", WHERE).json["is_paused"] is True
    sought = client.post("/v1/groups/seek", {**WHERE, "to": "sequence:1"}).json
    assert (sought["cursor"], sought["in_flight"], sought["lag"]) == (1, 0, 1)
    assert pull(client) == []
    assert client.post("/v1/groups/resume", WHERE).json["is_paused"] is False
    change = {**WHERE, "tags": {"any": ["red"]}, "max_attempts": 3, "backoff": {"first_ms": 5}}
    configured = client.post("/v1/groups/configure", change).json
    assert configured["tags"] == {"any": ["red"], "all": []}
    assert configured["backoff"] == {"first_ms": 5, "factor": 2.0, "max_ms": 600_000}
    assert configured["max_attempts"] == 3
    assert pull(client, max_attempts=3) == []
    (listed,) = client.get(f"/v1/groups?subject={SUBJECT}").json["groups"]
    assert listed["lag"] == 0
    client.post("/v1/groups/remove", WHERE)
    assert client.get("/v1/groups").json["groups"] == []


def test_dead_letters_are_shown_replayed_and_purged(rig: Rig, client: Client) -> None:
    rig.send(b"a", b"b", b"c")
    rig.settle(rig.pull().reject("no such airport"))
    listing = f"/v1/dead?subject={SUBJECT}&group={GROUP}&first=1&count=1"
    (letter,) = client.get(listing).json["dead"]
    assert (letter["sequence"], letter["reason"], letter["error"]) == (
        1,
        "rejected",
        "no such airport",
    )
    assert [one["outcome"] for one in letter["history"]] == ["rejected"]
    assert "message" not in letter
    (letter,) = client.get(f"{listing}&messages=1").json["dead"]
    assert letter["message"]["body_base64"] == "Yg=="
    answer = client.post("/v1/dead/replay", {**WHERE, "first": 1, "next": 2}).json
    assert answer == {"count": 1, "gone": 0, "has_more": False}
    assert pull(client) == ["Yg=="]
    assert client.post("/v1/dead/purge", WHERE).json["count"] == 2


def test_a_broadcasts_consumer_is_named_as_it_is_listed(rig: Rig, client: Client) -> None:
    rig.send(b"a")
    assert len(pull(client, broadcast="named")) == 1
    (listed,) = client.get("/v1/groups").json["groups"]
    assert listed["group"] == f"{GROUP}@one"
    where = {"subject": SUBJECT, "group": f"{GROUP}@one"}
    assert client.post("/v1/groups/pause", where).json["is_paused"] is True
    assert client.get(f"/v1/groups?group={GROUP}@one").json["groups"][0]["is_paused"] is True
    assert client.get(f"/v1/dead?subject={SUBJECT}&group={GROUP}@one").json == {"dead": []}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/groups/pause", WHERE, 404),
        ("/v1/groups/seek", {**WHERE, "to": "tomorrow"}, 422),
        ("/v1/groups/seek", WHERE, 422),
        ("/v1/groups/pause", {"subject": "a b", "group": "g"}, 422),
        ("/v1/groups/pause", {"subject": "a", "group": "g@b@c"}, 422),
        ("/v1/groups/pause", {**WHERE, "more": 1}, 422),
        ("/v1/dead/replay", {**WHERE, "first": -1}, 422),
        ("/v1/groups/remove", b"{", 400),
        ("/v1/groups/remove", b'{"subject": "' + b"x" * 20_000 + b'", "group": "g"}', 422),
    ],
    ids=[
        "no group", "no start", "no place", "no name", "no such name", "unknown field", "negative",
        "no JSON", "too long",
    ],
)  # fmt: skip
def test_requests_that_make_no_sense_are_refused(
    client: Client, path: str, body: Any, status: int
) -> None:
    reply = client.post(path, body)
    assert reply.status == status
    assert error_of(reply).message


def test_a_pull_with_other_tags_than_its_group_is_told_what_the_group_has(
    rig: Rig, client: Client
) -> None:
    pull(client, tags={"any": ["red"]})
    reply = client.post("/v1/pull", {**WHERE, "consumer": "two", "tags": {"all": ["red"]}})
    assert reply.status == 409
    error = error_of(reply)
    assert (error.code, error.field, error.limit) == ("group_conflict", "tags", "any of red")
    assert error.remedy


def test_at_most_once_is_synced_before_the_answer(rig: Rig, client: Client) -> None:
    rig.send(b"a", b"b")
    pull(client, max_messages=1)
    assert rig.store.actions.log.durable_offset < rig.store.actions.log.written_offset
    pull(client, at_most_once=True)
    assert rig.store.actions.log.durable_offset == rig.store.actions.log.written_offset


def test_a_change_is_synced_before_the_answer(rig: Rig, client: Client) -> None:
    pull(client)
    for path, more in (("pause", {}), ("seek", {"to": "latest"}), ("remove", {})):
        client.post(f"/v1/groups/{path}", {**WHERE, **more})
        assert rig.store.actions.log.durable_offset == rig.store.actions.log.written_offset
