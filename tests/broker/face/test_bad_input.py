"""Requests that make no sense: refused with a status, a code and a reason, and nothing is changed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from qmq_client.wire.requests import PullRequest, encode_control
from tests.broker.face.asgi import FRAME, JSON, Client, Wire, error_of, make_scope
from tests.broker.service.rig import GROUP, SUBJECT, Rig, make_frame

PULL: dict[str, Any] = {"subject": SUBJECT, "group": GROUP, "consumer": "one"}


REFUSED: list[tuple[str, str, dict[str, Any], int, str]] = [
    ("nothing", "/v1/send", {"body": b""}, 400, "protocol_error"),
    ("no list", "/v1/send", {"body": {}}, 422, "invalid_message"),
    ("no messages", "/v1/send", {"body": {"messages": []}}, 422, "invalid_message"),
    ("bad subject", "/v1/send", {"body": {"messages": [{"subject": "../x"}]}}, 422, "invalid_name"),
    ("newline", "/v1/send", {"body": {"messages": [{"subject": "a\n"}]}}, 422, "invalid_name"),
    (
        "unknown field",
        "/v1/send",
        {"body": {"messages": [{"subject": "a", "delay": 5}]}},
        422,
        "invalid_message",
    ),
    (
        "both bodies",
        "/v1/send",
        {"body": {"messages": [{"subject": "a", "body": 1, "body_base64": ""}]}},
        422,
        "invalid_message",
    ),
    (
        "bad base64",
        "/v1/send",
        {"body": {"messages": [{"subject": "a", "body_base64": "%"}]}},
        422,
        "not_encodable",
    ),
    (
        "bad id",
        "/v1/send",
        {"body": {"messages": [{"subject": "a", "message_id": "1"}]}},
        422,
        "invalid_message",
    ),
    (
        "lone surrogate",
        "/v1/send",
        {"body": b'{"messages":[{"subject":"a","body":"\\ud800"}]}'},
        400,
        "protocol_error",
    ),
    (
        "half a key",
        "/v1/send",
        {"body": b'{"messages":[{"subject":"a","body":{"\\udfff":1}}]}'},
        400,
        "protocol_error",
    ),
    ("NaN", "/v1/send", {"body": b'{"messages":[{"subject":"a","body":NaN}]}'}, 400, "protocol_error"),
    ("1e999", "/v1/send", {"body": b'{"messages":[{"subject":"a","body":1e999}]}'}, 400, "protocol_error"),
    ("a name that is not UTF-8", "/v1/send", {"body": b'{"messages":[{"subject":"a","body":{"\xff":1}}]}'}, 400, "protocol_error"),
    ("1e999 within", "/v1/send", {"body": b'{"messages":[{"subject":"a","body":[{"b":1e999}]}]}'}, 400, "protocol_error"),
    ("UTF-16", "/v1/send", {"body": '{"messages":[]}'.encode("utf-16")}, 400, "protocol_error"),
    ("byte order mark", "/v1/send", {"body": b"\xef\xbb\xbf{}"}, 400, "protocol_error"),
    ("not UTF-8", "/v1/send", {"body": b'{"messages":[{"subject":"a","body":"\xff"}]}'}, 400, "protocol_error"),
    ("deep", "/v1/send", {"body": b"[" * 100_000}, 400, "protocol_error"),
    ("long number", "/v1/send", {"body": b"9" * 50_000}, 422, "invalid_message"),
    ("compressed", "/v1/send", {"body": b"", "headers": [(b"content-encoding", b"gzip")]}, 415, "content_encoding"),
    ("a form", "/v1/send", {"body": b"", "content_type": b"text/plain"}, 415, "content_type"),
    ("no type", "/v1/send", {"body": b"", "content_type": b""}, 415, "content_type"),
    ("no length", "/v1/send", {"body": b"", "has_length": False}, 411, "length_required"),
    ("a frame of nothing", "/v1/send", {"body": b"QMQF", "content_type": FRAME}, 400, "protocol_error"),
    ("a control frame", "/v1/send", {"body": encode_control(PullRequest(**PULL)), "content_type": FRAME}, 400, "protocol_error"),
    ("bad group", "/v1/pull", {"body": {**PULL, "group": ""}}, 422, "invalid_name"),
    ("no consumer", "/v1/pull", {"body": {"subject": "a", "group": "b"}}, 422, "invalid_message"),
    ("a negative count", "/v1/pull", {"body": {**PULL, "max_messages": -1}}, 422, "invalid_message"),
    ("a huge count", "/v1/pull", {"body": {**PULL, "max_messages": 2**70}}, 422, "invalid_message"),
    ("too long a lease", "/v1/pull", {"body": {**PULL, "lease_ms": 10**12}}, 422, "invalid_message"),
    ("a number as text", "/v1/pull", {"body": {**PULL, "lease_ms": "1"}}, 422, "invalid_message"),
    ("a send to pull", "/v1/pull", {"body": make_frame([b"a"]), "content_type": FRAME}, 400, "protocol_error"),
    ("no settlements", "/v1/settle", {"body": PULL}, 422, "invalid_message"),
    (
        "an empty range",
        "/v1/settle",
        {"body": {**PULL, "settlements": [{"token": 1, "acks": [[1, 1]]}]}},
        422,
        "invalid_message",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "request_", "status", "code"),
    [case[1:] for case in REFUSED],
    ids=[case[0] for case in REFUSED],
)
def test_bad_input_is_a_refusal_that_says_why(
    rig: Rig, client: Client, path: str, request_: dict[str, Any], status: int, code: str
) -> None:
    given = dict(request_)
    reply = client.post(path, given.pop("body"), **given)
    answer = error_of(reply)
    assert (reply.status, answer.code) == (status, code)
    assert answer.message
    assert rig.store.subjects() == []
    assert rig.broker.delivery.groups() == []


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "HEAD", "BREW"])
def test_a_hot_route_takes_only_posts(client: Client, method: str) -> None:
    reply = asyncio.run(client.call(method, "/v1/send"))
    assert (reply.status, reply.headers[b"allow"]) == (405, b"POST")


@pytest.mark.parametrize(
    "path", ["/", "/v1/sent", "/v1/send/", "/v2/send", "/v1/%2e%2e/etc", "/docs", "/metrics"]
)
def test_an_unknown_path_is_not_found_and_says_so_in_json(client: Client, path: str) -> None:
    reply = client.post(path, b"{}")
    assert reply.status in (404, 405)
    assert error_of(reply).code in ("unknown_path", "method_not_allowed")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/messages?subject=mine&subject=theirs",
        "/v1/groups?group=a&subject=mine&group=a",
        "/v1/files/read?path=FORMAT&first=0&count=1&count=2",
        "/healthz?a=1&a=2",
    ],
)
def test_a_name_given_twice_in_a_query_is_refused(client: Client, path: str) -> None:
    """Who checks the caller's rights and who answers might read another one of them."""
    reply = client.get(path)
    assert (reply.status, error_of(reply).limit) == (422, "each name once")


@pytest.mark.parametrize("path", ["/v1/files/", "/v1/subjects//", "/healthz/"])
def test_nobody_is_sent_elsewhere(client: Client, path: str) -> None:
    reply = client.get(path, headers=[(b"host", b"elsewhere")])
    assert (reply.status, error_of(reply).code) == (404, "unknown_path")
    assert b"location" not in reply.headers


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/dead?subject=a&group=b", 404),
        ("/v1/dead?subject=a", 422),
        ("/v1/dead", 422),
        ("/v1/messages?subject=nothing", 404),
        ("/v1/messages?subject=a&first=-1", 422),
        ("/v1/messages?subject=a&count=99999", 422),
        ("/v1/messages?subject=a&first=" + "9" * 50_000, 422),
        ("/v1/messages?subject=a&first=%D9%A1", 422),
        ("/v1/groups?subject=%00", 422),
        ("/v1/groups?subject=%ff", 422),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(client: Client, path: str, status: int) -> None:
    reply = client.get(path)
    assert reply.status == status
    assert error_of(reply).code


def test_an_error_that_nobody_foresaw_is_answered_in_our_words_and_logged_once(
    rig: Rig, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("secret inside")

    rig.broker.query.subjects = fail  # type: ignore[assignment,method-assign]  # the fault
    reply = client.get("/v1/subjects")
    answer = error_of(reply)
    assert (reply.status, answer.code) == (500, "internal")
    assert b"secret inside" not in reply.body
    (record,) = caplog.records
    assert "request_failed" in record.message
    assert "RuntimeError" in record.message
    assert client.get("/healthz").status == 200


@pytest.mark.parametrize("path", ["/v1/state", "/v1/groups/pause", "/v1/send"])
def test_a_client_that_goes_away_in_its_body_is_nobodys_failure(
    client: Client, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    async def call() -> Wire:
        gone = asyncio.Event()
        gone.set()
        wire = Wire([], gone)
        scope = make_scope("POST", path, [(b"content-type", JSON), (b"content-length", b"10")])
        await wire.serve(client.app, scope)
        return wire

    assert asyncio.run(call()).written == b""
    assert caplog.records == []
