"""`GET /v1/messages` by id and by key, without sockets."""

from __future__ import annotations

import asyncio
import json
from threading import Event
from typing import Any

import pytest

from qmq_broker.face.routes import find
from qmq_broker.storage.index.key_search import SearchResult
from qmq_client.wire.requests import Nack, Reject, Settlement
from tests.broker.face.asgi import Client, error_of
from tests.broker.service.rig import GROUP, SUBJECT, Rig


def send(client: Client, *messages: dict[str, Any]) -> list[str]:
    """Send messages to one subject; their ids."""
    body = {"messages": [{"subject": SUBJECT, **message} for message in messages]}
    ids = client.post("/v1/send", body).json["message_ids"]
    client.rig.clock.pass_ms(1_000)
    return list(ids)


def index(rig: Rig) -> None:
    while rig.store.index.step(1 << 20).is_unfinished:
        pass


def test_a_message_is_found_by_id_with_all_that_is_known_of_it(rig: Rig, client: Client) -> None:
    stored_at_ms = rig.clock.wall_ms
    _, wanted, *_ = send(
        client,
        {"body": "first"},
        {"body": {"seat": "12A"}, "key": "k", "tags": ["t"], "headers": {"trace": "4b"}},
    )
    for is_indexed in (False, True):
        if is_indexed:
            index(rig)
        answer = client.get(f"/v1/messages?id={wanted}").json
        (found,) = answer.pop("messages")
        offset = found.pop("offset")
        assert found == {
            "subject": SUBJECT,
            "sequence": 1,
            "stored_at_ms": stored_at_ms,
            "message_id": wanted,
            "born_at_ms": stored_at_ms,
            "key": "k",
            "tags": ["t"],
            "headers": {"trace": "4b"},
            "body": {"seat": "12A"},
            "groups": [],
        }
        end = rig.store.durable_offset
        assert 0 < offset < end
        assert answer == {
            "has_more": False,
            "is_complete": True,
            "indexed_up_to": end if is_indexed else 0,
            "log_end": end,
            "unsearched_bytes": 0,
        }


def test_messages_are_found_by_key_and_time_newest_first(rig: Rig, client: Client) -> None:
    began_ms = rig.clock.wall_ms
    ids = [send(client, {"key": "k", "body": n}, {"key": "other"})[0] for n in range(5)]
    index(rig)
    url = f"/v1/messages?subject={SUBJECT}&key=k"
    assert [one["message_id"] for one in client.get(url).json["messages"]] == ids[::-1]
    url += f"&from={began_ms + 1_000}&to={began_ms + 3_000}"
    assert [one["body"] for one in client.get(url).json["messages"]] == [2, 1]
    answer = client.get(f"{url}&count=1").json
    assert ([one["body"] for one in answer["messages"]], answer["has_more"]) == ([2], True)
    assert "groups" not in answer["messages"][0]


def test_what_became_of_a_message_is_reported_for_each_group(rig: Rig, client: Client) -> None:
    ids = send(client, *({"body": n} for n in range(6)))
    given = rig.pull(max_messages=5)
    rig.settle(Settlement(token=given.token, acks=(given.part(0),)))
    rejects = (Reject(range=given.part(1), reason="no such flight"),)
    rig.settle(Settlement(token=given.token, rejects=rejects))
    nacks = (Nack(range=given.part(2), delay_ms=5_000, error="TimeoutError"),)
    rig.settle(Settlement(token=given.token, nacks=nacks))
    rig.pull(max_messages=1, group="late")

    def states(number: int) -> dict[str, dict[str, Any]]:
        (found,) = client.get(f"/v1/messages?id={ids[number]}").json["messages"]
        return {one.pop("group"): one for one in found["groups"]}

    assert states(0)[GROUP] == {"state": "passed"}
    held = states(0)["late"]
    assert (held["state"], held["consumer"], held["attempts"]) == ("in flight", "one", 1)
    assert held["at_ms"] > rig.now_ms
    dead = states(1)[GROUP]
    assert (dead["state"], dead["reason"], dead["error"]) == ("dead", "rejected", "no such flight")
    waiting = states(2)[GROUP]
    assert (waiting["state"], waiting["attempts"]) == ("waiting", 1)
    assert (waiting["at_ms"], waiting["error"]) == (rig.now_ms + 5_000, "TimeoutError")
    assert states(3)[GROUP]["state"] == "in flight"
    assert {name: one["state"] for name, one in states(5).items()} == {
        GROUP: "not yet",
        "late": "not yet",
    }


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("id=", "message_id"),
        ("id=" + "g" * 32, "message_id"),
        ("subject=orders&key=", "key"),
        ("subject=orders&key=" + "k" * 256, "key"),
        ("subject=..&key=k", "subject"),
        ("key=k", "subject"),
        ("subject=orders&key=k&from=yesterday", "from"),
        ("subject=orders&key=k&to=-1", "to"),
        ("subject=orders&key=k&count=1001", "count"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(client: Client, query: str, field: str) -> None:
    reply = client.get(f"/v1/messages?{query}")
    assert reply.status == 422
    assert error_of(reply).field == field


def test_nothing_found_is_an_answer(client: Client) -> None:
    answer = client.get("/v1/messages?id=" + "0" * 32).json
    assert (answer["messages"], answer["is_complete"]) == ([], True)
    assert client.get("/v1/messages?subject=none&key=k").json["messages"] == []


def test_more_searches_than_the_bound_are_asked_to_come_back(
    rig: Rig, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = Event()

    def slow(message_id: bytes, count: int, sees: object) -> SearchResult:
        assert may_end.wait(30)
        return SearchResult()

    monkeypatch.setattr(rig.store.search, "by_id", slow)

    async def ask() -> list[int]:
        url = "/v1/messages?id=" + "0" * 32
        calls = [asyncio.ensure_future(client.call("GET", url)) for _ in range(find.SEARCHES_MAX)]
        await asyncio.sleep(0)
        refused = await client.call("GET", url)
        may_end.set()
        return [refused.status, *[reply.status for reply in await asyncio.gather(*calls)]]

    assert asyncio.run(ask()) == [429, *[200] * find.SEARCHES_MAX]


def test_bytes_and_records_that_cannot_be_read_are_shown(client: Client) -> None:
    (wanted,) = send(client, {"body_base64": "AP8="})
    (found,) = client.get(f"/v1/messages?id={wanted}").json["messages"]
    assert found["body_base64"] == "AP8="
    assert json.dumps(found)
