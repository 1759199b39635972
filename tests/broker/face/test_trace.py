"""`GET /v1/messages/{id}/trace`: the life of one message, without sockets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qmq_broker.service import trace
from qmq_client.commands.message import story_lines, story_of, what_is_missing
from qmq_client.commands.table import time_text
from tests.broker.face.asgi import Client
from tests.broker.service.rig import GROUP, STORE, SUBJECT, Rig


def send(client: Client, *bodies: str, **fields: Any) -> list[str]:
    messages = [{"subject": SUBJECT, "body": body, **fields} for body in bodies]
    return list(client.post("/v1/send", {"messages": messages}).json["message_ids"])


def told(group: dict[str, Any]) -> list[tuple[str, str, int]]:
    """Event, consumer, attempt."""
    return [(e["event"], e.get("consumer", ""), e.get("attempt", 0)) for e in group["events"]]


def test_a_trace_tells_who_got_a_message_when_and_how_each_attempt_ended(
    rig: Rig, client: Client
) -> None:
    _, wanted, _ = send(client, "before", "wanted", "behind")
    stored_at_ms = rig.now_ms
    rig.pull("silent", lease_ms=1_000)
    rig.pass_ms(1_000)
    rig.pass_ms(1_000)
    second = rig.pull("two")
    rig.settle(second.extend(5_000), "two")
    rig.settle(second.nack(delay_ms=500, error="ValueError"), "two")
    rig.restart()
    rig.pass_ms(500)
    third = rig.pull("three")
    rig.settle(third.ack(third.part(0), third.part(2)), "three")
    rig.settle(third.ack(third.part(1)), "three")
    rig.pull(group="other")
    answer = Client(rig).get(f"/v1/messages/{wanted}/trace").json
    assert (answer["message_id"], answer["is_complete"]) == (wanted, True)
    (place,) = answer["places"]
    assert (place["subject"], place["sequence"]) == (SUBJECT, 1)
    assert place["stored_at_ms"] == stored_at_ms
    mine, other = place["groups"]
    assert told(mine) == [
        ("given", "silent", 1),
        ("lease ended", "silent", 1),
        ("given", "two", 2),
        ("extended", "two", 0),
        ("nacked", "two", 2),
        ("given", "three", 3),
        ("acked", "three", 3),
    ]
    assert mine["events"][4]["error"] == "ValueError"
    times = [event["at_ms"] - stored_at_ms for event in mine["events"]]
    assert times == [0, 1_000, 2_000, 2_000, 2_000, 2_500, 2_500]
    assert (mine["now"]["state"], other["now"]["state"]) == ("passed", "in flight")
    assert told(other) == [("given", "one", 1)]


def test_a_trace_tells_of_death_replay_and_removal(rig: Rig, client: Client) -> None:
    (wanted,) = send(client, "wanted")
    rig.settle(rig.pull().reject("no"))
    where = {"subject": SUBJECT, "group": GROUP}
    client.post("/v1/dead/replay", where)
    rig.settle(rig.pull().reject("never"))
    client.post("/v1/dead/purge", where)
    client.post("/v1/groups/seek", {**where, "to": "earliest"})
    client.post("/v1/groups/remove", where)
    (place,) = client.get(f"/v1/messages/{wanted}/trace").json["places"]
    (group,) = place["groups"]
    names = ["given", "rejected", "dead", "replayed", "given", "rejected", "dead"]
    assert [event["event"] for event in group["events"]] == [*names, "purged", "moved", "ended"]
    assert group["now"] is None


def test_a_trace_of_an_ordered_group_tells_that_a_message_was_held(
    rig: Rig, client: Client
) -> None:
    _, wanted = send(client, "a1", "a2", key="a")
    rig.pull(ordered=True)
    (place,) = client.get(f"/v1/messages/{wanted}/trace").json["places"]
    (group,) = place["groups"]
    assert ([event["event"] for event in group["events"]], group["now"]["state"]) == (
        ["held"],
        "held",
    )


def test_a_trace_that_does_not_reach_back_says_so_and_the_state_knows_the_attempts(
    rig: Rig, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    (wanted,) = send(client, "wanted")
    rig.settle(rig.pull().nack(delay_ms=0, error="early"))
    rig.settle(rig.pull().nack(delay_ms=60_000, error="late"))
    monkeypatch.setattr(trace, "READ_BYTES_MAX", 1)
    answer = client.get(f"/v1/messages/{wanted}/trace").json
    assert answer["is_complete"] is False
    (place,) = answer["places"]
    assert place["history_until_ms"] == place["stored_at_ms"]
    (group,) = place["groups"]
    assert group["events"] == []
    assert [one["error"] for one in group["now"]["history"]] == ["early", "late"]


def test_a_trace_says_from_when_on_actions_are_still_there(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "data", store_options=replace(STORE, action_segment_bytes=1024))
    client = Client(rig)
    (wanted,) = send(client, "wanted")
    rig.settle(rig.pull().nack(delay_ms=0, error="early"))
    for _ in range(40):
        rig.pass_ms(60_000)
        other = rig.pull(group="other", max_attempts=100)
        rig.settle(other.nack(delay_ms=0), group="other")
        offset, content = rig.broker.delivery.snapshot(rig.now_ms)
        rig.store.actions.write_snapshot(offset, content())
    rig.settle(rig.pull().ack())
    answer = client.get(f"/v1/messages/{wanted}/trace").json
    (place,) = answer["places"]
    steps = story_of(answer["message_id"], place)
    (missing,) = what_is_missing(place)
    rig.close()
    assert answer["is_complete"] is False
    assert rig.now_ms - 2_400_000 < place["history_from_ms"] < rig.now_ms
    told = [(step["what"], step.get("error")) for step in steps if step["group"] == GROUP]
    assert told == [("given", None), ("acked", None), ("passed", None)]
    assert time_text(place["history_from_ms"]) in missing


def test_attempts_that_only_the_group_remembers_are_part_of_the_story() -> None:
    def past(attempt: int, at_ms: int) -> dict[str, Any]:
        known = {"attempt": attempt, "consumer": "one", "outcome": "nacked", "error": "no"}
        return {**known, "given_at_ms": at_ms, "ended_at_ms": at_ms + 1}

    given = {"at_ms": 20, "event": "given", "attempt": 2, "consumer": "one", "until_ms": 99}
    back = {"at_ms": 21, "event": "nacked", "attempt": 2, "consumer": "one", "error": "no"}
    now = {"state": "waiting", "attempts": 2, "at_ms": 50, "history": [past(1, 10), past(2, 20)]}
    place = {
        "subject": SUBJECT,
        "sequence": 3,
        "stored_at_ms": 5,
        "groups": [{"group": GROUP, "events": [given, back], "now": now}],
        "history_from_ms": 15,
    }
    steps = story_of("ab" * 16, place)
    assert [(step["at_ms"], step["what"]) for step in steps] == [
        (5, "stored"),
        (10, "given"),
        (11, "nacked"),
        (20, "given"),
        (21, "nacked"),
        (50, "waiting"),
    ]
    head, *lines = story_lines(steps)
    assert head.split() == ["at", "group", "what", "attempt", "consumer", "why"]
    assert "now waiting" in lines[-1]


def test_a_trace_of_nobody_is_not_found_and_of_nonsense_refused(client: Client) -> None:
    assert client.get(f"/v1/messages/{'0' * 32}/trace").status == 404
    assert client.get("/v1/messages/nonsense/trace").status == 422
