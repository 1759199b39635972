"""Web servers as processes of their own, with an application of a shop, and requests for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from tests.kit import warm
from tests.kit.ports import free_port
from tests.kit.waiting import DEADLINE_S, wait_for
from tests.services.databases import for_asyncio

ROOT: Final = Path(__file__).resolve().parents[3]
FASTAPI: Final = "tests.client.outbox.fastapi_shop:app"
FLASK: Final = "tests.client.outbox.flask_shop:create_app()"
#: What the servers and their applications import.
IMPORTED: Final = ("fastapi", "flask", "gunicorn.app.wsgiapp", "sqlmodel", "uvicorn")
#: The answer to an order that was taken, to one that the application refused, and to a send without a session.
TAKEN, REFUSED, UNNAMED = 200, 409, 422


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One request."""

    way: str
    n: str
    is_refused: bool


def uvicorn(port: int, *, workers: int = 1) -> list[str]:
    """The command that serves the shop on FastAPI."""
    line = ["uvicorn", FASTAPI, "--port", str(port), "--workers"]
    # On a busy machine a worker may take longer than five seconds to start, and would be killed.
    patience = ["--timeout-worker-healthcheck", str(round(DEADLINE_S))]
    return [*line, str(workers), "--log-level", "warning", *patience]


def gunicorn(port: int, *, workers: int = 1) -> list[str]:
    """The command that serves the shop on Flask, by four threads in each worker."""
    line = ["gunicorn", FLASK, "--bind", f"127.0.0.1:{port}", "--workers"]
    return [*line, str(workers), "--threads", "4", "--log-level", "warning"]


def environment(url: str, broker_url: str) -> dict[str, str]:
    """What an application of the shop is told by."""
    asynchronous = {"SHOP_ASYNC_DATABASE": for_asyncio(url)}
    return {**os.environ, "SHOP_DATABASE": url, "SHOP_BROKER": broker_url, **asynchronous}


@contextmanager
def serving(
    command: Callable[..., list[str]], told: Mapping[str, str], log: Path, **more: int
) -> Iterator[str]:
    """Inside, the server answers at this address. Its end is an orderly one, and must be without an error."""
    port = free_port()
    line = command(port, **more)
    with log.open("w") as output:
        files = output.fileno()
        process = warm.start(line, env=told, stdout=files, stderr=files, imports=IMPORTED)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(lambda: process.poll() is not None or _answers(address), "it does not listen")
        assert process.poll() is None, log.read_text()
        yield address
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) in (0, -signal.SIGTERM), log.read_text()
    finally:
        process.kill()
        process.wait()


def _answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/alive", timeout=DEADLINE_S).status_code == TAKEN
    except httpx.TransportError:
        return False


def place(address: str, orders: Iterable[Order], at_once: int) -> list[int]:
    """The status of each, so many at a time."""

    def post(order: Order) -> int:
        told = {"is_refused": "true" if order.is_refused else "false"}
        return client.post(f"/{order.way}/{order.n}", params=told).status_code

    # A server that fails closes the connection behind its answer; the next request would meet that.
    limits = httpx.Limits(max_keepalive_connections=0)
    with (
        httpx.Client(base_url=address, timeout=DEADLINE_S, limits=limits) as client,
        ThreadPoolExecutor(at_once) as pool,
    ):
        return list(pool.map(post, orders))


def flush(address: str) -> bool:
    """Whether the server's producers have sent all that they know of."""
    return httpx.post(f"{address}/flush", timeout=DEADLINE_S).json() is True
