"""What a transaction knows about the producer that sends in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from qmq_client.outbox.database.dialect import OutboxDialect
from qmq_client.outbox.transaction.handoff import HandOver


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outlet:
    """What a transaction needs to know about a producer; one for each producer."""

    outbox: sa.Table
    order_lock: sa.Table
    dialect: OutboxDialect
    #: Bytes of records that may wait for the commit.
    buffer_bytes: int
    #: The longest record that the server takes; None if it sets no limit.
    record_bytes_max: int | None
    #: Write at once, and check again before every commit, whatever it costs.
    is_strict: bool
    #: The token that new rows carry.
    token: bytes
    #: `InsertTexts`: the INSERT of so many rows, five parameters each.
    insert_texts: Mapping[tuple[int, bool], str]
    #: The producer's clock.
    monotonic_s: Callable[[], float]
    #: Takes committed rows; never blocks, never raises.
    hand_over: Callable[[HandOver], None]
