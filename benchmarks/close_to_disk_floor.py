"""What R4 costs without a broker: the least that sockets, a loop, a thread and the disk take for it.

The same processes and threads as the product's: a client with raw sockets; a server with a loop that
receives, and a thread that writes what has gathered and syncs it, then has the loop answer. The server
looks for a length and a blank line, receives a body into memory that its connection uses again, and writes
it where the last one ended: nothing is checked, no id is looked up, nothing can be found again.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final

import uvloop

from benchmarks.processes import free_port
from benchmarks.worker import Control
from qmq_broker.face.connection.protocol import AWAITED_BYTES
from qmq_client.wire.frame import read_header
from qmq_client.wire.frame_head import FRAME_HEADER_BYTES
from qmq_client.wire.requests import SendAnswer, encode_control

#: Longer than any frame of the benchmark with its head.
_REQUEST_BYTES_MAX: Final = 2 * 1024 * 1024
_END_OF_HEAD: Final = b"\r\n\r\n"
_HEAD_BYTES_MAX: Final = 1024
_REQUESTS_PER_COMMIT_MAX: Final = 1024


def serve(control: Control, *, path: str) -> None:
    """The server process: `POST` is answered when its body is durable in the file of this path."""
    loop = uvloop.new_event_loop()
    port = free_port()
    server = _Server(loop, os.open(path, os.O_RDWR))
    threading.Thread(target=server.write, daemon=True).start()
    loop.run_until_complete(loop.create_server(partial(_Connection, server), "127.0.0.1", port))
    control.tell(port)
    loop.run_forever()


class _Server:
    """What the connections share."""

    def __init__(self, loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
        self._loop = loop
        self._descriptor = descriptor
        self._received: SimpleQueue[tuple[asyncio.Transport, memoryview]] = SimpleQueue()

    def take(self, transport: asyncio.Transport, body: memoryview) -> None:
        """One whole request; its memory is not written to before the answer."""
        self._received.put((transport, body))

    def write(self) -> None:
        """The thread that waits for the disk: one commit of all that has gathered."""
        position = 0
        while True:
            gathered = [self._received.get()]
            while len(gathered) < _REQUESTS_PER_COMMIT_MAX:
                try:
                    gathered.append(self._received.get_nowait())
                except Empty:
                    break
            position += os.pwritev(self._descriptor, [body for _, body in gathered], position)
            os.fdatasync(self._descriptor)
            self._loop.call_soon_threadsafe(_answer, gathered)


class _Connection(asyncio.BufferedProtocol):
    """As little of HTTP as one client of a known kind needs."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._memory = memoryview(bytearray(_REQUEST_BYTES_MAX))
        self._count = 0
        #: Where the body begins and ends, once its head is there.
        self._body = (0, 0)
        self._awaited_bytes = 1

    def connection_made(
        self,
        transport: asyncio.Transport,  # type: ignore[override]  # a TCP server's, never another
    ) -> None:
        self._transport = transport
        self._socket: socket.socket = transport.get_extra_info("socket")

    def get_buffer(self, _hint: int) -> memoryview:
        return self._memory[self._count :]

    def buffer_updated(self, count: int) -> None:
        self._count += count
        if not self._body[1]:
            head, end, _ = bytes(self._memory[:_HEAD_BYTES_MAX]).partition(_END_OF_HEAD)
            if not end:
                return
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            first = len(head) + len(end)
            self._body = (first, first + length)
        missing_bytes = self._body[1] - self._count
        self._await(min(missing_bytes, AWAITED_BYTES) or 1)
        if not missing_bytes:
            self._server.take(self._transport, self._memory[self._body[0] : self._body[1]])
            self._count, self._body = 0, (0, 0)

    def _await(self, count: int) -> None:
        """Be woken when so much has come, as the product is."""
        if count != self._awaited_bytes:
            self._awaited_bytes = count
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)


def _answer(gathered: list[tuple[asyncio.Transport, memoryview]]) -> None:
    """Say the same as the product, as far as the client looks at it."""
    for transport, body in gathered:
        header = read_header(bytes(body[:FRAME_HEADER_BYTES]))
        answer = encode_control(
            SendAnswer(
                frame_crc=header.body_crc,
                count=header.record_count,
                duplicates=0,
                physical_offset=0,
                stored_at_ms=0,
                durability="durable",
            )
        )
        transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(answer), answer))
