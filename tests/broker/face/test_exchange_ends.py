"""What an exchange leaves behind when its body or its answer has come to an end before its time."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from qmq_broker.face.answers import RequestRefusedError
from qmq_broker.face.connection.direct import DirectExchange
from qmq_broker.face.exchanges.exchange import AsgiExchange, Exchange
from qmq_broker.face.exchanges.requests import BodyRoom, Encoding
from qmq_broker.face.limits import FaceLimits
from tests.broker.face.asgi import JSON, Client, make_scope
from tests.broker.face.asgi import Wire as AsgiWire
from tests.broker.face.wire import Wire
from tests.broker.service.rig import GROUP, SUBJECT, Rig
from tests.kit.waiting import DEADLINE_S

BODIES_BYTES = 1_000
PULL = {"subject": SUBJECT, "group": GROUP, "wait_ms": 50_000}


def direct(wire: Wire) -> DirectExchange:
    scope = make_scope("POST", "/v1/send")
    return DirectExchange(scope, wire, FlowControl(wire), keep_alive=True, on_end=lambda: None)


def test_B10_what_comes_behind_a_lost_body_takes_no_room() -> None:
    room = BodyRoom(FaceLimits(bodies_bytes=BODIES_BYTES))

    async def lose() -> DirectExchange:
        exchange = direct(Wire())
        with room.body(100) as share:
            reading = asyncio.ensure_future(exchange.body(100, share))
            await asyncio.sleep(0)  # it has begun to wait
            exchange.receive(b"x" * 10)
            assert room.taken_bytes == 10
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
        return exchange

    exchange = asyncio.run(lose())
    assert room.taken_bytes == 0
    exchange.receive(b"y" * 10)
    assert room.taken_bytes == 0


def test_B10_what_comes_behind_a_refused_body_is_not_kept() -> None:
    room = BodyRoom(FaceLimits(bodies_bytes=BODIES_BYTES))

    async def refuse() -> DirectExchange:
        exchange = direct(Wire())
        with room.body(BODIES_BYTES) as share:
            reading = asyncio.ensure_future(exchange.body(BODIES_BYTES, share))
            await asyncio.sleep(0)  # it has begun to wait
            exchange.receive(b"x" * BODIES_BYTES)
            exchange.receive(b"x" * BODIES_BYTES)
            with pytest.raises(RequestRefusedError):
                await reading
        return exchange

    exchange = asyncio.run(refuse())
    exchange.receive(b"y" * BODIES_BYTES)
    assert (exchange._arriving.take(), room.taken_bytes) == (b"", 0)
    assert exchange.arrived_bytes == 3 * BODIES_BYTES, "where the next request begins is known"


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_failure_behind_the_answer_is_no_second_answer(client: Client, is_direct: bool) -> None:
    async def fail() -> int:
        wire = Wire()
        asgi_wire = AsgiWire([b""], None, None)
        exchange: Exchange = direct(wire)
        if not is_direct:
            scope = make_scope("POST", "/v1/send")
            exchange = AsgiExchange(scope, asgi_wire.receive, asgi_wire.send)

        async def work() -> None:
            await exchange.answer(200, Encoding.JSON, b"{}")
            raise RuntimeError("nobody foresaw it")

        await client.app.serve(exchange, work)
        begun = [one for one in asgi_wire.sent if one["type"] == "http.response.start"]
        return wire.written.count(b"HTTP/1.1") + len(begun)

    assert asyncio.run(fail()) == 1


def test_a_wake_of_a_client_that_is_gone_is_passed_on(rig: Rig, client: Client) -> None:
    waiting = rig.broker.delivery.waiting

    async def pull(consumer: str, wire: AsgiWire) -> asyncio.Task[None]:
        scope = make_scope("POST", "/v1/pull", [(b"content-type", JSON), (b"content-length", b"1")])
        count = waiting.count
        task = asyncio.ensure_future(client.app(scope, wire.receive, wire.send))
        while waiting.count == count:
            await asyncio.sleep(0)
        return task

    def wire_of(consumer: str, is_gone: asyncio.Event | None) -> AsgiWire:
        return AsgiWire([json.dumps({**PULL, "consumer": consumer}).encode()], is_gone, None)

    async def leave() -> AsgiWire:
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
