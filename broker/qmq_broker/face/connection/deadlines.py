"""Ends connections that send or read too slowly: a pass over all of them, a few times a second."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from qmq_broker.face.connection.protocol import BoundedProtocol
from qmq_broker.face.limits import FaceLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCounts:
    """What one pass over the connections did."""

    #: Connections that sent too slowly.
    slow: int
    #: Connections whose client does not read.
    unread: int


def end_slow_connections(
    connections: Iterable[object], now_s: float, limits: FaceLimits
) -> SweepCounts:
    """One pass over all connections: end those too slow at sending or reading in this pass and the
    last.

    Idle connections are closed too, after a while.
    """
    slow = unread = 0
    for connection in list(connections):
        if not isinstance(connection, BoundedProtocol):
            continue
        is_closing = connection.transport.is_closing()
        if is_closing and connection.unread_since_s is None:
            connection.unread_since_s = now_s  # it stays until the rest of its answer was read
        allowed_ms = limits.head_ms if connection.is_in_head else limits.request_ms
        is_held_up = is_closing or connection.flow.read_paused
        is_slow = not is_held_up and _is_over(connection.receiving_since_s, now_s, allowed_ms)
        is_unread = _is_over(connection.unread_since_s, now_s, limits.unread_ms)
        is_idle = not is_closing and _is_over(connection.idle_since_s, now_s, limits.idle_ms)
        was_slow, connection.was_slow = connection.was_slow, is_slow or is_unread or is_idle
        if was_slow and is_slow:
            connection.end_slow()
            slow += 1
        elif was_slow and is_unread:
            connection.transport.abort()
            unread += 1
        elif was_slow and is_idle:
            connection.transport.close()
    return SweepCounts(slow=slow, unread=unread)


def _is_over(since_s: float | None, now_s: float, allowed_ms: int) -> bool:
    return since_s is not None and (now_s - since_s) * 1000 > allowed_ms
