"""The open connections to one broker, used again by whichever call comes next.

httpcore's pool serves many addresses within a bound of connections: it keeps a queue of requests and
looks through all connections before and after each, which is a sixth of what a call costs. Here all
go to one address and none waits for another, so a stack is enough. How a request goes over one of them
is said in `plain_connection.py`.
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

    No lock: a deque's ends are taken and given in one step, and a connection that was taken belongs
    to its call.
    """

    def __init__(self, clock: Clock, opening: Opening, context: ssl.SSLContext) -> None:
        self._clock = clock
        self._opening = opening
        self._context = context
        #: With the time when each was given back; the newest is last, and is used first.
        self._idle: deque[tuple[float, PlainConnection]] = deque()
        self._is_closed = False

    def exchange(self, call: Call, body: bytes, timeout_s: float) -> tuple[Answer, PlainConnection]:
        """Send one request, on a connection that is open where there is one, to be given back.

        `timeout_s` is how long a new one may take. Raises errors of httpcore.
        """
        connection = self._take()
        if connection is None:
            connection = PlainConnection(self._opening.open(call.url, self._context, timeout_s))
        return connection.exchange(call, body), connection

    def give_back(self, connection: PlainConnection) -> None:
        """The call on this connection is over: keep it when it can carry another one."""
        if not connection.finish():
            connection.close()
            return
        now_s = self._clock.monotonic_s()
        self._idle.append((now_s, connection))
        self._close_oldest(now_s)

    def close(self) -> None:
        """Close what is idle, and keep nothing from now on."""
        self._is_closed = True
        self._close_oldest(self._clock.monotonic_s())

    def _take(self) -> PlainConnection | None:
        """The newest that is open still; None where there is none."""
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
        """What was used by many threads at once would else stay open for good."""
        while self._idle:
            is_too_many = self._is_closed or len(self._idle) > KEPT_CONNECTIONS_MAX
            try:
                if not is_too_many and now_s - self._idle[0][0] <= KEPT_S:
                    return
                self._idle.popleft()[1].close()
            except IndexError:  # another thread took it
                return
