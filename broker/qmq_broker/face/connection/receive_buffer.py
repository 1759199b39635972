"""Between a transport and its connection: where incoming bytes are put.

A transport asks for a buffer before each read. While the body of a request of the fast path is
expected, that is the body's own memory (`exchanges/arriving.py`); everything else is received into
a buffer shared by the connections of a server and passed on to the parser. A long body comes in
pieces as small as the sender's system makes them, and each would wake the loop. So once a read came
short, the expected length is set on the socket. A read that fills its memory is followed by the next
one at once.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from qmq_broker.face.connection.protocol import BoundedProtocol

#: One read of heads, small requests and everything outside the fast path.
SHARED_BYTES: Final = 64 * 1024
#: One read of a long body: half of a usual frame, so that one is on its way while another is read.
AWAITED_BYTES: Final = 256 * 1024


def receiving(connection: Callable[..., BoundedProtocol]) -> Callable[..., ReceivingProtocol]:
    """What a server creates for each connection, in place of `connection`. For one loop."""
    shared = memoryview(bytearray(SHARED_BYTES))

    def land(**arguments: Any) -> ReceivingProtocol:
        return ReceivingProtocol(connection(**arguments), shared)

    return land


class ReceivingProtocol(asyncio.BufferedProtocol):
    """What a transport knows of one connection.

    `shared` may serve many connections of one loop: a read is finished when `buffer_updated`
    returns.
    """

    def __init__(self, connection: BoundedProtocol, shared: memoryview) -> None:
        self._connection = connection
        self._shared = shared
        self._is_shared = True
        #: Length of the buffer of the next read.
        self._room_bytes = 0
        self._socket: socket.socket | None = None
        #: How much must have come before the loop is woken.
        self._awaited_bytes = 1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if (
            transport.get_extra_info("sslcontext") is None
        ):  # TLS: the bytes that come are not those that are read
            self._socket = transport.get_extra_info("socket")
        self._connection.connection_made(cast("asyncio.Transport", transport))

    def get_buffer(self, _hint: int) -> memoryview:
        """The buffer for the next read."""
        missing_bytes = self._connection.missing_body_bytes
        self._is_shared = not missing_bytes
        room = self._connection.room(missing_bytes) if missing_bytes else self._shared
        self._room_bytes = len(room)
        return room

    def buffer_updated(self, count: int) -> None:
        """This many bytes were read."""
        if self._is_shared:
            self._connection.data_received(bytes(self._shared[:count]))
        else:
            self._connection.body_received(count)
        missing_bytes = self._connection.missing_body_bytes
        is_short = count < self._room_bytes
        if self._awaited_bytes > 1 or (is_short and missing_bytes > SHARED_BYTES):
            self._await(min(missing_bytes, AWAITED_BYTES))

    def _await(self, count: int) -> None:
        """Wake the loop only when this much has come, or the rest, not for each piece.

        Requires: at least this much will come, or the end of the connection, which wakes the loop
        too.
        """
        wanted_bytes = max(1, count)
        if self._socket is None or wanted_bytes == self._awaited_bytes:
            return
        self._awaited_bytes = wanted_bytes
        with suppress(OSError):  # it is closed
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted_bytes)

    def eof_received(self) -> bool:
        return self._connection.eof_received()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)
