"""The open connections to one broker, used again by whichever call comes next.

httpcore's pool serves many addresses within a bound of connections: it keeps a queue of requests and
looks through all connections before and after each, which is a sixth of what a call costs. Here all
go to one address and none waits for another, so a stack is enough. How a request goes over one of them
is said in `plain_connection.py`.
"""

from __future__ import annotations

import ssl
from collections import deque
from collections.abc import Iterator
from typing import Final

import httpcore

from qmq_client.clock import Clock
from qmq_client.transport.plain_connection import Answer, Opening, PlainConnection

#: Below the 5 s after which common servers drop an idle connection, so that a reused one is alive.
KEPT_S: Final = 4.0
KEPT_CONNECTIONS_MAX: Final = 16


class KeptConnections:
    """Stands where httpx's transport has httpcore's pool. Safe for any number of threads.

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

    def handle_request(self, request: httpcore.Request) -> httpcore.Response:
        """Send one request, on a connection that is open where there is one."""
        connection = self._take()
        if connection is None:
            connection = PlainConnection(self._opening.open(request, self._context))
        answer = connection.exchange(request)
        return httpcore.Response(
            answer.status, headers=answer.headers, content=_Answer(self, connection, answer)
        )

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


class _Answer:
    """The body of one answer; its connection is given back when it is closed."""

    def __init__(self, kept: KeptConnections, connection: PlainConnection, answer: Answer) -> None:
        self._kept = kept
        self._connection = connection
        self._parts = answer.parts
        self._is_closed = False

    def __iter__(self) -> Iterator[bytes]:
        return self._parts

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._kept.give_back(self._connection)
