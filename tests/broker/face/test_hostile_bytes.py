"""Garbage on the port: an answer or a hang-up, never a 5xx, never a traceback, and it serves on."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.kit.broker_process import SERVE_WITH_FAULTS, BrokerProcess, read_all
from tests.kit.waiting import DEADLINE_S

BODY = b'{"subject":"a","group":"b","consumer":"c"}'
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
HEAD = b"POST /v1/pull HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"

#: What is sent, and the status of the first answer; None for none at all.
CASES: dict[str, tuple[bytes, int | None]] = {
    "a good request": (HEAD + LENGTH + b"\r\n" + BODY, 200),
    "a good chunked request": (HEAD + CHUNKED + b"\r\n2a\r\n" + BODY + b"\r\n0\r\n\r\n", 200),
    "nothing": (b"", None),
    "binary": (bytes(range(256)) * 4, 400),
    "a TLS hello": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 100, 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "a frame without HTTP": (b"QMQF\x01\x01\x00\x00" + b"\0" * 100, 400),
    "a folded line": (HEAD + b"X-A: b\r\n c\r\n" + LENGTH + b"\r\n" + BODY, 400),
    "bare line feeds": ((HEAD + LENGTH + b"\r\n").replace(b"\r\n", b"\n") + BODY, 400),
    "a NUL in a header": (HEAD + b"X: a\0b\r\n" + LENGTH + b"\r\n" + BODY, 400),
    "a space in a header name": (HEAD + b"X y: z\r\n" + LENGTH + b"\r\n" + BODY, 400),
    "two equal lengths": (HEAD + LENGTH * 2 + b"\r\n" + BODY, 400),
    "two lengths": (HEAD + LENGTH + b"Content-Length: 3\r\n\r\n" + BODY, 400),
    "a list of lengths": (HEAD + b"Content-Length: 42, 42\r\n\r\n" + BODY, 400),
    "length and chunks": (HEAD + LENGTH + CHUNKED + b"\r\n" + BODY, 400),
    "chunks and length": (HEAD + CHUNKED + LENGTH + b"\r\n" + BODY, 400),
    "chunks twice": (HEAD + CHUNKED * 2 + b"\r\n", 400),
    "another transfer encoding": (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 400),
    "an identity transfer encoding": (HEAD + b"Transfer-Encoding: identity\r\n\r\n", 400),
    "a signed length": (HEAD + b"Content-Length: +42\r\n\r\n" + BODY, 400),
    "a negative length": (HEAD + b"Content-Length: -1\r\n\r\n" + BODY, 400),
    "a length beyond 64 bits": (HEAD + b"Content-Length: " + b"9" * 40 + b"\r\n\r\n", 400),
    "a hexadecimal length": (HEAD + b"Content-Length: 0x2a\r\n\r\n" + BODY, 400),
    "a bad chunk": (HEAD + CHUNKED + b"\r\nzz\r\n", 400),
    "a chunk beyond 64 bits": (HEAD + CHUNKED + b"\r\n" + b"F" * 20 + b"\r\n", 400),
    "two hosts": (HEAD + b"Host: b\r\n" + LENGTH + b"\r\n" + BODY, 400),
    "101 headers": (HEAD + b"X: y\r\n" * 99 + b"\r\n", 431),
    "10,000 headers": (HEAD + b"X: y\r\n" * 10_000 + b"\r\n", 431),
    "a megabyte of header": (HEAD + b"X: " + b"y" * 1_000_000 + b"\r\n\r\n", 431),
    "a header that never ends": (HEAD + b"X: " + b"y" * 20_000, 431),
    "a long path": (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", 431),
    "a host that is none": (b"GET /healthz HTTP/1.1\r\nHost: a b/c\r\n\r\n", 400),
    "a path of bytes": (b"GET /\xff\xfe HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "a path with escapes": (b"GET /%zz%ff%00%2e%2e HTTP/1.1\r\nHost: a\r\n\r\n", 404),
    "a path upwards": (b"GET /../../etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n", 404),
    "another host's path": (b"GET http://other/x HTTP/1.1\r\nHost: a\r\n\r\n", 404),
    "a port that is none": (b"GET http://a:99999/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "no host": (b"GET /healthz HTTP/1.1\r\n\r\n", 400),
    "no host, as HTTP/1.0 has it": (b"GET /healthz HTTP/1.0\r\n\r\n", 200),
    "a version before": (b"GET /healthz HTTP/0.9\r\nHost: a\r\n\r\n", 400),
    "a version to come": (b"GET /healthz HTTP/2.0\r\nHost: a\r\n\r\n", 400),
    "another charset": (
        b"POST /v1/pull HTTP/1.1\r\nHost: a\r\nContent-Type: application/json; charset=utf-16\r\n"
        + LENGTH
        + b"\r\n"
        + BODY,
        415,
    ),
    "another charset for an operator's route": (
        b'POST /v1/groups/pause HTTP/1.1\r\nHost: a\r\nContent-Type: application/json;Charset="latin1"\r\n'
        + LENGTH
        + b"\r\n"
        + BODY,
        415,
    ),
    "its own charset": (
        b"POST /v1/pull HTTP/1.1\r\nHost: a\r\nContent-Type: application/json; charset=UTF-8\r\n"
        + LENGTH
        + b"\r\n"
        + BODY,
        200,
    ),
    "a tunnel": (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "no method": (b" / HTTP/1.1\r\n\r\n", 400),
    "an unknown method": (b"BREW /v1/send HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "the wrong method": (b"PUT /v1/send HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n", 405),
    "a websocket": (
        b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n",
        200,
    ),
    "half a body": (HEAD + LENGTH + b"\r\n" + BODY[:10], None),
    "half a head": (HEAD[:40], None),
    "a body of gzip": (HEAD + b"Content-Encoding: gzip\r\n" + LENGTH + b"\r\n" + BODY, 415),
    "too long a body": (HEAD + b"Content-Length: 9999999999\r\n\r\n", 413),
    "no length": (HEAD + b"\r\n", 411),
    "a content type behind the body": (
        b"POST /v1/pull HTTP/1.1\r\nHost: a\r\n"
        + CHUNKED
        + b"\r\n2a\r\n"
        + BODY
        + b"\r\n0\r\nContent-Type: application/json\r\n\r\n",
        415,
    ),
}

UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"
LAST = b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
#: A body with a request in it.
NESTED = b'{"messages":[{"subject":"a","body":"' + HEALTH.replace(b"\r\n", b"  ") + b'"}]}'


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("garbage") / "data") as broker:
        yield broker
        assert broker.stop() == 0
        assert "Traceback" not in broker.log
        assert " request_failed " not in broker.log


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    data = tmp_path_factory.mktemp("tight") / "data"
    with BrokerProcess(data, command=SERVE_WITH_FAULTS) as broker:
        yield broker
        assert broker.stop() == 0
        assert "Traceback" not in broker.log


@pytest.mark.parametrize("name", CASES)
def test_hostile_bytes_get_an_answer_that_blames_the_sender(
    broker: BrokerProcess, name: str
) -> None:
    data, status = CASES[name]
    answer = broker.talk(data)
    statuses = [int(found) for found in re.findall(rb"HTTP/1.1 (\d{3})", answer)]
    assert statuses[:1] == ([] if status is None else [status])
    assert not [found for found in statuses if found >= 500]
    assert b"Traceback" not in answer
    assert httpx.get(f"{broker.url}/healthz", timeout=DEADLINE_S).status_code == 200


@pytest.mark.parametrize(
    "name",
    [
        "two equal lengths",
        "two lengths",
        "length and chunks",
        "chunks and length",
        "chunks twice",
        "another transfer encoding",
        "an identity transfer encoding",
        "a folded line",
        "two hosts",
    ],
)
def test_a_head_that_can_be_read_in_two_ways_is_refused_as_ambiguous(
    broker: BrokerProcess, name: str
) -> None:
    assert b'"code":"ambiguous_request"' in broker.talk(CASES[name][0])


def test_random_bytes_end_nothing(broker: BrokerProcess) -> None:
    chance = random.Random(20_131)
    good = HEAD + LENGTH + b"\r\n" + BODY
    for _ in range(150):
        data = bytearray(good * chance.randint(1, 3))
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        answer = broker.talk(bytes(data[: chance.randint(0, len(data))]))
        assert not re.search(rb"HTTP/1.1 5", answer), (data, answer)
    assert httpx.get(f"{broker.url}/healthz", timeout=DEADLINE_S).status_code == 200


def test_requests_one_behind_the_other_are_answered_in_order(broker: BrokerProcess) -> None:
    both = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n" + HEAD + LENGTH + b"\r\n" + BODY
    with broker.connection() as connection:
        connection.sendall(both * 3 + b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        answer = read_all(connection)
    assert re.findall(rb"HTTP/1.1 (\d{3})", answer) == [b"200"] * 6 + [b"404"]


@pytest.mark.parametrize(
    "refused",
    [
        b"\0garbage\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"y" * 20_000 + b"\r\n\r\n",
        HEAD + LENGTH * 2 + b"\r\n" + BODY,
        HEAD + CHUNKED + b"\r\nzz\r\n",
    ],
    ids=["garbage", "a long head", "an ambiguous head", "a bad chunk"],
)
@pytest.mark.parametrize("wait_ms", [0, 200])
def test_B1_a_request_in_front_of_a_refused_one_has_its_own_answer(
    broker: BrokerProcess, refused: bytes, wait_ms: int
) -> None:
    """A refusal says that nothing was carried out, and a client takes it for the answer to what it asked first."""
    body = b'{"subject":"a","group":"c","consumer":"c","wait_ms":%d}' % wait_ms
    asked = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with broker.connection() as connection:
        connection.sendall(asked + HEALTH + refused)
        answer = read_all(connection)
    assert re.findall(rb"HTTP/1.1 (\d{3})", answer) == [b"200", b"200"]
    with broker.connection() as connection:
        connection.sendall(asked + refused)
        answer = read_all(connection)
    assert re.findall(rb"HTTP/1.1 (\d{3})", answer) == [b"200"]


def test_a_request_that_was_refused_before_its_end_has_no_second_answer(
    broker: BrokerProcess,
) -> None:
    with broker.connection() as connection:
        connection.sendall(HEAD.replace(b"pull", b"none") + CHUNKED + b"\r\n")
        answer = connection.recv(65_536)
        connection.sendall(b"zz\r\n")
        answer += read_all(connection)
    assert re.findall(rb"HTTP/1.1 (\d{3})", answer) == [b"404"]


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("path", [b"send", b"send?x=1", b"none"])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_who_asks_for_another_protocol_is_answered_in_this_one(
    broker: BrokerProcess, path: bytes, is_chunked: bool, is_apart: bool
) -> None:
    """As clients in Java ask for HTTP/2 by default; the body is no request of its own."""
    nested = b"%x\r\n%b\r\n0\r\n\r\n" % (len(NESTED), NESTED) if is_chunked else NESTED
    length = CHUNKED if is_chunked else b"Content-Length: %d\r\n" % len(NESTED)
    head = HEAD.replace(b"pull", path) + length + UPGRADE + b"\r\n"
    with broker.connection() as connection:
        if is_apart:
            connection.sendall(
                head.replace(b"Upgrade: h2c", b"Expect: 100-continue\r\nUpgrade: h2c")
            )
            answer = connection.recv(65_536)
            assert answer.startswith((b"HTTP/1.1 100", b"HTTP/1.1 404"))
            answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
            connection.sendall(nested + HEALTH + LAST)
        else:
            answer = b""
            connection.sendall(head + nested + HEALTH + LAST)
        answer += read_all(connection)
    first = b"404" if path == b"none" else b"200"
    assert re.findall(rb"HTTP/1.1 (\d{3})", answer) == [first, b"200", b"404"]


def test_many_heads_that_ask_for_another_protocol_are_read_one_by_one(
    broker: BrokerProcess,
) -> None:
    ask = b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"
    with broker.connection() as connection:
        connection.sendall(ask * 90 + LAST)
        answer = read_all(connection)
    assert re.findall(rb"HTTP/1.1 (\d{3})", answer) == [b"200"] * 90 + [b"404"]


@pytest.mark.parametrize(
    "endless",
    [b"0\r\n" + b"X: y\r\n" * 30_000, b"0\r\nX: " + b"y" * 200_000, b"1;" + b"y" * 200_000],
    ids=["trailers", "one trailer", "a chunk's extension"],
)
def test_B10_what_is_no_body_in_a_chunked_body_has_the_bound_of_a_head(
    broker: BrokerProcess, endless: bytes
) -> None:
    body = b"2a\r\n" + BODY + b"\r\n"
    with broker.connection() as connection:
        with suppress(ConnectionError):  # it hangs up while we are talking
            connection.sendall(HEAD + CHUNKED + b"\r\n" + body + endless)
        answer = read_all(connection)
    assert re.findall(rb"HTTP/1.1 (\d{3})", answer) == [b"431"]
    assert b"head_too_large" in answer


@pytest.mark.parametrize("path", [b"pull", b"send"])
def test_a_client_that_hangs_up_behind_several_requests_is_no_failure(
    broker: BrokerProcess, path: bytes
) -> None:
    body = {
        b"pull": b'{"subject":"a","group":"b","consumer":"c","wait_ms":50}',
        b"send": b'{"messages":[{"subject":"a","body":1}]}',
    }[path]
    head = HEAD.replace(b"/v1/pull", b"/v1/" + path)
    for _ in range(5):
        broker.talk((head + b"Content-Length: %d\r\n\r\n" % len(body) + body) * 5)
    assert httpx.get(f"{broker.url}/healthz", timeout=DEADLINE_S).status_code == 200
    assert "request_failed" not in broker.log


def test_a_refused_body_is_swallowed_and_the_connection_serves_on(broker: BrokerProcess) -> None:
    with httpx.Client(base_url=broker.url, timeout=DEADLINE_S) as client:
        reply = client.post(
            "/v1/pull", content=b"x" * 3_000_000, headers={"content-type": "application/json"}
        )
        assert (reply.status_code, reply.json()["code"]) == (413, "body_too_large")
        assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b"408"),
        (b"POST /v1/pull HTTP/1.1\r\nHost:", b"408"),
        (HEAD + LENGTH + b"\r\n" + BODY[:-1], b"408"),
        (HEAD + CHUNKED + b"\r\n2a\r\n" + BODY, b"408"),
        (b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\nGET /healthz HT", b"408"),
    ],
)
def test_B10_a_request_that_does_not_come_in_time_is_ended(
    tight: BrokerProcess, sent: bytes, status: bytes
) -> None:
    with tight.connection() as connection:
        connection.sendall(sent)
        answer = read_all(connection)
    assert re.findall(rb"HTTP/1.1 (\d{3})", answer)[-1] == status
    assert b'"too_slow"' in answer


def test_B10_a_trickle_is_ended_however_often_it_drips(tight: BrokerProcess) -> None:
    answer = b""
    with tight.connection(timeout_s=0.02) as connection:
        try:
            for drop in range(1_000):
                connection.sendall(b"P" if not drop else b"a")
                try:
                    answer = connection.recv(10_000)
                    break
                except TimeoutError:
                    continue
        except ConnectionError:
            return
    assert re.match(rb"HTTP/1.1 4(00|08)|\Z", answer)


def test_B10_a_client_that_does_not_read_is_left(tight: BrokerProcess) -> None:
    text = "x" * 1_000_000
    with httpx.Client(base_url=tight.url, timeout=DEADLINE_S) as client:
        for _ in range(4):
            messages = [{"subject": "big", "body": text}]
            assert client.post("/v1/send", json={"messages": messages}).status_code == 200
    ask = b"GET /v1/messages?subject=big&count=4 HTTP/1.1\r\nHost: a\r\n\r\n"
    with tight.connection() as connection:
        connection.sendall(ask * 20)
        tight.wait_for("reason=unread connections=1")


def test_F37_B10_one_connection_too_many_is_asked_to_come_back(tmp_path: Path) -> None:
    more = ("--head-ms", "3000")  # of which none must end before the last one comes
    with BrokerProcess(tmp_path / "data", *more, command=SERVE_WITH_FAULTS) as broker:
        with (
            broker.connection() as one,
            broker.connection() as two,
            broker.connection() as three,
            broker.connection() as four,
            broker.connection() as five,
            broker.connection() as surplus,
        ):
            answer = read_all(surplus)
            assert b"HTTP/1.1 503" in answer
            assert b"retry-after: 1" in answer
            for connection in (one, two, three, four, five):
                assert b"HTTP/1.1 408" in read_all(connection)
        assert httpx.get(f"{broker.url}/healthz", timeout=DEADLINE_S).status_code == 200
        assert broker.stop() == 0
