"""F11, F12: whatever a broker answers, only an answer that names the message removes its row."""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from qmq_client import Producer, pull
from qmq_client.errors import NotTheBrokerError
from qmq_client.message import Message
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.frame import FrameKind, build_frame, read_header
from qmq_client.wire.requests import (
    ErrorAnswer,
    PullRequest,
    SendAnswer,
    encode_control,
    encode_json,
)
from tests.client.publishing import sweep, with_transport
from tests.client.transport.hostile_server import (
    CHUNKED,
    DEADLINE_S,
    OK,
    Behaviour,
    HostileServer,
    answer,
    endless,
    hostile_server,
    raw,
    silent,
    trickle,
)
from tests.client.world import OUTBOX, SUBJECT, World, a_world
from tests.kit.broker_process import BrokerProcess


def accepted(**changes: int) -> bytes:
    fields: dict[str, Any] = {"frame_crc": 7, "count": 3, "duplicates": 0, **changes}
    return encode_control(
        SendAnswer(physical_offset=0, stored_at_ms=1, durability="durable", **fields)
    )


def refusal(code: str, message_id: str = "") -> bytes:
    return encode_json(ErrorAnswer(code=code, message="no", message_id=message_id))


JSON = "application/json"
HTML = "text/html"
#: Behaviour of the peer, and whether it is the rows that are tried in vain (an attempt each).
FAULTS: dict[str, tuple[Behaviour, bool]] = {
    "500": (
        answer(refusal("internal"), status="500 Internal Server Error", content_type=JSON), True,
    ),
    "a page": (answer(b"<html>", content_type=HTML), False),
    "a proxy's 301": (answer(b"<html>", status="301 Moved", content_type=HTML), False),
    "a proxy's 403": (answer(b"<html>", status="403 Forbidden", content_type=HTML), False),
    "a proxy's 404": (answer(b"<html>", status="404 Not Found", content_type=HTML), False),
    "a proxy's 413": (answer(b"<html>", status="413 Too Large", content_type=HTML), False),
    "a proxy's 502": (answer(b"", status="502 Bad Gateway", content_type=HTML), False),
    "a proxy's 503": (answer(b"<html>", status="503 Unavailable", content_type=HTML), False),
    "a proxy's 504": (answer(b"<html>", status="504 Timeout", content_type=HTML), False),
    "a service's 404": (answer(b'{"detail":"x"}', status="404 Not Found", content_type=JSON), False),
    "503": (answer(b"", status="503 Unavailable", headers=("retry-after: 1",)), False),
    "429": (answer(b"", status="429 Too Many", headers=("retry-after: 1",)), False),
    "404": (answer(refusal("x"), status="404 Not Found", content_type=JSON), False),
    "hangs up": (raw(b""), False),
    "hangs": (silent, False),
    "trickles": (trickle(OK, b"x"), False),
    "half an answer": (raw(OK + b"content-length: 500\r\n\r\n" + accepted()[:20]), False),
    "garbage": (answer(b"garbage" * 50), True),
    "another frame named": (answer(accepted()), True),
    "an answer to something else": (answer(build_frame(FrameKind.SEGMENT_HEAD, b"")), True),
    "a huge answer": (endless(CHUNKED, b"10000\r\n" + b"x" * 65_536 + b"\r\n"), True),
    "an unknown message refused": (
        answer(refusal("id_conflict", "0" * 32), status="409 Conflict", content_type=JSON), True,
    ),
    "another id than hex refused": (
        answer(refusal("id_conflict", "zz"), status="409 Conflict", content_type=JSON), True,
    ),
}  # fmt: skip


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with a_world(tmp_path) as made:
        yield made


def to(url: str) -> closing[HttpTransport]:
    return closing(HttpTransport(url, connect_timeout_s=DEADLINE_S, answer_timeout_s=DEADLINE_S))


def send_three(world: World) -> set[str]:
    messages = [Message(SUBJECT, f"{i}") for i in range(3)]
    return set(world.producer.send_now_many(messages))


@pytest.mark.parametrize(("behave", "is_attempt"), FAULTS.values(), ids=FAULTS)
def test_F11_O2_a_broker_that_answers_badly_removes_and_parks_nothing(
    world: World, behave: Behaviour, is_attempt: bool
) -> None:
    ids = send_three(world)
    with hostile_server(behave) as server, to(server.url) as transport:
        with_transport(world, transport)
        flushed = world.producer.flush()
        assert server.requests
    assert (flushed.is_done, flushed.accepted, flushed.left, flushed.parked) == (True, 0, 3, 0)
    assert world.stored_ids() == ids
    rows = world.read(f"SELECT attempts, token, last_error <> '' FROM {OUTBOX}")
    assert rows == [(int(is_attempt), None, 1)] * 3
    world.make_due()
    assert len(sweep(world).sent) == 3  # healed
    assert (world.sent_ids(), world.stored_ids()) == (ids, set())


def test_F11_a_proxy_in_the_brokers_place_parks_nothing_and_is_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    behave = answer(b"<html>", status="502 Bad Gateway", content_type=HTML)
    with a_world(tmp_path, max_attempts=1) as world:
        ids = send_three(world)
        with hostile_server(behave) as server, to(server.url) as transport:
            with_transport(world, transport)
            with caplog.at_level(logging.WARNING):
                flushed = world.producer.flush()
        assert (flushed.left, flushed.parked) == (3, 0)
        assert world.stored_ids() == ids
        assert f"{server.url}/v1/send: status 502 of type 'text/html'" in caplog.text


def pull_once(_: World, url: str) -> None:
    with pull(url, subject=SUBJECT, group="g", wait_s=1):
        raise AssertionError("it has pulled")


def cancel(world: World, url: str) -> None:
    with Producer(world.engine, url) as producer:
        producer.cancel_now("0" * 32)


CALLS_OF_PROXY = {"pull": pull_once, "cancel_now": cancel}


@pytest.mark.parametrize("call", CALLS_OF_PROXY)
@pytest.mark.parametrize("status", ["200 OK", "301 Moved", "403 No", "404 No", "502 No", "504 No"])
def test_F11_a_proxy_that_answers_a_pull_or_a_cancellation_is_named(
    world: World, call: str, status: str
) -> None:
    with hostile_server(answer(b"<html>", status=status, content_type=HTML)) as server:
        url = re.escape(server.url)
        told = rf"{url}/\S+: status {status[:3]} .*which is not an answer of a broker"
        with pytest.raises(NotTheBrokerError, match=told):
            CALLS_OF_PROXY[call](world, server.url)


def test_F11_what_is_too_large_for_a_proxy_waits_and_holds_up_no_others(world: World) -> None:
    messages = [Message(SUBJECT, body) for body in ("a", "b" * 2_000, "c")]
    ids = world.producer.send_now_many(messages)
    servers: list[HostileServer] = []

    def take_small_ones(connection: socket.socket, ended: threading.Event) -> None:
        frame = servers[0].requests[-1].partition(b"\r\n\r\n")[2]
        header = read_header(frame)
        behave = answer(accepted(frame_crc=header.body_crc, count=header.record_count))
        if len(frame) > 1_000:
            behave = answer(b"<html>", status="413 Too Large", content_type=HTML)
        behave(connection, ended)

    with hostile_server(take_small_ones) as server, to(server.url) as transport:
        servers.append(server)
        with_transport(world, transport)
        flushed = world.producer.flush()
    assert (flushed.accepted, flushed.left, flushed.parked) == (2, 1, 0)
    assert world.stored_ids() == {ids[1]}
    assert world.read(f"SELECT attempts FROM {OUTBOX}") == [(0,)]


def test_F11_nobody_at_the_address_costs_no_row_an_attempt(world: World) -> None:
    ids = send_three(world)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with to(url) as transport:
        with_transport(world, transport)
        assert world.producer.flush().left == 3
    assert world.stored_ids() == ids
    assert world.read(f"SELECT DISTINCT attempts FROM {OUTBOX}") == [(0,)]


def test_F11_a_refusal_that_names_one_message_parks_that_one(world: World) -> None:
    ids = sorted(send_three(world))
    servers: list[HostileServer] = []

    def refuse_the_second(connection: socket.socket, ended: threading.Event) -> None:
        frame = servers[0].requests[-1].partition(b"\r\n\r\n")[2]
        header = read_header(frame)
        if header.record_count == 3:
            says = refusal("refused", ids[1])
            behave = answer(says, status="422 Unprocessable", content_type=JSON)
        else:
            behave = answer(accepted(frame_crc=header.body_crc, count=header.record_count))
        behave(connection, ended)

    with hostile_server(refuse_the_second) as server, to(server.url) as transport:
        servers.append(server)
        with_transport(world, transport)
        flushed = world.producer.flush()
        assert len(server.requests) == 2
    assert (flushed.accepted, flushed.parked, flushed.left) == (2, 1, 0)
    assert world.stored_ids() == {ids[1]}


def test_F12_O5_an_answer_lost_after_the_store_leads_to_one_stored_message(
    world: World, tmp_path: Path
) -> None:
    with BrokerProcess(tmp_path / "broker") as broker, to(broker.url) as real:

        class Losing(HttpTransport):
            def send(self, frame: bytes) -> SendAnswer:
                real.send(frame)  # stored, durable, answered
                return super().send(frame)  # but the answer does not come back to us

        ids = send_three(world)
        with hostile_server(raw(b"")) as gone, closing(Losing(gone.url)) as losing:
            with_transport(world, losing)
            assert world.producer.flush().left == 3
        assert world.stored_ids() == ids
        world.make_due()
        world.transport = real
        assert {row.hex() for row in sweep(world).sent} == ids
        assert world.stored_ids() == set()
        assert _stored_at(broker) == 3


def _stored_at(broker: BrokerProcess) -> int:
    with to(broker.url) as transport:
        pulled = transport.pull(
            PullRequest(subject=SUBJECT, group="g", consumer="c", max_messages=100)
        )
    return len(pulled.messages)


def test_W8_an_outage_is_reported_when_it_begins_seldom_while_it_lasts_and_when_it_is_over(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def send(at_s: float) -> None:
        world.producer.send_now(Message(SUBJECT, "x"))
        world.producer._publisher.step(at_s, is_hurried=True)

    with caplog.at_level(logging.INFO, "qmq.publisher"):
        world.broker.faults.is_unreachable = True
        for number in range(9):
            send(number * 10.0)  # no wait of the breaker is longer
        assert re.findall(r"failures=(\d+)", caplog.text) == ["1", "2", "4", "8"]
        assert caplog.text.count("the watchdog sends the rows") == 4
        caplog.clear()
        world.broker.faults.is_unreachable = False
        send(100.0)
        send(110.0)
    assert [record.getMessage() for record in caplog.records] == [
        "broker accepts messages again, failures=9"
    ]
