"""Requests and answers, without sockets."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from qmq_broker.errors import DiskError, PoisonedError
from qmq_broker.face.limits import FaceLimits
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.service.serving import Serving
from qmq_broker.storage.files.os_file import OsFile
from qmq_client.group.actions import Action, Pulled
from qmq_client.wire.deliveries import parse_deliveries
from qmq_client.wire.frame import FrameKind, build_message_frame, parse_message_frame
from qmq_client.wire.marks import Marks, pack_marks
from qmq_client.wire.record import BodyKind, Record, decode_record, encode_record
from qmq_client.wire.requests import (
    CONTROL_BYTES_MAX,
    ErrorAnswer,
    PullRequest,
    SendAnswer,
    SettleAnswer,
    Settlement,
    SettleRequest,
    decode_control,
    encode_control,
)
from tests.broker.face.asgi import FRAME, JSON, Client, Reply, Wire, error_of, make_scope
from tests.broker.service.rig import GROUP, SUBJECT, Rig, make_frame, new_ids

PULL: dict[str, Any] = {"subject": SUBJECT, "group": GROUP, "consumer": "one"}


def test_a_frame_goes_in_and_its_records_come_out_as_frames(client: Client) -> None:
    frame = make_frame([b"a", b"b"])
    reply = client.post("/v1/send", frame, FRAME)
    assert (reply.status, reply.headers[b"content-type"]) == (200, FRAME)
    answer = decode_control(reply.body, SendAnswer)
    header = parse_message_frame(frame).header
    assert (answer.frame_crc, answer.count, answer.duplicates) == (header.body_crc, 2, 0)
    assert answer.durability == "durable"
    assert [(p.subject, p.first_sequence, p.count) for p in answer.places] == [(SUBJECT, 0, 2)]
    reply = client.post("/v1/pull", encode_control(PullRequest(**PULL)), FRAME)
    given = parse_deliveries(reply.body, frame_bytes_max=2**20)
    assert [decode_record(SUBJECT, one.record).body for one in given.messages] == [b"a", b"b"]
    settle = SettleRequest(
        **PULL, settlements=(Settlement(token=given.head.token, acks=((0, 2),)),)
    )
    reply = client.post("/v1/settle", encode_control(settle), FRAME)
    assert decode_control(reply.body, SettleAnswer) == SettleAnswer(settled=2)


def test_json_goes_in_and_comes_out_as_it_was(client: Client) -> None:
    binary = base64.b64encode(b"\0\xff").decode()
    messages: list[dict[str, Any]] = [
        {"subject": SUBJECT, "body": {"b": [1, 2.50, None], "a": "ü"}, "key": "k", "tags": ["t"]},
        {"subject": SUBJECT, "body": "a text", "headers": {"h": "v"}},
        {"subject": SUBJECT, "body_base64": binary, "message_id": "0" * 31 + "1"},
        {"subject": SUBJECT},
        {"subject": SUBJECT, "body": None},
    ]
    reply = client.post("/v1/send", {"messages": messages})
    assert reply.status == 200
    ids = reply.json["message_ids"]
    assert len(set(ids)) == 5
    assert ids[2] == "0" * 31 + "1"
    out = client.post("/v1/pull", PULL).json["messages"]
    assert [message["message_id"] for message in out] == ids
    assert out[0]["body"] == messages[0]["body"]
    assert (out[0]["key"], out[0]["tags"]) == ("k", ["t"])
    assert (out[1]["body"], out[1]["headers"]) == ("a text", {"h": "v"})
    assert out[2]["body_base64"] == binary
    assert out[3]["body_base64"] == ""
    assert out[4]["body"] is None
    assert [(message["sequence"], message["attempt"]) for message in out] == [
        (number, 1) for number in range(5)
    ]


def test_the_bytes_of_a_json_body_are_kept_as_given(rig: Rig, client: Client) -> None:
    body = b'{"z": 1.50,  "a":"\\u00fc"}'
    client.post("/v1/send", b'{"messages":[{"subject":"orders","body":' + body + b"}]}")
    (record,) = rig.pull().records
    decoded = decode_record(SUBJECT, record)
    assert (decoded.body_kind, decoded.body) == (BodyKind.JSON, body)


def test_a_json_send_of_two_subjects_lists_its_ids_in_the_order_of_the_request(
    client: Client,
) -> None:
    messages = [{"subject": name, "body": name} for name in ("a", "b", "a")]
    answer = client.post("/v1/send", {"messages": messages}).json
    assert [place["count"] for place in answer["places"]] == [2, 1]
    first = client.post("/v1/pull", {**PULL, "subject": "a"}).json["messages"]
    second = client.post("/v1/pull", {**PULL, "subject": "b"}).json["messages"]
    ids = [first[0]["message_id"], second[0]["message_id"], first[1]["message_id"]]
    assert answer["message_ids"] == ids


def test_accept_chooses_the_encoding_of_the_answer(client: Client) -> None:
    accept_json = [(b"accept", JSON)]
    reply = client.post("/v1/send", make_frame([b"a"]), FRAME, headers=accept_json)
    assert reply.json["count"] == 1
    reply = client.post("/v1/pull", PULL, headers=[(b"accept", FRAME)])
    assert parse_deliveries(reply.body, frame_bytes_max=2**20).head.subject == SUBJECT
    reply = client.post("/v1/pull", b"{", headers=[(b"accept", FRAME)])
    assert decode_control(reply.body, ErrorAnswer).code == "protocol_error"


def test_a_record_that_cannot_be_decoded_is_shown_and_not_hidden(rig: Rig, client: Client) -> None:
    ids = new_ids()
    good = Record(message_id=next(ids), subject=SUBJECT, body=b"{", born_at_ms=1)
    lying = Record(
        message_id=next(ids), subject=SUBJECT, body=b"{", body_kind=BodyKind.JSON, born_at_ms=1
    )
    frame = build_message_frame({SUBJECT: [encode_record(good), encode_record(lying)]})
    client.post("/v1/send", frame, FRAME)
    out = client.post("/v1/pull", PULL).json["messages"]
    assert [message["body_base64"] for message in out] == ["ew==", "ew=="]


def test_B10_a_body_over_the_limit_is_refused_before_it_is_read(rig: Rig, client: Client) -> None:
    wire = Wire([])
    scope = make_scope(
        "POST", "/v1/send", [(b"content-type", FRAME), (b"content-length", b"99999999")]
    )
    asyncio.run(wire.serve(client.app, scope))
    assert wire.reply().status == 413
    reply = client.post("/v1/pull", b" " * (CONTROL_BYTES_MAX + 1))
    assert (reply.status, error_of(reply).limit) == (413, f"{CONTROL_BYTES_MAX} bytes")


def test_B10_a_body_without_length_is_counted_while_it_comes(client: Client) -> None:
    part = b" " * 400_000
    reply = asyncio.run(
        client.call(
            "POST",
            "/v1/pull",
            headers=[(b"transfer-encoding", b"chunked")],
            has_length=False,
            parts=[part] * 5,
        )
    )
    assert reply.status == 413
    whole = json.dumps(PULL).encode()
    reply = asyncio.run(
        client.call(
            "POST",
            "/v1/pull",
            headers=[(b"transfer-encoding", b"chunked")],
            has_length=False,
            parts=[whole[:10], whole[10:], b""],
        )
    )
    assert reply.status == 200


def test_B10_too_many_requests_at_once_are_asked_to_come_back(rig: Rig) -> None:
    client = Client(rig, FaceLimits(requests=1, bodies_bytes=1_000))

    async def two() -> tuple[Reply, Reply]:
        frame = make_frame([b"a"])
        client.is_writing = False
        first = asyncio.ensure_future(client.call("POST", "/v1/send", frame, content_type=FRAME))
        while not rig.broker.writer.waiting_bytes:
            await asyncio.sleep(0)
        second = await client.call("POST", "/v1/pull", json.dumps(PULL).encode())
        client.is_writing = True
        return await first, second

    first, second = asyncio.run(two())
    assert (first.status, second.status) == (200, 503)
    assert second.headers[b"retry-after"] == b"1"
    reply = client.post("/v1/send", make_frame([b"x" * 1_000]), FRAME)
    assert (reply.status, reply.headers[b"retry-after"]) == (503, b"1")


def test_an_id_with_other_content_is_a_conflict_that_names_it(client: Client) -> None:
    client.post("/v1/send", make_frame([b"one"], ids=new_ids(3)), FRAME)
    reply = client.post("/v1/send", make_frame([b"two"], ids=new_ids(3)), FRAME)
    assert reply.status == 409
    assert error_of(reply).message_id == next(new_ids(3)).hex()


def test_a_pull_waits_for_a_message_and_is_given_it(rig: Rig, client: Client) -> None:
    async def wait_and_send() -> Reply:
        pull = json.dumps({**PULL, "wait_ms": 40_000}).encode()
        waiting = asyncio.ensure_future(client.call("POST", "/v1/pull", pull))
        while not rig.broker.delivery.waiting.count:
            await asyncio.sleep(0)
        await client.call("POST", "/v1/send", make_frame([b"late"]), content_type=FRAME)
        return await waiting

    reply = asyncio.run(asyncio.wait_for(wait_and_send(), 20))
    assert [base64.b64decode(m["body_base64"]) for m in reply.json["messages"]] == [b"late"]
    assert rig.broker.delivery.waiting.count == 0


def test_a_pull_that_got_nothing_is_answered_when_its_time_is_up(rig: Rig, client: Client) -> None:
    reply = client.post("/v1/pull", {**PULL, "wait_ms": 20})
    assert (reply.status, reply.json["messages"]) == (200, [])


def test_C8_a_stopping_broker_answers_waiting_pulls_at_once(rig: Rig, client: Client) -> None:
    async def wait_and_stop() -> Reply:
        pull = json.dumps({**PULL, "wait_ms": 40_000}).encode()
        waiting = asyncio.ensure_future(client.call("POST", "/v1/pull", pull))
        while not rig.broker.delivery.waiting.count:
            await asyncio.sleep(0)
        assert rig.broker.drain("SIGTERM") == 1
        return await waiting

    reply = asyncio.run(asyncio.wait_for(wait_and_stop(), 20))
    assert (reply.status, reply.json["messages"]) == (200, [])
    reply = client.post("/v1/send", make_frame([b"a"]), FRAME)
    assert (reply.status, error_of(reply).code) == (503, "unavailable")
    assert int(reply.headers[b"retry-after"]) >= 1


def test_a_wake_that_its_pull_cannot_use_is_passed_on(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "data", limits=ServiceLimits(in_flight_per_consumer=1))
    client = Client(rig)

    async def pull(consumer: str) -> asyncio.Future[Reply]:
        count = rig.broker.delivery.waiting.count
        body = json.dumps({**PULL, "consumer": consumer, "wait_ms": 40_000}).encode()
        waiting = asyncio.ensure_future(client.call("POST", "/v1/pull", body))
        while rig.broker.delivery.waiting.count == count:
            await asyncio.sleep(0)
        return waiting

    async def wait_and_send() -> list[Reply]:
        waiting = [await pull("full"), await pull("full"), await pull("free")]
        for body in (b"a", b"b"):
            await client.call("POST", "/v1/send", make_frame([body]), content_type=FRAME)
        return list(await asyncio.gather(*waiting))

    first, refused, given = asyncio.run(asyncio.wait_for(wait_and_send(), 20))
    assert (first.status, refused.status, given.status) == (200, 429, 200)
    assert len(given.json["messages"]) == 1
    rig.close()


def test_a_client_that_went_away_while_waiting_is_given_nothing(rig: Rig, client: Client) -> None:
    async def wait_and_leave() -> Wire:
        is_gone = asyncio.Event()
        pull = json.dumps({**PULL, "wait_ms": 40_000}).encode()
        wire = Wire([pull], is_gone)
        scope = make_scope("POST", "/v1/pull", [(b"content-type", JSON), (b"content-length", b"1")])
        waiting = asyncio.ensure_future(wire.serve(client.app, scope))
        while not rig.broker.delivery.waiting.count:
            await asyncio.sleep(0)
        is_gone.set()
        await waiting
        return wire

    assert asyncio.run(asyncio.wait_for(wait_and_leave(), 20)).written == b""
    assert rig.broker.delivery.waiting.count == 0
    rig.send(b"a")
    assert rig.pull("two").bodies == [b"a"]


def test_F37_B10_too_many_waiting_pulls_are_asked_to_come_back(rig: Rig, client: Client) -> None:
    rig.broker.delivery.waiting._pulls_max = 0
    reply = client.post("/v1/pull", {**PULL, "wait_ms": 1_000})
    assert (reply.status, error_of(reply).code) == (429, "busy")
    assert int(reply.headers[b"retry-after"]) >= 1


def test_health_says_alive_and_ready_says_why_not(rig: Rig, client: Client) -> None:
    assert client.get("/healthz").json == {"status": "alive"}
    ready = client.get("/readyz")
    assert (ready.status, ready.json["status"]) == (200, "serving")
    assert ready.json["takes_messages"] is True
    rig.broker.serving.become(Serving.POISONED, "sync failed")
    ready = client.get("/readyz")
    assert (ready.status, ready.json["status"]) == (503, "poisoned")
    assert ready.json["reason"] == "sync failed"
    assert client.get("/healthz").status == 200
    reply = client.post("/v1/pull", PULL)
    assert (reply.status, error_of(reply).code) == (503, "unavailable")


def test_people_see_subjects_groups_dead_letters_and_messages(rig: Rig, client: Client) -> None:
    rig.send(b"a", b"b", b"c")
    rig.settle(rig.pull(max_messages=1, max_attempts=1).reject("no"))
    rig.pull(max_messages=1, max_attempts=1)
    assert client.get("/v1/subjects").json["subjects"] == [
        {"subject": SUBJECT, "first_sequence": 0, "next_sequence": 3, "delayed": 0}
    ]
    (group,) = client.get(f"/v1/groups?subject={SUBJECT}").json["groups"]
    expected = {"cursor": 2, "lag": 1, "in_flight": 1, "dead": 1, "redelivery": 0}
    assert {name: group[name] for name in expected} == expected
    assert client.get("/v1/groups?group=other").json["groups"] == []
    (letter,) = client.get(f"/v1/dead?subject={SUBJECT}&group={GROUP}").json["dead"]
    assert (letter["sequence"], letter["reason"], letter["error"]) == (0, "rejected", "no")
    messages = client.get(f"/v1/messages?subject={SUBJECT}&first=1&count=1").json["messages"]
    assert [(m["sequence"], base64.b64decode(m["body_base64"])) for m in messages] == [(1, b"b")]


def test_damage_found_at_delivery_is_loud_and_hands_out_nothing(
    rig: Rig, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    rig.send(b"a body to be damaged")
    (segment,) = (rig.directory / "commitlog").iterdir()
    data = bytearray(segment.read_bytes())
    data[data.index(b"damaged")] ^= 1
    segment.write_bytes(data)
    reply = client.post("/v1/pull", PULL)
    assert (reply.status, error_of(reply).code) == (500, "corruption")
    assert "qmq store verify" in error_of(reply).remedy
    (group,) = rig.broker.query.groups()
    assert (group.cursor, group.in_flight) == (0, 0)
    client.post("/v1/pull", PULL)
    client.post("/v1/pull", {**PULL, "settlements": [{"token": 1, "acks": [[0, 1]]}]})
    (line,) = [one.getMessage() for one in caplog.records]
    assert line.startswith("request_failed path=/v1/pull code=corruption reason=")


def test_a_pull_that_meets_a_bad_sector_is_refused_logged_once_and_hands_out_nothing(
    rig: Rig, client: Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.send(b"a")

    def bad_sector(*_: object) -> None:
        raise DiskError(operation="read", path="commitlog/0", reason="Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(OsFile, "read", bad_sector)
        for _ in range(3):
            reply = client.post("/v1/pull", PULL)
            assert (reply.status, error_of(reply).code) == (503, "disk")
    (line,) = [one.getMessage() for one in caplog.records]
    assert line.startswith("request_failed path=/v1/pull code=disk reason=")
    assert "Input/output error" in line
    (group,) = rig.broker.query.groups()
    assert (group.cursor, group.in_flight) == (0, 0)


def test_a_disk_that_fails_beside_the_hot_routes_is_logged_once(
    rig: Rig, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise DiskError(operation="read", path="letters/1", reason="I/O error")

    rig.broker.query.dead_letters = broken  # type: ignore[method-assign,assignment]  # the fault
    for _ in range(3):
        reply = client.get(f"/v1/dead?subject={SUBJECT}&group={GROUP}")
        assert (reply.status, error_of(reply).code) == (503, "disk")
    (line,) = [one.getMessage() for one in caplog.records]
    assert line.startswith("request_failed path=/v1/dead code=disk reason=")


def test_an_error_nobody_foresaw_says_nothing_about_the_inside(
    rig: Rig, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("secret\nplace")

    rig.broker.delivery.check_settle = broken  # type: ignore[method-assign,assignment]  # the fault
    with caplog.at_level(logging.ERROR):
        reply = client.post("/v1/settle", {**PULL, "settlements": []})
    assert reply.status == 500
    assert b"secret" not in reply.body
    assert b"Traceback" not in reply.body
    assert "ZeroDivisionError" in caplog.text
    assert "secret\\nplace" in caplog.messages[0]


def test_an_action_log_that_fails_poisons_the_broker(rig: Rig, client: Client) -> None:
    def broken(_: object) -> None:
        raise PoisonedError("the disk is gone")

    rig.send(b"a")
    rig.store.actions.append = broken  # type: ignore[method-assign,assignment]  # the fault
    reply = client.post("/v1/pull", PULL)
    assert (reply.status, error_of(reply).code) == (503, "poisoned")
    assert rig.broker.serving.state is Serving.POISONED


def test_a_frame_of_the_broker_s_own_is_refused_by_name(client: Client) -> None:
    record = encode_record(
        Record(message_id=bytes(16), subject="a", body=b"", born_at_ms=1, due_at_ms=2)
    )
    marks = pack_marks(FrameKind.RELEASED, Marks(buckets=[0], sequences=[0], sources=[0]))
    frame = build_message_frame({"a": [record]}, kind=FrameKind.RELEASED, marks=marks)
    reply = client.post("/v1/send", frame, FRAME)
    assert (reply.status, error_of(reply).field) == (422, "frame kind")


@pytest.mark.parametrize("wait_ms", [0, 40_000])
def test_C3_a_pull_whose_outcomes_were_taken_is_not_refused(
    rig: Rig, client: Client, wait_ms: int
) -> None:
    """A refusal says that nothing was carried out: its nack would be stale when it comes again."""
    rig.send(b"a")
    given = client.post("/v1/pull", PULL).json
    nack = {"range": [0, 1], "delay_ms": 3_600_000, "error": "not now"}
    settlement = {"token": given["token"], "nacks": [nack]}
    other = {**PULL, "ordered": True, "wait_ms": wait_ms}
    reply = client.post("/v1/pull", {**other, "settlements": [settlement]})
    assert (reply.status, reply.json["messages"], reply.json["stale"]) == (200, [], [])
    (group,) = rig.broker.query.groups(subject=PULL["subject"], group=PULL["group"])
    assert (group.in_flight, group.redelivery) == (0, 1)
    assert client.post("/v1/pull", other).status == 409


def test_B5_a_pull_that_meets_a_failed_write_is_refused_whatever_outcomes_it_brought(
    rig: Rig, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.send(b"a", b"b")
    given = client.post("/v1/pull", {**PULL, "max_messages": 1}).json
    append = rig.store.actions.append

    def refuse_hand_outs(actions: Sequence[Action]) -> None:
        if any(isinstance(action, Pulled) for action in actions):
            raise DiskError(operation="write", path="actionlog", reason="I/O error")
        append(actions)

    monkeypatch.setattr(rig.store.actions, "append", refuse_hand_outs)
    settlement = {"token": given["token"], "acks": [[0, 1]]}
    reply = client.post("/v1/pull", {**PULL, "settlements": [settlement]})
    assert (reply.status, reply.json["code"]) == (503, "poisoned")
