"""What R7 costs without a broker: the least that httpx, Python's threads and the disk take for it.

The same processes and threads as the product's: a sender with an `httpx.Client`; a server with a loop
and a thread that writes and syncs; a consumer with an `httpx.Client` that waits in a long poll, and a
thread for the handler. The server looks for a length and a blank line, writes the body where the last
one ended, and gives it to the poll that waits: no format, no checks, no groups, leases or journal.
"""

from __future__ import annotations

import asyncio
import os
import threading
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Final

import httpx
import uvloop

from benchmarks.load import age_ns
from benchmarks.processes import free_port
from benchmarks.worker import Control

TIMEOUT_S: Final = 30.0
#: As long as the product's consumers wait by themselves, and longer than a round.
_POLL_TIMEOUT_S: Final = 300.0
_FILE_BYTES: Final = 64 * 1024 * 1024
_END_OF_HEAD: Final = b"\r\n\r\n"


def serve(control: Control, *, directory: str) -> None:
    """The server process: `POST /send` is answered when its body is durable, `/poll` with a body."""
    loop = uvloop.new_event_loop()
    port = free_port()
    descriptor = os.open(Path(directory) / "floor", os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(descriptor, 0, _FILE_BYTES)  # as the product takes room ahead
    server = _Server(loop, descriptor)
    threading.Thread(target=server.write, daemon=True).start()
    loop.run_until_complete(loop.create_server(partial(_Connection, server), "127.0.0.1", port))
    control.tell(f"http://127.0.0.1:{port}")
    loop.run_forever()


def receive(control: Control, *, url: str) -> None:
    """The consumer process: one thread polls, one handles; tells when it is up, and each arrival."""
    bodies: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=partial(_poll, url, bodies), daemon=True).start()
    control.tell("ready")
    while True:
        control.tell(age_ns(bodies.get()))


def _poll(url: str, bodies: SimpleQueue[bytes]) -> None:
    with httpx.Client(timeout=_POLL_TIMEOUT_S) as client:
        while True:
            bodies.put(client.post(f"{url}/poll", content=b"").content)


class _Server:
    """What the connections share."""

    def __init__(self, loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
        self._loop = loop
        self._descriptor = descriptor
        self._sent: SimpleQueue[tuple[asyncio.Transport, bytes]] = SimpleQueue()
        self._poll: asyncio.Transport | None = None
        #: Durable, and not polled yet.
        self._bodies: list[bytes] = []

    def take(self, path: bytes, body: bytes, transport: asyncio.Transport) -> None:
        """One whole request."""
        if path == b"/send":
            self._sent.put((transport, body))
        else:
            self._poll = transport
            self._give()

    def write(self) -> None:
        """The thread that waits for the disk."""
        position = 0
        while True:
            transport, body = self._sent.get()
            position += os.pwrite(self._descriptor, body, position)
            os.fdatasync(self._descriptor)
            self._loop.call_soon_threadsafe(self._publish, transport, body)

    def _publish(self, transport: asyncio.Transport, body: bytes) -> None:
        _answer(transport, b"")
        self._bodies.append(body)
        self._give()

    def _give(self) -> None:
        if self._poll is not None and self._bodies:
            _answer(self._poll, self._bodies.pop(0))
            self._poll = None


class _Connection(asyncio.Protocol):
    """As little of HTTP as one client of a known kind needs."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._received = b""

    def connection_made(
        self,
        transport: asyncio.Transport,  # type: ignore[override]  # a TCP server's, never another
    ) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(_END_OF_HEAD)
        if not end:
            return
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(body) == length:
            self._received = b""
            self._server.take(head.split(b" ", 2)[1], body, self._transport)


def _answer(transport: asyncio.Transport, body: bytes) -> None:
    transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
