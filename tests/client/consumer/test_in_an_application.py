"""Consumers inside a web application: they begin and end with it, and its loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import flask
import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from qmq_client import Consumers, Message, consumer
from qmq_client.testing import MemoryBroker, MemoryTransport
from tests.client.consumer.kit import GROUP, SUBJECT, WAIT_S
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import DEADLINE_S, becomes, wait_for

WRITTEN_AGAIN_S = 5.0
#: An application whose consumers write down what they handle, and that they stopped.
RELOADED = """
import os
from contextlib import asynccontextmanager
from starlette.applications import Starlette
from qmq_client import Consumers, consumer

def note(line: str) -> None:
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(f"{line}\\n")

@consumer("orders", group="audit", wait_ms=100)
def handler(body: str) -> None:
    note(f"first program handled {body}")

@asynccontextmanager
async def lifespan(app):
    async with Consumers(handler, os.environ["BROKER"]) as consumers:
        yield
    note(f"stopped, clean: {consumers.stop().is_clean}")

app = Starlette(lifespan=lifespan)
"""


def test_C8_a_reloading_server_stops_the_consumers_of_the_old_program_and_starts_the_new(
    tmp_path: Path,
) -> None:
    # Alone in its folder, which is watched.
    program, notes = tmp_path / "shop" / "shop.py", tmp_path / "notes"
    program.parent.mkdir()
    program.write_text(RELOADED)
    notes.touch()
    server = [sys.executable, "-m", "uvicorn", "shop:app", "--reload", "--port", "0"]

    def put(body: str) -> None:
        messages = [{"subject": SUBJECT, "body": body}]
        httpx.post(
            f"{broker.url}/v1/send", json={"messages": messages}, timeout=DEADLINE_S
        ).raise_for_status()

    with BrokerProcess(tmp_path / "data") as broker:
        given = {"BROKER": broker.url, "NOTES": str(notes)}
        given["PYTHONPATH"] = os.pathsep.join(sys.path)
        process = subprocess.Popen(server, cwd=program.parent, env=os.environ | given)
        try:
            put("one")
            wait_for(lambda: "first program handled one" in notes.read_text())
            second = RELOADED.replace("first program", "second program")
            program.write_text(second)
            # The first program may have been quicker than whoever watches its folder.
            while not becomes(lambda: "stopped" in notes.read_text(), within_s=WRITTEN_AGAIN_S):
                program.write_text(second)
            put("two")
            wait_for(lambda: "second program handled two" in notes.read_text())
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(WAIT_S)
    ends = [line for line in notes.read_text().splitlines() if line.startswith("stopped")]
    assert len(ends) >= 2
    assert set(ends) == {"stopped, clean: True"}


def test_C8_a_starlette_application_runs_its_consumers_for_its_lifetime() -> None:
    broker = MemoryBroker()
    handled = threading.Event()

    @consumer(SUBJECT, group=GROUP)
    async def handler(body: int) -> None:
        handled.set()

    consumers = Consumers(handler, MemoryTransport(broker))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with consumers:
            yield

    async def order(_: Request) -> JSONResponse:
        broker.put(Message(SUBJECT, 1))
        return JSONResponse({"handled": await asyncio.to_thread(handled.wait, WAIT_S)})

    application = Starlette(routes=[Route("/", order)], lifespan=lifespan)
    server = uvicorn.Server(uvicorn.Config(application, port=0, lifespan="on", log_level="warning"))
    before = set(threading.enumerate())
    serving = threading.Thread(target=server.run)
    serving.start()
    try:
        wait_for(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        answer = httpx.get(f"http://127.0.0.1:{port}/", timeout=WAIT_S)
    finally:
        server.should_exit = True
        serving.join(WAIT_S)
    assert answer.json() == {"handled": True}
    assert consumers.stop().is_clean, "stopped before, and tells the same again"
    began = set(threading.enumerate()) - before
    assert not [one for one in began if one.name.startswith("qmq-")]
    assert broker.lag(SUBJECT, GROUP) == 0


@pytest.mark.asyncio
async def test_C8_the_applications_loop_continues_while_consumers_stop() -> None:
    broker = MemoryBroker()
    begun, may_finish = threading.Event(), threading.Event()

    @consumer(SUBJECT, group=GROUP)
    def handler(body: int) -> None:
        begun.set()
        assert may_finish.wait(WAIT_S)

    async def let_it_finish() -> None:
        assert await asyncio.to_thread(consumers._stopping.wait, WAIT_S)
        may_finish.set()

    broker.put(Message(SUBJECT, 1))
    consumers = Consumers(handler, MemoryTransport(broker))
    async with consumers:
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        helping = asyncio.create_task(let_it_finish())
    await helping
    assert consumers.stop().is_clean
    assert broker.lag(SUBJECT, GROUP) == 0


@pytest.mark.asyncio
async def test_C8_an_application_that_is_cancelled_while_it_starts_leaves_no_consumer_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handler = consumer(SUBJECT, group=GROUP)(lambda body: None)
    consumers = Consumers(handler, MemoryTransport(MemoryBroker()))
    before = set(threading.enumerate())

    def names() -> list[str]:
        began = set(threading.enumerate()) - before
        return [one.name for one in began if one.name.startswith("qmq-")]

    async def serve() -> None:
        async with consumers:
            await asyncio.Event().wait()

    began, may_continue = threading.Event(), threading.Event()

    def check() -> None:
        began.set()
        assert may_continue.wait(WAIT_S)

    monkeypatch.setattr(consumers, "_check", check)
    serving = asyncio.create_task(serve())
    assert await asyncio.to_thread(began.wait, WAIT_S)
    serving.cancel()
    await asyncio.sleep(0)
    may_continue.set()
    with pytest.raises(asyncio.CancelledError):
        await serving
    await asyncio.to_thread(wait_for, lambda: not names())


def test_a_flask_application_runs_its_consumers_beside_it() -> None:
    broker = MemoryBroker()
    handled = threading.Event()

    @consumer(SUBJECT, group=GROUP)
    def handler(body: int) -> None:
        with application.app_context():
            assert flask.current_app.name == application.name
            handled.set()

    application = flask.Flask("shop")

    @application.post("/")
    def order() -> dict[str, bool]:
        broker.put(Message(SUBJECT, 1))
        return {"handled": handled.wait(WAIT_S)}

    with Consumers(handler, MemoryTransport(broker)):
        assert application.test_client().post("/").json == {"handled": True}
    assert broker.lag(SUBJECT, GROUP) == 0
