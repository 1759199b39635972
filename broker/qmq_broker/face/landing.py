"""Between a transport and its connection: where the bytes that come in are put.

A transport asks for a buffer before each read. While the body of a request of the short way is
awaited, that is the body's own memory (`arriving.py`); all else is received into a buffer that the
connections of a server share, and handed on to the parser.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from qmq_broker.face.protocol import BoundedProtocol

#: One read of heads, small requests and whatever is not of the short way.
SHARED_BYTES: Final = 64 * 1024


def landing(connection: Callable[..., BoundedProtocol]) -> Callable[..., Landing]:
    """What a server makes for each connection, in place of `connection`. For one loop."""
    shared = memoryview(bytearray(SHARED_BYTES))

    def land(**arguments: Any) -> Landing:
        return Landing(connection(**arguments), shared)

    return land


class Landing(asyncio.BufferedProtocol):
    """What a transport knows of one connection.

    `shared` may serve many connections of one loop: a read is done with when `buffer_updated` returns.
    """

    def __init__(self, connection: BoundedProtocol, shared: memoryview) -> None:
        self._connection = connection
        self._shared = shared
        self._is_shared = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connection.connection_made(cast("asyncio.Transport", transport))

    def get_buffer(self, _hint: int) -> memoryview:
        """Where the next read goes."""
        room = self._connection.room()
        self._is_shared = room is None
        return self._shared if room is None else room

    def buffer_updated(self, count: int) -> None:
        """So many bytes were read."""
        if self._is_shared:
            self._connection.data_received(bytes(self._shared[:count]))
        else:
            self._connection.body_received(count)

    def eof_received(self) -> None:
        self._connection.eof_received()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)
