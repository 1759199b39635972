"""The open connections to one broker, reused by whichever call comes next.

httpcore's pool serves many addresses within a bound of connections: it queues requests, and scans
all connections before and after each, which is a sixth of the cost of a call. Here all connections
go to one address and no call waits for another, so a stack is enough. How a request goes over one
of them: `plain_connection.py`.
"""

from __future__ import annotations

import ssl
from collections import deque
from typing import Final

from qmq_client.clock import Clock
from qmq_client.transport.plain_connection import Answer, Call, Opening, PlainConnection

#: Below the 5 s after which common servers drop an idle connection, so that a reused one is alive.
KEPT_S: Final = 4.0
KEPT_CONNECTIONS_MAX: Final = 16


class KeptConnections:
    """The idle connections of one transport. Safe for any number of threads.

    No lock: the ends of a deque are popped and pushed atomically, and a connection that was taken
    belongs to its call.
    """

    def __init__(self, clock: Clock, opening: Opening, context: ssl.SSLContext) -> None:
        self._clock = clock
        self._opening = opening
        self._context = context
        #: With the time when each was returned; the newest is last, and is used first.
        self._idle: deque[tuple[float, PlainConnection]] = deque()
        self._is_closed = False

    def exchange(self, call: Call, body: bytes, timeout_s: float) -> tuple[Answer, PlainConnection]:
        """Send one request, on an open connection if there is one.

        `timeout_s` is how long a new connection may take. Raises errors of httpcore.
        """
        connection = self._take()
        if connection is None:
            connection = PlainConnection(self._opening.open(call.url, self._context, timeout_s))
        return connection.exchange(call, body), connection

    def give_back(self, connection: PlainConnection) -> None:
        """The call on this connection is over: keep it if it can carry another one."""
        if not connection.finish():
            connection.close()
            return
        now_s = self._clock.monotonic_s()
        self._idle.append((now_s, connection))
        self._close_oldest(now_s)

    def close(self) -> None:
        """Close idle connections, and keep none from now on."""
        self._is_closed = True
        self._close_oldest(self._clock.monotonic_s())

    def _take(self) -> PlainConnection | None:
        """The newest one that is still open; None if there is none."""
        while self._idle:
            try:
                given_back_s, connection = self._idle.pop()
            except IndexError:  # another thread took it
                break
            is_old = self._clock.monotonic_s() - given_back_s > KEPT_S
            if not is_old and not connection.has_ended():
                return connection
            connection.close()
        return None

    def _close_oldest(self, now_s: float) -> None:
        """Connections opened for a moment with many threads would otherwise stay open forever."""
        while self._idle:
            is_too_many = self._is_closed or len(self._idle) > KEPT_CONNECTIONS_MAX
            try:
                if not is_too_many and now_s - self._idle[0][0] <= KEPT_S:
                    return
                self._idle.popleft()[1].close()
            except IndexError:  # another thread took it
                return
