"""A connection's requests and their answers: in turn, whole, piece by piece, and what ends before its time."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from qmq_broker.face.answers import RequestRefusedError
from qmq_broker.face.http.request_response import RequestResponse
from qmq_broker.face.http.requests import BodyRoom, ClientGone, Encoding
from qmq_broker.face.limits import FaceLimits
from qmq_client.wire.requests import FRAME_CONTENT_TYPE
from tests.broker.face.asgi import JSON, Client, make_scope
from tests.broker.face.asgi import Wire as OneWire
from tests.broker.face.wire import PULL, Wire, all_answered, connect, request
from tests.broker.service.rig import GROUP, SUBJECT, Rig, make_frame
from tests.kit.broker_process import BrokerProcess, read_all
from tests.kit.waiting import DEADLINE_S


def test_a_request_behind_one_that_waits_is_answered_behind_it(client: Client) -> None:
    waiting = PULL.replace(b"}", b',"wait_ms":60000}')
    first = request(content_length=b"%d" % len(waiting)).replace(PULL, waiting)

    async def look() -> bytes:
        protocol, wire = connect(client)
        protocol.data_received(first + request() + request(b"/v1/settle"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not wire.written
        client.rig.broker.drain("the test")
        await asyncio.wait_for(all_answered(protocol), 30)
        return wire.written

    answers = asyncio.run(look())
    assert re.findall(rb"HTTP/1.1 (\d{3})", answers) == [b"200", b"200", b"422"]


def test_B10_few_requests_wait_for_the_one_before_them_and_those_are_answered(
    client: Client,
) -> None:
    ahead = FaceLimits().pipelined
    get = b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n"

    async def ask() -> bytes:
        protocol, wire = connect(client)
        protocol.data_received(get * (10 * ahead))
        assert len(protocol.requests) == ahead, "the first is answered"
        while not wire.is_closed:
            await asyncio.sleep(0)
        return wire.written

    answers = asyncio.run(asyncio.wait_for(ask(), 30))
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"200"] * (1 + ahead)


def test_a_pull_that_waits_is_answered_by_a_message_or_when_its_time_is_up(client: Client) -> None:
    def waiting(wait_ms: int) -> bytes:
        body = PULL.replace(b"}", b',"wait_ms":%d}' % wait_ms)
        return request(content_length=b"%d" % len(body)).replace(PULL, body)

    async def look() -> list[int]:
        protocol, wire = connect(client)
        protocol.data_received(waiting(1))
        await asyncio.wait_for(all_answered(protocol), 30)
        protocol.data_received(waiting(60_000))
        while not client.rig.broker.delivery.waiting.count:
            await asyncio.sleep(0)
        client.rig.send(b"body", subject="a")
        await asyncio.wait_for(all_answered(protocol), 30)
        bodies = re.findall(rb"\r\n\r\n({.*?})(?=HTTP|$)", wire.written)
        return [len(json.loads(body)["messages"]) for body in bodies]

    assert asyncio.run(look()) == [0, 1]


def test_a_body_in_pieces_is_one_body_and_a_lost_connection_is_reported(client: Client) -> None:
    async def look() -> tuple[bytes, bool]:
        protocol, wire = connect(client)
        for byte in request():
            protocol.data_received(bytes((byte,)))
            await asyncio.sleep(0)
        await asyncio.wait_for(all_answered(protocol), 30)
        protocol.data_received(request()[:-1])
        (http,) = protocol.requests
        protocol.connection_lost(None)
        await asyncio.wait_for(all_answered(protocol), 30)
        with pytest.raises(ClientGone):
            await http.body(100)
        loop = asyncio.get_running_loop()
        with pytest.raises(ClientGone):  # at once: nobody is there to wait for
            await asyncio.wait_for(http.wait(loop.create_future(), loop.time() + 1_000), 30)
        await http.answer(200, Encoding.JSON, b"to nobody")
        return wire.written, http.response_started

    written, has_begun = asyncio.run(look())
    assert written.startswith(b"HTTP/1.1 200 OK\r\n")
    assert written.count(b"HTTP/1.1") == 1
    assert not has_begun


def test_an_answer_has_its_length_its_type_and_what_else_is_to_be_said(client: Client) -> None:
    async def look(*, keep_alive: bool) -> tuple[bytes, bool]:
        protocol, wire = connect(client)
        http = RequestResponse({}, wire, protocol.flow, keep_alive=keep_alive, on_end=lambda: None)
        await http.answer(503, Encoding.JSON, b"{}", ((b"retry-after", b"1"),))
        return wire.written, wire.is_closed

    head = (
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n"
        b"content-type: application/json\r\nretry-after: 1\r\n"
    )
    assert asyncio.run(look(keep_alive=True)) == (head + b"\r\n{}", False)
    last = head + b"connection: close\r\n\r\n{}"
    assert asyncio.run(look(keep_alive=False)) == (last, True)


def test_B10_an_answer_ends_when_its_reader_has_most_of_it(client: Client) -> None:
    async def look() -> list[bool]:
        protocol, _ = connect(client)
        protocol.data_received(request()[:-1])
        (http,) = protocol.requests
        protocol.pause_writing()
        answering = asyncio.ensure_future(http.answer(200, Encoding.JSON, bytes(1_000_000)))
        await asyncio.sleep(0)
        before = answering.done()
        protocol.resume_writing()
        await asyncio.wait_for(answering, 30)
        protocol.connection_lost(None)
        await asyncio.wait_for(all_answered(protocol), 30)
        return [before, http.response_complete]

    assert asyncio.run(look()) == [False, True]


def test_B10_an_answer_begins_when_the_one_before_has_its_reader(client: Client) -> None:
    async def look() -> list[bytes]:
        protocol, wire = connect(client)
        protocol.data_received(request()[:-1])
        (http,) = protocol.requests
        protocol.pause_writing()
        answering = asyncio.ensure_future(http.answer(200, Encoding.JSON, b"{}"))
        await asyncio.sleep(0)
        written = [wire.written]
        protocol.resume_writing()
        await asyncio.wait_for(answering, 30)
        written.append(wire.written[:12])
        protocol.connection_lost(None)
        await asyncio.wait_for(all_answered(protocol), 30)
        return written

    assert asyncio.run(look()) == [b"", b"HTTP/1.1 200"]


def test_B10_a_long_answer_is_written_piece_by_piece_as_its_reader_takes_it(client: Client) -> None:
    body = bytes(range(250)) * 28_000

    async def look() -> tuple[list[int], bytes]:
        protocol, wire = connect(client)
        wire.on_write = protocol.pause_writing
        protocol.data_received(request()[:-1])
        (http,) = protocol.requests
        answering = asyncio.ensure_future(http.answer(200, Encoding.JSON, body))
        await asyncio.sleep(0)
        written = [0]
        while len(wire.written) > written[-1]:
            assert not http.response_complete
            written.append(len(wire.written))
            protocol.resume_writing()
            await asyncio.sleep(0)
        await asyncio.wait_for(answering, 30)
        assert http.response_complete
        protocol.connection_lost(None)
        await asyncio.wait_for(all_answered(protocol), 30)
        return [after - before for before, after in pairwise(written)], wire.written

    pieces, answer = asyncio.run(look())
    assert len(pieces) > 3
    assert max(pieces) < len(body) // 3
    assert answer.endswith(b"\r\n\r\n" + body)


def test_a_wait_that_was_woken_leaves_no_timer_behind(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pull that waited would leave one for as long as it might have waited."""
    timers: list[asyncio.TimerHandle] = []

    async def look() -> list[bool]:
        protocol, wire = connect(client)
        loop = asyncio.get_running_loop()
        call_at = loop.call_at

        def watched(when_s: float, call: Callable[[], object]) -> asyncio.TimerHandle:
            timers.append(call_at(when_s, call))
            return timers[-1]

        monkeypatch.setattr(loop, "call_at", watched)
        woken: asyncio.Future[None] = loop.create_future()
        http = RequestResponse({}, wire, protocol.flow, keep_alive=True, on_end=lambda: None)
        loop.call_soon(woken.set_result, None)
        await http.wait(woken, loop.time() + 1_000)
        return [timer.cancelled() for timer in timers]

    assert asyncio.run(look()) == [True]


@pytest.mark.parametrize("error", [None, ZeroDivisionError(), asyncio.CancelledError()])
def test_a_connection_without_a_whole_answer_is_closed(
    client: Client, monkeypatch: pytest.MonkeyPatch, error: BaseException | None
) -> None:
    async def serve(*_: object) -> None:
        await asyncio.sleep(0)
        if error is not None:
            raise error

    monkeypatch.setattr(client.app, "serve", serve)
    told: list[object] = []

    async def look() -> bool:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, what: told.append(what["exception"])
        )
        protocol, wire = connect(client)
        protocol.data_received(request())
        await asyncio.wait_for(all_answered(protocol), 30)
        return wire.is_closed

    assert asyncio.run(look())
    assert told == [error] * (error is not None)


def test_a_request_that_is_there_at_once_is_answered_before_the_loop_continues(
    client: Client,
) -> None:
    async def look() -> bytes:
        protocol, wire = connect(client)
        protocol.data_received(request())
        return wire.written

    assert asyncio.run(look()).startswith(b"HTTP/1.1 200 OK")


def test_a_commit_that_is_reported_is_answered_before_the_loop_continues(client: Client) -> None:
    frame = make_frame([b"x"])
    length = b"%d" % len(frame)
    head = request(b"/v1/send", content_length=length, content_type=FRAME_CONTENT_TYPE.encode())

    async def look() -> list[bytes]:
        protocol, wire = connect(client)
        protocol.data_received(head.removesuffix(PULL) + frame)
        client.rig.broker.writer.step()
        written = [wire.written]
        client.rig.run_posted()
        written.append(wire.written[:15])
        await asyncio.wait_for(all_answered(protocol), 30)
        return written

    assert asyncio.run(look()) == [b"", b"HTTP/1.1 200 OK"]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("direct") / "data") as broker:
        yield broker
        assert broker.stop() == 0


@pytest.mark.parametrize(
    ("path", "content_type", "body"),
    [
        ("pull", "application/json", PULL),
        ("pull", "application/json", b'{"subject":"a","group":"-","consumer":"c"}'),
        ("pull", "application/json", b"no JSON"),
        ("pull", "text/plain", b"x"),
        ("settle", "application/json", b'{"subject":"a","group":"b","consumer":"c","settlements":[]}'),
        ("send", "application/json", b'{"messages":[]}'),
        ("send", FRAME_CONTENT_TYPE, b"QMQF"),
        ("send", FRAME_CONTENT_TYPE, make_frame([b"x" * 200_000])[:-8]),
    ],
)  # fmt: skip
def test_a_body_in_chunks_is_answered_like_one_with_its_length(
    broker: BrokerProcess, path: str, content_type: str, body: bytes
) -> None:
    head = f"POST /v1/{path} HTTP/1.1\r\nhost: a\r\ncontent-type: {content_type}\r\n".encode()
    head += b"connection: close\r\n"
    answers = []
    for form in (
        b"content-length: %d\r\n\r\n%b" % (len(body), body),
        b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body),
    ):
        with broker.connection() as connection:
            connection.sendall(head + form)
            answer_head, _, answer_body = read_all(connection).partition(b"\r\n\r\n")
        answers.append((sorted(answer_head.split(b"\r\n")), answer_body))
    assert answers[0] == answers[1]


def test_what_was_sent_is_there_for_a_pull_on_the_same_connection(tmp_path: Path) -> None:
    frame = make_frame([b"a" * 300_000, b"b"], subject="a")
    send = (
        b"POST /v1/send HTTP/1.1\r\nhost: a\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
        % (FRAME_CONTENT_TYPE.encode(), len(frame))
    ) + frame
    with BrokerProcess(tmp_path / "data") as broker, broker.connection() as connection:
        connection.sendall(send + request(connection=b"close"))
        answers = read_all(connection)
        assert broker.stop() == 0
    assert re.findall(rb"HTTP/1.1 (\d{3})", answers) == [b"200", b"200"]
    assert len(json.loads(answers.rpartition(b"\r\n\r\n")[2])["messages"]) == 2


BODIES_BYTES = 1_000
WAITING = {"subject": SUBJECT, "group": GROUP, "wait_ms": 50_000}


def lone(wire: Wire) -> RequestResponse:
    scope = make_scope("POST", "/v1/send")
    return RequestResponse(scope, wire, FlowControl(wire), keep_alive=True, on_end=lambda: None)


def test_B10_what_comes_behind_a_lost_body_takes_no_room() -> None:
    room = BodyRoom(FaceLimits(bodies_bytes=BODIES_BYTES))

    async def lose() -> RequestResponse:
        http = lone(Wire())
        with room.body(100) as share:
            reading = asyncio.ensure_future(http.body(100, share))
            await asyncio.sleep(0)  # it has begun to wait
            http.receive(b"x" * 10)
            assert room.taken_bytes == 10
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
        return http

    http = asyncio.run(lose())
    assert room.taken_bytes == 0
    http.receive(b"y" * 10)
    assert room.taken_bytes == 0


def test_B10_what_comes_behind_a_refused_body_is_not_kept() -> None:
    room = BodyRoom(FaceLimits(bodies_bytes=BODIES_BYTES))

    async def refuse() -> RequestResponse:
        http = lone(Wire())
        with room.body(BODIES_BYTES) as share:
            reading = asyncio.ensure_future(http.body(BODIES_BYTES, share))
            await asyncio.sleep(0)  # it has begun to wait
            http.receive(b"x" * BODIES_BYTES)
            http.receive(b"x" * BODIES_BYTES)
            with pytest.raises(RequestRefusedError):
                await reading
        return http

    http = asyncio.run(refuse())
    http.receive(b"y" * BODIES_BYTES)
    assert (http._buffer.take(), room.taken_bytes) == (b"", 0)
    assert http.arrived_bytes == 3 * BODIES_BYTES, "where the next request begins is known"


def test_a_failure_behind_the_answer_is_no_second_answer(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: object, http: RequestResponse) -> None:
        await http.answer(200, Encoding.JSON, b"{}")
        raise RuntimeError("unexpected")

    async def serve() -> bytes:
        wire = Wire()
        await client.app.serve(lone(wire))
        return wire.written

    monkeypatch.setattr(client.app._hot, "serve", fail)
    assert asyncio.run(serve()).count(b"HTTP/1.1") == 1


def test_a_wake_of_a_client_that_is_gone_is_passed_on(rig: Rig, client: Client) -> None:
    waiting = rig.broker.delivery.waiting

    async def pull(consumer: str, wire: OneWire) -> asyncio.Task[None]:
        scope = make_scope("POST", "/v1/pull", [(b"content-type", JSON), (b"content-length", b"1")])
        count = waiting.count
        task = asyncio.ensure_future(wire.serve(client.app, scope))
        while waiting.count == count:
            await asyncio.sleep(0)
        return task

    def wire_of(consumer: str, is_gone: asyncio.Event | None) -> OneWire:
        return OneWire([json.dumps({**WAITING, "consumer": consumer}).encode()], is_gone, None)

    async def leave() -> OneWire:
        is_gone = asyncio.Event()
        wire = wire_of("there", None)
        first = await pull("gone", wire_of("gone", is_gone))
        second = await pull("there", wire)
        is_gone.set()
        rig.send(b"a")  # wakes the first, which does not know yet that it is gone
        await asyncio.wait_for(asyncio.gather(first, second), DEADLINE_S)
        return wire

    reply = asyncio.run(leave()).reply()
    assert len(reply.json["messages"]) == 1
