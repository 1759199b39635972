"""What a peer's process is told to do. Imported in the peers' environment: standard library only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

from benchmarks.worker import Control

BODY_BYTES = 1024
#: The business row of a transaction, the same for all that speak SQL by themselves.
CREATE_ORDERS = (
    "CREATE TABLE orders (id bigserial PRIMARY KEY, customer varchar(64), amount int, "
    "note varchar(64))"
)
CUSTOMER, NOTE = "customer-17", "two suitcases, window seat"


class Peer(Protocol):
    """One project on one database."""

    async def fill(self, count: int) -> None:
        """Store this many messages of `BODY_BYTES`, as its own bulk call does."""

    async def drain(self, count: int) -> None:
        """Work on all of them with a handler that does nothing; return when none is left."""

    async def transact(self, amount: int, *, sends: bool) -> None:
        """One transaction with one business row, and one message or none."""


async def serve(control: Control, peer: Peer) -> None:
    """Do what the parent says until it is gone."""
    control.tell("ready")
    while True:
        order, count = control.hear()
        if order == "drain":
            await peer.fill(count)
            control.tell(await _timed(partial(peer.drain, count)))
        else:
            transact = partial(peer.transact, sends=order == "send")
            control.tell([await _timed(partial(transact, i)) for i in range(count)])


async def _timed(work: Callable[[], Awaitable[None]]) -> float:
    started_ns = time.perf_counter_ns()
    await work()
    return (time.perf_counter_ns() - started_ns) / 1e9


def run(control: Control, main: Callable[[Control], Awaitable[None]]) -> None:
    """Run a peer on the loop that it recommends."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_awaited(main(control)))


async def _awaited(work: Awaitable[None]) -> None:
    await work
