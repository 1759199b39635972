"""A client that says that it sends no more, and waits for its answers."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.kit.broker_process import BrokerProcess

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"


def post(path: str, body: object, *, version: str = "1.1") -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/{version}\r\nHost: a\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


SEND = {"messages": [{"subject": "orders", "body": "x" * 100_000}]}
PULL = {"subject": "none", "group": "g", "consumer": "c", "wait_ms": 50_000}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("half") / "data", "--reserve-bytes", "0") as broker:
        yield broker
        assert broker.stop() == 0
        assert "Traceback" not in broker.log
        assert " request_failed " not in broker.log


@pytest.mark.parametrize(
    ("asked", "answers"),
    [
        (HEALTH, 1),
        (HEALTH + HEALTH, 2),
        (post("/v1/send", SEND), 1),
        (post("/v1/send", SEND, version="1.0"), 1),
        (post("/v1/send", SEND) + HEALTH + post("/v1/send", SEND), 3),
        (HEALTH * 50 + b"JUNK", 50),
        (HEALTH * 50 + HEALTH[:-3], 50),
        (post("/v1/send", SEND) * 5 + post("/v1/send", SEND)[:-1], 5),
        (HEALTH * 150, 101),
    ],
    ids=[
        "health",
        "two",
        "a send",
        "a send as HTTP/1.0",
        "three",
        "before what is no request",
        "before half a head",
        "before half a body",
        "as many as may be sent ahead",
    ],
)
def test_B1_who_sends_no_more_gets_the_answers_to_what_was_sent(
    broker: BrokerProcess, asked: bytes, answers: int
) -> None:
    answer = broker.talk(asked)
    assert answer.count(b"HTTP/1.1 200 OK") == answers


def test_a_pull_of_who_sends_no_more_is_answered_at_once(broker: BrokerProcess) -> None:
    """It may come from a client that has ended, which must get no messages later."""
    answer = broker.talk(post("/v1/pull", PULL), timeout_s=40)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b'"messages":[]' in answer


def test_a_pull_behind_another_request_of_who_sends_no_more_is_answered_too(
    broker: BrokerProcess,
) -> None:
    answer = broker.talk(post("/v1/send", SEND) + post("/v1/pull", PULL), timeout_s=40)
    assert answer.count(b"HTTP/1.1 200 OK") == 2


def test_half_a_request_of_who_sends_no_more_has_no_answer(broker: BrokerProcess) -> None:
    assert broker.talk(post("/v1/send", SEND)[:-1]) == b""


def test_a_request_of_HTTP_1_0_that_expects_to_be_asked_is_not(broker: BrokerProcess) -> None:
    expecting = post("/v1/send", SEND, version="1.0").replace(
        b"Host: a\r\n", b"Host: a\r\nExpect: 100-continue\r\n"
    )
    assert broker.talk(expecting).startswith(b"HTTP/1.1 200 OK")
