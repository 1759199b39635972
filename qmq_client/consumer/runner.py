"""`Consumers`: runs handlers on threads, and stops them without losing messages.

For each handler one thread pulls, one settles, and `concurrency` threads work; each is a thin shell
around a pass of `Member`. Stopping: no new pulls, unstarted messages are returned, running handlers
finish, outcomes are sent, all within a deadline. A message whose handler has not finished by then
is delivered again when its lease would have ended; a stop alone makes no dead letters.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Final

from qmq_client.clock import SYSTEM_CLOCK, Clock
from qmq_client.consumer.async_calls import AsyncCalls
from qmq_client.consumer.error_texts import error_text
from qmq_client.consumer.forked import Forks
from qmq_client.consumer.handler import (
    Handler,
    HandlerSource,
    Middleware,
    as_middleware,
    collect_handlers,
)
from qmq_client.consumer.identity import Identity, refuse_nameless
from qmq_client.consumer.member import Lines, Member, Pass
from qmq_client.consumer.outage import InboxOutages, Outage
from qmq_client.deadline import checked_deadline_s
from qmq_client.errors import ConfigurationError
from qmq_client.signal_flag import SignalFlag
from qmq_client.transport.address import BrokerAddress
from qmq_client.transport.http import HttpTransport
from qmq_client.transport.port import Transport, checked_transport
from qmq_client.wire.names import check_name

_LOG: Final = logging.getLogger("qmq.consumer")
STOP_DEADLINE_S: Final = 30.0
#: Outcomes wait this long to be sent together or with the next pull.
SETTLE_AFTER_S: Final = 0.02
#: After an unexpected error, so that a loop cannot spin.
_UNEXPECTED_PAUSE_S: Final = 1.0
#: Share of the deadline reserved for cancelled handlers and the last settlements.
_LAST_SHARE: Final = 0.2
#: How often threads check for a stop, for leases to extend, and for calls over their time-out.
_LOOK_S: Final = 1.0
_LOOK_S_MIN: Final = 0.01
_JOIN_S: Final = 0.1
#: Time to close the connections of all asynchronous inboxes: a handler may block their loop.
_CLOSE_S_MAX: Final = 1.0
#: Time for a stop after a second signal.
_HURRIED_S: Final = 1.0
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReport:
    """The result of a stop."""

    #: Whether every thread ended and every outcome was sent. A thread that only probes an inbox does not count.
    is_clean: bool
    #: Handler calls still running at the deadline; their leases end by themselves.
    running: int
    #: Outcomes that could not be sent; their messages will be delivered again.
    unsettled: int


class Consumers:
    """All handlers of one process at one broker. Started once; any thread may call `stop`."""

    def __init__(
        self,
        handlers: HandlerSource,
        broker: str | BrokerAddress | Transport,
        *,
        middleware: Middleware | Iterable[Middleware] = (),
        consumer_id: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`consumer_id`: a name that stays the same after a restart; by default each process generates one."""
        if consumer_id is not None:
            check_name(consumer_id, field="consumer_id")
        self._identity = Identity(consumer_id)
        #: Pulls use separate connections, so that a stop can end a long poll.
        self._own_transports = _own_transports(broker)
        self._async_calls = AsyncCalls()
        self._outage = Outage(clock or SYSTEM_CLOCK)
        self._inbox_outages = InboxOutages(clock or SYSTEM_CLOCK)
        self._stop_requested = SignalFlag()
        self._stopping = threading.Event()
        self._settling_ends = threading.Event()
        self._abandoned = threading.Event()
        #: The exception of a handler that ends the interpreter.
        self.exit_error: BaseException | None = None
        #: The lock of start and stop. Reentrant, because a signal handler may stop in the middle of either.
        self._lock = threading.RLock()
        #: When the stop must end, and the shortest requested duration.
        self._ends_at_s = self._deadline_s = float("inf")
        self._report: StopReport | None = None
        self._hurried_at_s: float | None = None
        self._threads = Threads()
        #: The fork count of the process that started it.
        self._started_at_forks: int | None = None
        around = as_middleware(middleware)
        collected = collect_handlers(handlers)
        if consumer_id is None:
            refuse_nameless(collected)
        self.members = [
            self._member(handler.inside(around), broker, clock or SYSTEM_CLOCK)
            for handler in collected
        ]

    @property
    def consumer_id(self) -> str:
        """The consumer id of this process at the broker."""
        return self._identity.name

    def run(self, *, stop_deadline_s: float = STOP_DEADLINE_S) -> StopReport:
        """Start, and block until SIGTERM, SIGINT or `request_stop`; then stop.

        After a second signal the stop takes at most a second. After stopping, raises the exception
        of a handler that ends the interpreter (`SystemExit`, `KeyboardInterrupt`), or one of the
        application's signal handlers.
        """
        stop_deadline_s = checked_deadline_s("stop_deadline_s of run", stop_deadline_s)
        is_main = threading.current_thread() is threading.main_thread()
        before = {one: signal.signal(one, self._on_signal) for one in _SIGNALS} if is_main else {}
        try:
            self.start()
            try:
                self._stop_requested.wait()
            finally:
                report = self.stop(stop_deadline_s)
        finally:
            for number, action in before.items():
                signal.signal(number, action)
        if self.exit_error is not None:
            raise self.exit_error
        return report

    def start(self) -> None:
        """Start all threads. Raises when an inbox table is missing, before any thread runs.

        Raises `ConfigurationError` when started before.
        """
        self._refuse_in_handler("start")  # it would wait for a stop, which waits for the handler
        if self._is_of_parent():
            raise ConfigurationError(
                setting="consumers",
                value="started before this process was forked",
                remedy="Start the consumers in each process, after the fork.",
            )
        with self._lock:
            if self._threads.all() or self._stopping.is_set():
                raise ConfigurationError(
                    setting="consumers", value="started before", remedy="Make a new Consumers."
                )
            self._check()
            self._started_at_forks = Forks.count
            for member in self.members:
                name = member.options.name
                self._threads.add("pull", name, self._shell(member.pull_once))
                self._threads.add("settle", name, partial(self._settle, member))
                for _ in range(member.options.concurrency):
                    self._threads.add("work", name, self._shell(member.work_once))
            for thread in self._threads.all():
                thread.start()
        _LOG.info(
            "consumers_started consumer_id=%s handlers=%d", self.consumer_id, len(self.members)
        )

    def request_stop(self) -> None:
        """Make `run` stop; returns at once. Safe in signal handlers and from handlers."""
        self._stop_requested.set()

    def stop(self, deadline_s: float = STOP_DEADLINE_S) -> StopReport:
        """Stop within `deadline_s`. Safe to call again: later calls return the same report.

        Raises `ConfigurationError` in a handler, because the stop would wait for it. A call with a
        shorter deadline speeds up a running stop; after an exception, such as Ctrl-C, the next call
        continues. In a forked child it does nothing: threads and messages belong to the parent.
        """
        if self._is_of_parent():
            return StopReport(is_clean=True, running=0, unsettled=0)
        self._refuse_in_handler("stop")
        deadline_s = checked_deadline_s("deadline_s of stop", deadline_s)
        self._end_within(max(0.0, deadline_s), SYSTEM_CLOCK.monotonic_s())
        with self._lock:
            return self._report or self._stop_here()

    def _stop_here(self) -> StopReport:
        began_at_s = SYSTEM_CLOCK.monotonic_s()
        self._stopping.set()
        self._outage.wake()
        for member in self.members:
            member.stop()
        self._join("work", 1 - 2 * _LAST_SHARE)
        self._async_calls.cancel()
        self._join("work", 1 - _LAST_SHARE)
        self._join("pull", 1 - _LAST_SHARE)
        for transport in self._own_transports[:1]:
            transport.close()
        self._join("pull", 1 - _LAST_SHARE / 2)
        for member in self.members:
            member.let_go_of_all()
        self._settling_ends.set()
        self._outage.wake()
        for member in self.members:
            member.ledger.wake()
        self._join("settle", 1.0)
        return self._finish(began_at_s)

    def counters(self) -> Mapping[str, Mapping[str, int]]:
        """Counts of each handler, by "subject/group"."""
        return {member.options.name: member.counters.snapshot() for member in self.members}

    def __enter__(self) -> Consumers:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Consumers:
        """Start without blocking the application's loop."""
        try:
            await asyncio.to_thread(self.start)
        except asyncio.CancelledError:  # the start continues, so it must be stopped here
            await asyncio.to_thread(self.stop)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Handlers may need the application's loop to finish, so it continues meanwhile.
        await asyncio.to_thread(self.stop)

    def _is_of_parent(self) -> bool:
        """Whether a parent process started it before a fork."""
        return self._started_at_forks not in {None, Forks.count}

    def _refuse_in_handler(self, call: str) -> None:
        if self._threads.are_current():
            raise ConfigurationError(
                setting=f"Consumers.{call}",
                value="called in a handler of these consumers, so it would wait for itself",
                remedy="Call request_stop(), which ends run(); without run() call stop() in another thread.",
            )

    def _check(self) -> None:
        try:
            for member in self.members:
                member.check()
        except BaseException:
            self._end_loop()
            raise

    def _end_loop(self) -> None:
        ends_at_s = SYSTEM_CLOCK.monotonic_s() + _CLOSE_S_MAX
        for member in self.members:
            member.close(max(0.0, ends_at_s - SYSTEM_CLOCK.monotonic_s()))
        self._async_calls.stop(_JOIN_S)

    def _member(
        self, handler: Handler, broker: str | BrokerAddress | Transport, clock: Clock
    ) -> Member:
        if isinstance(broker, str | BrokerAddress):
            pulling, settling = self._own_transports
            lines = Lines(pulling=pulling, settling=settling)
        else:
            lines = Lines(pulling=checked_transport(broker), settling=broker)
        return Member(
            handler,
            lines,
            identity=self._identity,
            clock=clock,
            async_calls=self._async_calls,
            outage=self._outage,
            inbox_outages=self._inbox_outages,
            on_exit=self._on_exit,
        )

    def _shell(self, step: Callable[[], Pass]) -> Callable[[], None]:
        def loop() -> None:
            while not self._stopping.is_set():
                self._pass(step, self._stopping)

        return loop

    def _pass(self, step: Callable[[], Pass], ends: threading.Event) -> None:
        seen = self._outage.marks()
        done = self._guarded(step)
        if done.is_outage and not ends.is_set():
            self._outage.wait(done.pause_s, seen)
        elif done.pause_s:
            ends.wait(done.pause_s)

    def _guarded(self, step: Callable[[], Pass]) -> Pass:
        """Run one pass. An unexpected error is logged, and the loop continues; an exit stops all consumers cleanly."""
        try:
            return step()
        except (SystemExit, KeyboardInterrupt) as error:
            self._on_exit(
                error
            )  # raised by the application's on_stale; exits of handlers are handled earlier
        except BaseException as error:  # the top of every thread's loop
            _LOG.exception(
                "unexpected_error step=%s error=%s",
                step.__qualname__,
                error_text(error),
            )
        return Pass(count=0, pause_s=_UNEXPECTED_PAUSE_S, has_failed=True)

    def _settle(self, member: Member) -> None:
        options = member.options
        # The next message of a key waits for the outcome of the one before.
        settle_after_s = 0.0 if options.ordered else SETTLE_AFTER_S
        shortest_ms = min(options.lease_ms, options.timeout_ms or options.lease_ms)
        look_s = max(_LOOK_S_MIN, min(_LOOK_S, shortest_ms / 8_000))
        while not self._settling_ends.is_set():
            if member.ledger.wait(look_s):
                self._settling_ends.wait(settle_after_s)
            self._pass(member.settle_once, self._settling_ends)
        while len(member.ledger) and not self._abandoned.is_set():
            self._pass(member.settle_once, self._abandoned)

    def _end_within(self, deadline_s: float, since_s: float) -> None:
        self._deadline_s = min(self._deadline_s, deadline_s)
        self._ends_at_s = min(self._ends_at_s, since_s + deadline_s)

    def _join(self, kind: str, share: float) -> None:
        """Wait for these threads until `share` of the deadline has passed."""
        for thread in self._threads.alive(kind):
            while thread.is_alive() and thread not in self._inbox_outages.pullers():
                if self._hurried_at_s is not None:
                    self._end_within(_HURRIED_S, self._hurried_at_s)
                kept_s = (1 - share) * self._deadline_s
                left_s = self._ends_at_s - kept_s - SYSTEM_CLOCK.monotonic_s()
                if left_s <= 0:
                    return
                thread.join(min(left_s, _JOIN_S))

    def _finish(self, began_at_s: float) -> StopReport:
        self._abandoned.set()
        self._outage.wake()
        self._end_loop()
        for transport in self._own_transports:
            transport.close()
        for thread in self._threads.alive("pull", "settle"):
            thread.join(_JOIN_S)  # woken when the connection was closed
        alive = set(self._threads.alive("pull", "settle", "work")) - self._inbox_outages.pullers()
        if self._report is not None:
            return self._report  # a stop in a signal handler was earlier
        self._report = report = StopReport(
            is_clean=not alive and not any(len(member.ledger) for member in self.members),
            running=sum(len(member.prefetch.running()) for member in self.members),
            unsettled=sum(len(member.ledger) for member in self.members),
        )
        _LOG.info(
            "consumers_stopped consumer_id=%s seconds=%.1f running=%d unsettled=%d",
            self.consumer_id,
            SYSTEM_CLOCK.monotonic_s() - began_at_s,
            report.running,
            report.unsettled,
        )
        return report

    def _on_signal(self, _number: int, _frame: object) -> None:
        if self._stop_requested.is_set() and self._hurried_at_s is None:
            self._hurried_at_s = SYSTEM_CLOCK.monotonic_s()
        self._stop_requested.set()

    def _on_exit(self, error: BaseException) -> None:
        self.exit_error = error
        self._stop_requested.set()


def _own_transports(broker: str | BrokerAddress | Transport) -> list[HttpTransport]:
    return (
        [HttpTransport(broker), HttpTransport(broker)]
        if isinstance(broker, str | BrokerAddress)
        else []
    )


#: The owner of this thread; tasks and `asyncio.to_thread` inherit it, threads that a handler starts do not.
_CURRENT: Final[ContextVar[object]] = ContextVar("qmq_consumer_threads", default=None)


class Threads:
    """The threads of all members. Not thread safe."""

    def __init__(self) -> None:
        self._threads: dict[str, list[threading.Thread]] = {"pull": [], "work": [], "settle": []}

    def add(self, kind: str, consumer: str, target: Callable[[], None]) -> None:
        """Create a thread without starting it."""
        # Daemons: a handler that never returns must not keep the interpreter from ending.
        name = f"qmq-{kind}-{consumer}"
        run = partial(self._run, target)
        self._threads[kind].append(threading.Thread(target=run, name=name, daemon=True))

    def are_current(self) -> bool:
        """Whether this code runs in a handler, so that it must return before one of the threads can end."""
        return _CURRENT.get() is self

    def _run(self, target: Callable[[], None]) -> None:
        _CURRENT.set(self)
        target()

    def all(self) -> list[threading.Thread]:
        """All threads."""
        return [thread for threads in self._threads.values() for thread in threads]

    def alive(self, *kinds: str) -> list[threading.Thread]:
        """The running threads of these kinds."""
        return [one for kind in kinds for one in self._threads[kind] if one.is_alive()]
