"""Bodies of requests: received into their own memory, whatever the reads are and who wants them."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest
from uvicorn.server import ServerState

from qmq_broker.face.connection.protocol import SHARED_BYTES, bounded_connection
from qmq_broker.face.http.receive_buffer import ReceiveBuffer
from qmq_broker.face.limits import FaceLimits
from qmq_client.wire.requests import FRAME_CONTENT_TYPE
from tests.broker.face.asgi import Client
from tests.broker.face.wire import Wire, all_answered, request
from tests.broker.service.rig import Rig, make_frame
from tests.kit.broker_process import BrokerProcess

LONG = 300_000


class Line:
    """A connection as a transport drives it: it asks for a buffer, fills some of it, and says so."""

    def __init__(self, client: Client) -> None:
        self.wire = Wire()
        self.connection = bounded_connection(client.app, FaceLimits())(ServerState())
        self.connection.connection_made(self.wire)

    def receive(self, data: bytes, read_bytes: int) -> None:
        """Let data come in, in reads of at most so many bytes."""
        while data:
            buffer = self.connection.get_buffer(-1)
            count = min(len(buffer), len(data), read_bytes)
            assert count
            buffer[:count] = data[:count]
            self.connection.buffer_updated(count)
            data = data[count:]

    async def answered(self) -> list[tuple[int, bytes]]:
        """Status and body of all answers, when all requests have theirs."""
        await asyncio.wait_for(all_answered(self.connection), 30)
        return answers_of(self.wire.written)


def answers_of(written: bytes) -> list[tuple[int, bytes]]:
    """Status and body of each answer."""
    heads = list(re.finditer(rb"HTTP/1\.1 (\d{3})(.*?)\r\n\r\n", written, re.DOTALL))
    ends = [*(head.start() for head in heads[1:]), len(written)][: len(heads)]
    return [
        (int(head[1]), written[head.end() : end]) for head, end in zip(heads, ends, strict=True)
    ]


def send(frame: bytes, **more: bytes) -> bytes:
    head = request(
        b"/v1/send",
        content_type=FRAME_CONTENT_TYPE.encode(),
        accept=b"application/json",
        content_length=b"%d" % len(frame),
        **more,
    )
    return head[: head.index(b"\r\n\r\n") + 4] + frame


def sequences(answers: list[tuple[int, bytes]]) -> list[int]:
    assert [status for status, _ in answers] == [200] * len(answers)
    return [json.loads(body)["places"][0]["first_sequence"] for _, body in answers]


@pytest.mark.parametrize("read_bytes", [997, 4096, SHARED_BYTES, 1_000_000])
def test_a_long_body_is_whole_whatever_the_reads_are(client: Client, read_bytes: int) -> None:
    async def look() -> list[tuple[int, bytes]]:
        line = Line(client)
        for index in range(3):
            line.receive(send(make_frame([bytes([index]) * LONG])), read_bytes)
            await committed(client, line)
        return await line.answered()

    assert sequences(asyncio.run(look())) == [0, 1, 2]
    assert client.rig.pull(max_messages=3).bodies == [bytes([index]) * LONG for index in range(3)]


async def committed(client: Client, line: Line) -> None:
    """Let the request that was received be answered."""
    while line.connection.server_state.tasks or line.connection.requests:
        await asyncio.sleep(0)
        client.rig.broker.writer.step()
        client.rig.run_posted()


class Awaiting:
    """A socket that notes how much it was told to wait for."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def setsockopt(self, level: int, option: int, value: int) -> None:
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_RCVLOWAT)
        self.told.append(value)


def told_to_await(client: Client, read_bytes: int) -> list[int]:
    """What the socket of a long request is told, which is received by such reads."""

    async def look() -> list[int]:
        line, awaiting = Line(client), Awaiting()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(line.connection, "_socket", awaiting)
            line.receive(send(make_frame([b"x" * LONG])), read_bytes)
            await committed(client, line)
            assert sequences(await line.answered()) == [0]
        return awaiting.told

    return asyncio.run(look())


def test_a_socket_that_has_all_of_a_body_is_told_nothing(client: Client) -> None:
    assert told_to_await(client, 1_000_000) == []


def test_a_socket_that_has_less_than_there_is_memory_for_waits_for_the_rest(client: Client) -> None:
    told = told_to_await(client, 100_000)
    assert LONG - SHARED_BYTES - 100_000 <= told[0] < LONG - 100_000
    assert told == sorted(told, reverse=True)
    assert told[-1] == 1, "the next head is read however short it is"


def test_requests_behind_a_long_body_are_read_from_the_same_connection(client: Client) -> None:
    frames = [make_frame([b"x" * LONG]), make_frame([b"small"]), make_frame([b"y" * LONG])]

    async def look() -> list[tuple[int, bytes]]:
        line = Line(client)
        line.receive(b"".join(map(send, frames)), 1_000_000)
        await committed(client, line)
        return await line.answered()

    assert sequences(asyncio.run(look())) == [0, 1, 2]


def test_the_rest_of_a_refused_body_is_passed_over(client: Client) -> None:
    bad = send(make_frame([b"x" * LONG]), content_encoding=b"gzip")

    async def look() -> list[tuple[int, bytes]]:
        line = Line(client)
        line.receive(bad[:100_000], 1_000_000)
        before = await line.answered()
        line.receive(bad[100_000:], 1_000_000)
        line.receive(send(make_frame([b"after"])), 1_000_000)
        await committed(client, line)
        return [*before, *await line.answered()]

    answers = asyncio.run(look())
    assert [status for status, _ in answers] == [415, 415, 200]


def test_B10_bodies_lost_or_refused_in_their_middle_give_their_room_back(rig: Rig) -> None:
    client = Client(rig, FaceLimits(bodies_bytes=2 * LONG + 10_000))
    parts = [send(make_frame([b"x" * LONG])) for _ in range(3)]

    async def look() -> list[int]:
        statuses = []
        for _ in range(3):  # each time all of the room is needed
            lines = [Line(client) for _ in parts]
            for line, part in zip(lines, parts, strict=True):
                line.receive(part[:-1], 1_000_000)
                for _ in range(3):  # the route asks for the body, and answers
                    await asyncio.sleep(0)
            statuses += [status for line in lines for status, _ in answers_of(line.wire.written)]
            for line in lines:
                line.connection.connection_lost(None)
                await asyncio.wait_for(all_answered(line.connection), 30)
        return statuses

    assert asyncio.run(look()) == [503, 503, 503]


def test_B10_the_memory_of_a_body_that_is_lost_in_its_middle_is_let_go_with_its_connection(
    client: Client,
) -> None:
    async def look() -> BytesIO:
        line = Line(client)
        line.receive(send(make_frame([b"x" * LONG]))[:-1], 1_000_000)
        await asyncio.sleep(0)  # the route asks for the body
        held = gc.get_referents(line.connection.get_buffer(-1).obj)
        (memory,) = [one for one in held if isinstance(one, BytesIO)]
        line.connection.connection_lost(None)
        memory.close()  # refused as long as anybody has a view of it
        await asyncio.wait_for(all_answered(line.connection), 30)
        return memory

    assert asyncio.run(look()).closed


def test_B10_a_body_takes_memory_in_proportion_to_what_has_arrived() -> None:
    total = 8 * 1024 * 1024
    body = ReceiveBuffer()
    assert body.taken_bytes == 0
    while body.arrived_bytes < total:
        room = body.room(total - body.arrived_bytes)
        assert body.taken_bytes <= max(64 * 1024, 16 * body.arrived_bytes)
        count = min(len(room), 10_000)
        room[:count] = count * b"m"
        body.fill(count)
    assert body.take() == total * b"m"


def pieces(body: ReceiveBuffer, add: Callable[[bytes], None]) -> None:
    add(b"ab")
    body.room(8)[:3] = b"cde"
    body.fill(3)
    add(b"fg")
    body.room(3)[:3] = b"hij"
    body.fill(3)


def test_a_body_may_come_both_ways() -> None:
    body = ReceiveBuffer()
    pieces(body, body.add)
    assert body.take() == b"abcdefghij"


def test_a_dropped_body_counts_and_keeps_nothing() -> None:
    body = ReceiveBuffer()
    body.drop()
    pieces(body, body.add)
    assert (body.take(), body.arrived_bytes) == (b"", 10)


def test_a_long_body_comes_in_pieces_or_ends_in_its_middle_and_the_loop_hears_of_both(
    tmp_path: Path,
) -> None:
    whole, cut = (send(make_frame([b"x" * LONG, b"y" * LONG])) for _ in range(2))
    with BrokerProcess(tmp_path / "data") as broker:
        with broker.connection() as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for first in range(0, len(whole), 9_001):
                connection.sendall(whole[first : first + 9_001])
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        # What is left is less than the loop waits for: the end has to wake it.
        assert broker.talk(cut[: LONG + 1_000]) == b""
        with broker.connection() as connection:
            connection.sendall(cut)
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        assert broker.stop() == 0
