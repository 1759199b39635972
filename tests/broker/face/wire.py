"""A connection of the broker's HTTP protocol without a socket: what comes in and what goes out of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.server import ServerState

from qmq_broker.face.connection.protocol import Connection, bounded_connection
from qmq_broker.face.limits import FaceLimits
from tests.broker.face.asgi import Client

PULL = b'{"subject":"a","group":"b","consumer":"c"}'
USUAL = {b"host": b"a", b"content-type": b"application/json", b"content-length": b"42"}


class Wire(asyncio.Transport):
    """A connection whose other end is the test."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1)})
        self.written = b""
        self.is_closed = self.is_aborted = False
        self.on_write: Callable[[], None] = lambda: None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)
        self.on_write()

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def connect(client: Client) -> tuple[Connection, Wire]:
    """A connection to this application. Requires: a running loop."""
    protocol, wire = bounded_connection(client.app, FaceLimits())(ServerState()), Wire()
    protocol.connection_made(wire)
    return protocol, wire


def request(
    path: bytes = b"/v1/pull", *, method: bytes = b"POST", version: bytes = b"1.1", **more: bytes
) -> bytes:
    headers = {**USUAL, **{name.replace("_", "-").encode(): more[name] for name in more}}
    lines = [name + b": " + value for name, value in headers.items() if value]
    return b"\r\n".join((method + b" " + path + b" HTTP/" + version, *lines, b"", PULL))


async def all_answered(protocol: Connection) -> None:
    while protocol.server_state.tasks or (
        protocol.requests and not protocol.transport.is_closing()
    ):
        await asyncio.sleep(0)
