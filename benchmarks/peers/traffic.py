"""The work of a message system's client process, the same for every system.

Imported in the peers' environment: standard library only. What is timed begins and ends here, in the
process that does the work; its processor time is measured by the parent.
"""

from __future__ import annotations

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import cycle, islice
from typing import Any, Protocol, TypeVar

from benchmarks.worker import Control

#: Messages that a client has on their way before it waits for answers, where it decides that itself.
IN_FLIGHT = 1_000
#: Messages of one read.
READ = 1_000
READ_BYTES = 2 * 1024 * 1024
#: Bodies that take turns: enough that no cache of a processor holds them all.
_BODIES = 4_096
_SEED = 7
_STAMP_BYTES = 8
#: What a reader sends to itself where only a message that came shows that it would see the next ones.
PROBE = b"probe"
#: Lone sends before those that count: connections, imports.
FIRST_SENDS = 20

Value = TypeVar("Value")
Send = Callable[[bytes], object]
Seen = Callable[[bytes], object]
Begins = Callable[[], object]


class System(Protocol):
    """One client on one server: `PlainSystem` or `LoopSystem` with what is its own."""

    def create(self, subject: str) -> None:
        """Make what messages of this subject are kept in."""

    def produce(self, subject: str, bodies: Iterator[bytes]) -> None:
        """Send all of them, by the client's way for many; return when each was accepted."""

    def consume(self, subject: str, count: int, seen: Seen, begins: Begins) -> None:
        """Read this many from the beginning, call `seen` with each body, and ack them all.

        Calls `begins` when it would see a message that is sent now.
        """

    def receive(self, subject: str, count: int, seen: Seen, begins: Begins) -> None:
        """The same for messages that come one by one: each is seen as soon as it is there."""

    def lone(self, subject: str, size: int, count: int) -> list[float]:
        """How long each send took until its answer, in milliseconds, one after the other."""

    def pace(self, subject: str, size: int, count: int, per_s: int) -> None:
        """Send so many a second, waiting for no answer but the last ones."""


class PlainSystem(ABC):
    """A client that is called from a thread, which waits for it."""

    @abstractmethod
    def sender(self, subject: str) -> Send:
        """Sends one message and waits for its answer."""

    @abstractmethod
    def pacer(self, subject: str) -> tuple[Send, Callable[[], object]]:
        """Two functions: one sends a message without waiting, the other waits for all of them."""

    def lone(self, subject: str, size: int, count: int) -> list[float]:
        """See `System`."""
        send = self.sender(subject)
        times_ms = []
        for _ in range(count):
            started_ns = time.perf_counter_ns()
            send(stamped(size))
            times_ms.append((time.perf_counter_ns() - started_ns) / 1e6)
        return times_ms

    def pace(self, subject: str, size: int, count: int, per_s: int) -> None:
        """See `System`."""
        send, wait = self.pacer(subject)
        started_s = time.monotonic()
        for i in range(count):
            until_s = started_s + i / per_s - time.monotonic()
            if until_s > 0:
                time.sleep(until_s)
            send(stamped(size))
        wait()


class LoopSystem(ABC):
    """A client whose methods are coroutines, on the loop that its project recommends."""

    def __init__(self) -> None:
        import uvloop

        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    def run(self, work: Awaitable[Value]) -> Value:
        """Until it is done."""

        async def awaited() -> Value:
            return await work

        return self._runner.run(awaited())

    @abstractmethod
    async def send(self, subject: str, body: bytes) -> None:
        """Send one message and wait for its answer."""

    def lone(self, subject: str, size: int, count: int) -> list[float]:
        """See `System`."""
        return self.run(self._lone(subject, size, count))

    async def _lone(self, subject: str, size: int, count: int) -> list[float]:
        times_ms = []
        for _ in range(count):
            started_ns = time.perf_counter_ns()
            await self.send(subject, stamped(size))
            times_ms.append((time.perf_counter_ns() - started_ns) / 1e6)
        return times_ms

    def pace(self, subject: str, size: int, count: int, per_s: int) -> None:
        """See `System`."""
        self.run(self._pace(subject, size, count, per_s))

    async def _pace(self, subject: str, size: int, count: int, per_s: int) -> None:
        started_s = time.monotonic()
        async with asyncio.TaskGroup() as sends:
            for i in range(count):
                until_s = started_s + i / per_s - time.monotonic()
                if until_s > 0:
                    await asyncio.sleep(until_s)
                sends.create_task(self.send(subject, stamped(size)))


def bodies(size: int, count: int) -> Iterator[bytes]:
    """So many bodies that do not repeat for long."""
    source = random.Random(_SEED)
    made = [source.randbytes(size) for _ in range(min(_BODIES, count))]
    return islice(cycle(made), count)


def stamped(size: int) -> bytes:
    """A body that says when it was made, by the clock that all processes of a machine share."""
    return time.monotonic_ns().to_bytes(_STAMP_BYTES, "big").ljust(size, b".")


def age_ms(body: bytes) -> float:
    """Since a stamped body was made."""
    return (time.monotonic_ns() - int.from_bytes(body[:_STAMP_BYTES], "big")) / 1e6


def serve(control: Control, system: Any, **more: Callable[..., Any]) -> None:
    """Do what the parent says until it is gone: an order is the name of a function below, or of one more."""
    orders: dict[str, Callable[..., Any]] = {
        **more,
        "create": create,
        "produce": produce,
        "consume": consume,
        "receive": receive,
        "lone": lone,
        "pace": pace,
    }
    control.tell("ready")
    while True:
        order, *arguments = control.hear()
        control.tell(orders[order](control, system, *arguments))


def create(_: Control, system: System, subject: str) -> str:
    system.create(subject)
    return "created"


def produce(_: Control, system: System, subject: str, size: int, count: int) -> tuple[float, float]:
    """When it began and when everything was accepted."""
    messages = bodies(size, count)
    started_s = time.monotonic()
    system.produce(subject, messages)
    return started_s, time.monotonic()


def consume(
    control: Control, system: System, subject: str, size: int, count: int
) -> tuple[float, float]:
    """When it began and when all were acked; tells the parent that it begins."""
    return read(control, partial(system.consume, subject, count), size, count)


def read(
    control: Control, work: Callable[[Seen, Begins], object], size: int, count: int
) -> tuple[float, float]:
    """The same for any way to read, which is given what sees each body."""
    lengths: dict[int, int] = {}

    def seen(body: bytes) -> None:
        length = len(body)
        lengths[length] = lengths.get(length, 0) + 1

    started: list[float] = []

    def begins() -> None:
        control.tell("begins")
        started.append(time.monotonic())

    work(seen, begins)
    ended_s = time.monotonic()
    if lengths != {size: count}:
        raise AssertionError(f"{count} messages of {size} bytes were stored, read: {lengths}")
    return started[0], ended_s


def receive(control: Control, system: System, subject: str, count: int) -> list[float]:
    """How old each message was when it was seen, in milliseconds."""
    ages: list[float] = []
    system.receive(
        subject,
        count,
        lambda body: ages.append(age_ms(body)),
        lambda: control.tell("begins"),
    )
    return ages


def lone(_: Control, system: System, subject: str, size: int, count: int) -> list[float]:
    """See `System`; some sends before do not count."""
    return system.lone(subject, size, FIRST_SENDS + count)[FIRST_SENDS:]


def pace(_: Control, system: System, subject: str, size: int, count: int, per_s: int) -> float:
    """Seconds until the last answer."""
    started_s = time.monotonic()
    system.pace(subject, size, count, per_s)
    return time.monotonic() - started_s
