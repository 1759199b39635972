"""B10: slow clients take no more memory than there is room for, and keep nobody else from it."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from qmq_broker.face.connection.protocol import Connection
from qmq_broker.face.http.requests import DROP, BodyRoom
from qmq_broker.face.limits import FaceLimits
from qmq_broker.service.limits import ServiceLimits
from tests.broker.face.asgi import FRAME, Client, Reply, error_of
from tests.broker.face.wire import Wire, all_answered, connect
from tests.broker.service.rig import GROUP, SUBJECT, Rig, make_frame
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import DEADLINE_S

HEAD = b"POST /v1/send HTTP/1.1\r\nHost: a\r\nContent-Type: application/vnd.qmq.frame\r\n"
FILE = f"/v1/files/read?path=commitlog/{0:020}&first=0&count=100000"
PULL = {"subject": SUBJECT, "group": GROUP, "consumer": "one", "max_bytes": 110_000}


def pull(
    client: Client, *, is_read: asyncio.Event | None = None, wait_ms: int = 0
) -> asyncio.Task[Reply]:
    body = json.dumps({**PULL, "wait_ms": wait_ms}).encode()
    return asyncio.ensure_future(client.call("POST", "/v1/pull", body, is_read=is_read))


def in_flight(rig: Rig) -> int:
    return sum(group.in_flight for group in rig.broker.query.groups(subject=SUBJECT, group=GROUP))


async def pull_unread(rig: Rig, client: Client, is_read: asyncio.Event) -> asyncio.Task[Reply]:
    """A pull whose messages are on their way to a client that does not read yet."""
    unread = pull(client, is_read=is_read)
    while not in_flight(rig):
        await asyncio.sleep(0)
    return unread


def test_B10_over_the_room_of_unread_answers_nothing_is_handed_out(rig: Rig) -> None:
    rig.send(b"x" * 100_000, b"y" * 100_000)
    client = Client(rig, FaceLimits(answers_bytes=200_000, requests=1))

    async def run() -> None:
        is_read = asyncio.Event()
        unread = await pull_unread(rig, client, is_read)
        while "in progress" in (refused := await pull(client)).json["message"]:
            await asyncio.sleep(0)  # the answer of the first is being made
        assert (refused.status, refused.headers[b"retry-after"]) == (503, b"1")
        assert "unread" in refused.json["message"]
        assert in_flight(rig) == 1
        is_read.set()
        assert (await unread).status == 200
        assert (await pull(client)).status == 200
        assert in_flight(rig) == 2

    asyncio.run(run())


def test_B10_an_answer_takes_room_while_it_is_made(rig: Rig) -> None:
    rig.send(b"x" * 100_000, b"y" * 100_000)
    client = Client(rig, FaceLimits(answers_bytes=200_000))

    async def run() -> None:
        first, second = pull(client), pull(client)
        assert sorted([(await first).status, (await second).status]) == [200, 503]
        assert in_flight(rig) == 1

    asyncio.run(run())


def test_B10_a_pull_that_waited_is_refused_too_when_there_is_no_room_for_its_answer(
    rig: Rig,
) -> None:
    rig.send(b"x" * 100_000)
    client = Client(rig, FaceLimits(answers_bytes=200_000))

    async def run() -> None:
        assert (await pull(client)).status == 200
        is_read = asyncio.Event()
        later = pull(client, wait_ms=40_000)
        while not rig.broker.delivery.waiting.count:
            await asyncio.sleep(0)
        # Meanwhile another group's client fills the room.
        body = json.dumps({**PULL, "group": "other"}).encode()
        unread = asyncio.ensure_future(client.call("POST", "/v1/pull", body, is_read=is_read))
        while not rig.broker.query.groups(subject=SUBJECT, group="other"):
            await asyncio.sleep(0)
        rig.send(b"y" * 100_000)
        assert (await later).status == 503
        assert in_flight(rig) == 1
        is_read.set()
        assert (await unread).status == 200

    asyncio.run(run())


@pytest.mark.parametrize("length", [b"Transfer-Encoding: chunked", b"Content-Length: 8000000"])
def test_B10_slow_bodies_take_the_room_of_what_has_arrived_of_them(
    tmp_path: Path, length: bytes
) -> None:
    with (
        BrokerProcess(tmp_path / "data") as broker,
        ExitStack() as slow,
        httpx.Client(base_url=broker.url, timeout=DEADLINE_S) as client,
    ):
        for _ in range(40):
            connection = slow.enter_context(broker.connection())
            connection.sendall(HEAD + length + b"\r\nExpect: 100-continue\r\n\r\n1\r\nQ\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 100"), "its body is awaited"
        sent = client.post("/v1/send", json={"messages": [{"subject": SUBJECT, "body": 1}]})
        assert sent.status_code == 200


def test_B10_a_body_that_grows_out_of_the_room_is_refused_and_gives_its_room_back(
    rig: Rig,
) -> None:
    client = Client(rig, FaceLimits(bodies_bytes=1_000))
    frame = make_frame([b"x" * 800])
    chunked = ((b"transfer-encoding", b"chunked"),)

    def send_in_parts(data: bytes) -> Reply:
        parts = [data[:600], data[600:]]
        return asyncio.run(
            client.call(
                "POST",
                "/v1/send",
                content_type=FRAME,
                headers=chunked,
                has_length=False,
                parts=parts,
            )
        )

    assert send_in_parts(make_frame([b"x" * 1_000])).status == 503
    assert send_in_parts(frame).status == 200


@pytest.mark.parametrize("path", ["/v1/pull", "/v1/settle"])
def test_B10_bodies_of_pulls_and_settlements_take_of_the_same_room(rig: Rig, path: str) -> None:
    client = Client(rig, FaceLimits(bodies_bytes=1_000))
    reply = client.post(path, b"x" * 1_001)
    assert (reply.status, reply.headers[b"retry-after"]) == (503, b"1")
    assert client.post("/v1/pull", PULL).status == 200


def test_B10_answers_of_all_routes_take_of_the_same_room_and_short_ones_take_none(rig: Rig) -> None:
    rig.send(b"x" * 150_000)
    client = Client(rig, FaceLimits(answers_bytes=150_000))

    async def run() -> None:
        is_read = asyncio.Event()
        unread = asyncio.ensure_future(client.call("GET", FILE, is_read=is_read))
        while (reply := await client.call("GET", FILE)).status == 200:
            assert not unread.done()  # it is read from the disk
        assert (reply.status, reply.headers[b"retry-after"]) == (503, b"1")
        assert "unread" in reply.json["message"]
        assert (await client.call("GET", "/healthz")).status == 200
        is_read.set()
        assert len((await unread).body) == 100_000
        assert (await client.call("GET", FILE)).status == 200

    asyncio.run(asyncio.wait_for(run(), 60))


async def ask_and_not_read(client: Client) -> tuple[Connection, Wire]:
    """A connection whose client has asked for a long answer and reads none of it."""
    protocol, wire = connect(client)
    wire.on_write = protocol.pause_writing
    protocol.data_received(f"GET {FILE} HTTP/1.1\r\nhost: a\r\n\r\n".encode())
    while not wire.written:
        await asyncio.sleep(0)
    return protocol, wire


async def be_late(limits: FaceLimits) -> None:
    """Until what was begun before has taken longer than others have to wait for its room."""
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    while (loop.time() - begun_s) * 1000 <= limits.unread_wanted_ms:
        await asyncio.sleep(0)


@pytest.mark.parametrize(("wanted_ms", "status", "dropped"), [(1, 200, 1), (3_600_000, 503, 0)])
def test_B10_one_client_that_reads_no_answers_keeps_nobody_from_theirs(
    rig: Rig, wanted_ms: int, status: int, dropped: int
) -> None:
    """Whoever has taken longest is dropped, and nobody before there was time to read."""
    rig.send(b"x" * 150_000)
    limits = FaceLimits(answers_bytes=250_000, unread_wanted_ms=wanted_ms)
    client = Client(rig, limits)

    async def run() -> None:
        unread = [await ask_and_not_read(client), await ask_and_not_read(client)]
        if dropped:
            await be_late(limits)
        assert (await client.call("GET", FILE)).status == status
        assert [wire.is_aborted for _, wire in unread] == [bool(dropped), False]
        assert [client.app.take_dropped(), client.app.take_dropped()] == [dropped, 0]
        for protocol, _ in unread:
            protocol.connection_lost(None)
            await all_answered(protocol)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_B10_the_room_of_an_answer_that_was_dropped_is_given_back_once() -> None:
    limits = FaceLimits(answers_bytes=200_000, unread_wanted_ms=1)
    room = BodyRoom(limits)

    async def run() -> None:
        with room.answer(150_000, {"state": {DROP: lambda: None}}):
            await be_late(limits)
            room.check_answer(150_000)
            assert room.unread_bytes == 0
        assert room.unread_bytes == 0

    asyncio.run(run())


def test_B10_a_send_that_would_wait_too_long_for_the_disk_is_asked_to_come_back(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path / "data", limits=ServiceLimits(commit_queue_age_ms=1))
    rig.submit(make_frame([b"a"]))
    rig.pass_ms(10)
    reply = Client(rig).post("/v1/send", make_frame([b"b"]), content_type=FRAME)
    assert (reply.status, error_of(reply).code) == (503, "busy")
    assert int(reply.headers[b"retry-after"]) >= 1
    rig.broker.writer.step()
    rig.run_posted()
    rig.close()
