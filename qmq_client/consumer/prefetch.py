"""The prefetched messages of a handler, waiting or with a worker, and the number to pull next.

The credit follows the handler: as many messages as all workers finish in a quarter of a second, at
least one batch for each worker, at most `prefetch_max`. A slow handler holds no messages that
another consumer could process; a fast one never waits for the network. A hanging handler counts as
slow while it hangs, and a running batch as full. Messages whose handler returned without an outcome
need no worker, and only count towards `prefetch_max`. Messages that were pulled for a handler that
then became slow are returned, which costs a delivery, so this must be rare.

A worker of a quick handler takes a slice of messages and calls the handler with one after the
other, so the costs of locks, wake-ups and the credit occur once per slice. Unstarted messages of a
slice still count as waiting: an idle worker, or a call that returns messages, may take them out of
the slice.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec

from qmq_client.clock import Clock
from qmq_client.consumer.delivery import Received
from qmq_client.consumer.options import ConsumerOptions

#: How far ahead messages are fetched, in handler time.
_AHEAD_S: Final = 0.25
#: Messages that would take this many times longer than planned are returned; smaller variations are normal.
_SLOWER: Final = 4
#: Weight of the newest batch in the moving average of handler time.
_WEIGHT: Final = 0.2
#: Duration of a slice: during it other threads do not see the freed room.
_SLICE_S: Final = 0.005
_SLICE_MESSAGES_MAX: Final = 100
#: How long the next pull waits for an idle worker to start.
BEGIN_S: Final = 0.001
#: A wait ends at least this often, so that a lost wake-up does not hang it.
_LOOK_S: Final = 1.0


class Running(msgspec.Struct, kw_only=True, eq=False, gc=False):
    """The state of one worker: the running handler call, and the rest of its slice."""

    #: When the call began.
    started_at_s: float
    received: Sequence[Received]
    #: Messages of the next calls. Any thread may take out unstarted ones.
    rest: deque[Received]
    taken_at_s: float
    #: Messages of the slice whose calls have ended, each with an outcome.
    done: int = 0

    def message_s(self, now_s: float) -> float:
        """Seconds that each message of the call has taken so far."""
        return (now_s - self.started_at_s) / len(self.received)

    def begin_next(self, now_s: float) -> bool:
        """Start the next message of the slice, if there is one and time for it.

        For the worker's own thread. Requires: the call has ended, its messages have an outcome.
        """
        if now_s - self.taken_at_s > _SLICE_S:
            return False
        try:
            received = self.rest.popleft()
        except IndexError:
            return False
        self.done += len(self.received)
        self.started_at_s = (
            now_s  # set first, so that the old time is not seen with the new message
        )
        self.received = (received,)
        return True


class Prefetch:
    """The prefetched messages of one handler in this process. Thread safe."""

    def __init__(
        self,
        options: ConsumerOptions,
        clock: Clock,
        *,
        begin_s: float = BEGIN_S,
        look_s: float = _LOOK_S,
    ) -> None:
        self._options = options
        self._clock = clock
        self._begin_s = begin_s
        self._look_s = look_s
        lock = threading.Lock()
        self._arrived = threading.Condition(lock)
        self._finished = threading.Condition(lock)
        self._taken = threading.Condition(lock)
        self._idle = 0
        #: Whether the only pulling thread waits for room.
        self._is_asked = False
        self._waiting: deque[Received] = deque()
        #: How many of those must be handled alone.
        self._alone = 0
        #: Messages that one call takes, estimated from the last answer, because messages that are
        #: handled alone fill no batch.
        self._per_call = options.batch_size
        self._oldest_at_s = 0.0
        self._running: dict[int, Running] = {}
        self._count = 0
        #: How many messages have neither a worker nor an outcome.
        self._held = 0
        self._message_s: float | None = None
        self._is_stopping = False

    @property
    def count(self) -> int:
        """Number of messages that wait, are with a worker or have no outcome."""
        return self._count - sum(running.done for running in list(self._running.values()))

    @property
    def idle(self) -> int:
        """Workers that wait for messages."""
        return self._idle

    def running(self) -> list[Running]:
        """Handler calls under way."""
        with self._arrived:
            return list(self._running.values())

    def put(self, received: Sequence[Received]) -> bool:
        """Add messages that were just delivered; returns False and does nothing if the stop has begun.

        If idle workers take all of them, returns when one has started, or after a moment: otherwise
        the next request would hold the interpreter and delay the handler.
        """
        with self._arrived:
            if self._is_stopping:
                return False
            alone = self._alone_of(received)
            self._per_call = 1 if 2 * alone > len(received) else self._options.batch_size
            begin_now = 0 < len(received) <= self._idle * self._per_call and not self._waiting
            if not self._waiting:
                self._oldest_at_s = self._clock.monotonic_s()
            self._waiting.extend(received)
            self._alone += alone
            self._count += len(received)
            self._arrived.notify(len(received))
            if begin_now and self._wait_s() == 0.0:
                self._taken.wait(self._begin_s)
            return True

    def take(self, *, is_blocking: bool) -> Running | None:
        """The messages of the next handler calls; None when there are none or the stop began.

        A redelivered message is handled alone, so that it cannot make other messages fail again.
        """
        with self._arrived:
            while is_blocking and not self._is_stopping:
                wait_s = self._wait_s()
                if wait_s == 0.0:
                    break
                self._idle += 1
                self._arrived.wait(wait_s)
                self._idle -= 1
            if self._is_stopping or self._wait_s() != 0.0:
                return None
            received, rest = self._next_batch(), self._next_slice()
            now_s = self._oldest_at_s = self._clock.monotonic_s()
            running = self._running[threading.get_ident()] = Running(
                started_at_s=now_s, received=received, rest=rest, taken_at_s=now_s
            )
            self._taken.notify()
            if self._idle and self._wait_s() == 0.0:
                self._arrived.notify()  # more messages are due than when they were added
            if self._is_asked and self._has_idle():
                self._notify_room()
            return running

    def finish(self, count: int) -> None:
        """The worker of this thread has finished its slice; `count` messages of the last call are settled.

        Unstarted messages wait again. Requires: `take` returned messages to this thread.
        """
        now_s = self._clock.monotonic_s()
        with self._finished:
            running = self._running.pop(threading.get_ident())
            self._waiting.extendleft(reversed(running.rest))
            seconds = (now_s - running.taken_at_s) / (running.done + len(running.received))
            known = self._message_s
            self._message_s = seconds if known is None else known + _WEIGHT * (seconds - known)
            self._held += len(running.received) - count
            self._leave(running.done + count)

    def leave(self, count: int) -> None:
        """Record that messages without a worker were settled."""
        with self._finished:
            self._held -= count
            self._leave(count)

    def room(self, *, is_blocking: bool) -> int:
        """How many messages to ask for; 0 when there are enough or the stop began.

        Waits until a third of the credit is free, so that requests stay few and the handler has work
        while one is under way, or until a worker is idle.
        """
        with self._finished:
            room = self._room()
            while is_blocking and not room and not self._is_stopping:
                self._is_asked = True
                self._finished.wait(self._look_s)
                room = self._room()
            self._is_asked = False
            return 0 if self._is_stopping else room

    def stop(self) -> list[Received]:
        """Stop passing out messages; returns those that no worker has taken."""
        with self._arrived:
            self._is_stopping = True
            self._arrived.notify_all()
            return self._empty()

    def take_waiting(self) -> list[Received]:
        """Take out all messages that no worker has."""
        with self._finished:
            return self._empty()

    def take_ending(self, until_s: float) -> list[Received]:
        """Take out messages that no worker has and whose leases end by then."""
        with self._finished:
            self._take_back()
            ending = [one for one in self._waiting if one.lease_ends_at_s <= until_s]
            if ending:
                self._waiting = deque(one for one in self._waiting if one.lease_ends_at_s > until_s)
                self._alone -= self._alone_of(ending)
                self._leave(len(ending))
            return ending

    def take_surplus(self) -> list[Received]:
        """Take out messages that were pulled for a faster handler, so that other consumers can have them.

        All of them if each worker's call has run for longer than the planned time; otherwise those
        far beyond the credit, the newest first.
        """
        with self._finished:
            self._take_back()
            ahead_s, message_s = self._ahead_s, self._message_s
            kept = len(self._waiting)
            if message_s is not None:
                kept = max(self._working_set, self._ahead(_SLOWER * ahead_s, message_s))
            running = self._running.values()
            if len(running) >= self._options.concurrency:
                began_at_s = max(one.started_at_s for one in running)
                if self._clock.monotonic_s() - began_at_s > ahead_s:
                    kept = 0
            surplus = [self._waiting.pop() for _ in range(len(self._waiting) - kept)]
            self._alone -= self._alone_of(surplus)
            self._leave(len(surplus))
            return surplus

    def _empty(self) -> list[Received]:
        self._take_back()
        left = list(self._waiting)
        self._waiting.clear()
        self._alone = 0
        self._leave(len(left))
        return left

    def _next_batch(self) -> list[Received]:
        waiting = self._waiting
        count = min(len(waiting), self._options.batch_size)
        if self._alone and count:
            fresh = next((i for i in range(count) if waiting[i].attempt > 1), count)
            count = max(fresh, 1)
            if not fresh:
                self._alone -= 1
        return [waiting.popleft() for _ in range(count)]

    def _next_slice(self) -> deque[Received]:
        """The messages after the next one, if the handler is quick and settles each by returning."""
        options, message_s = self._options, self._message_s
        if options.batch_size > 1 or not options.auto_ack or message_s is None:
            return deque()
        quick = int(_SLICE_S / max(message_s, 1e-6))
        count = min(quick, _SLICE_MESSAGES_MAX, len(self._waiting) // options.concurrency)
        return deque([self._waiting.popleft() for _ in range(count)])

    def _take_back(self) -> None:
        """Let unstarted messages wait again."""
        for running in self._running.values():
            with suppress(IndexError):  # its worker has started the last one
                while running.rest:
                    self._waiting.appendleft(running.rest.pop())

    def _wait_s(self) -> float:
        """How long until a batch is due: 0 for now."""
        if not self._waiting:
            self._take_back()
        if not self._waiting:
            return self._look_s
        options = self._options
        if self._alone or len(self._waiting) >= options.batch_size or not options.max_wait_ms:
            return 0.0  # no batch can grow beyond a message that is handled alone
        due_at_s = self._oldest_at_s + options.max_wait_ms / 1000
        return max(0.0, due_at_s - self._clock.monotonic_s())

    def _room(self) -> int:
        credit = self._credit()
        limit = max(self._working_set, self._options.prefetched_max)
        prefetched = self.count
        ahead = credit - (prefetched - self._held) - self._unfilled()
        free = max(0, min(ahead, limit - prefetched))
        return free if free * 3 >= credit or self._has_idle() else 0

    def _has_idle(self) -> bool:
        """Whether a worker waits for messages: it must not wait for the other workers, which may be stuck."""
        return (
            len(self._waiting) < self._per_call and len(self._running) < self._options.concurrency
        )

    def _unfilled(self) -> int:
        """Places in running batches, which no message can join: a message pulled for them would only wait."""
        per_call = self._per_call
        if per_call == 1:
            return 0
        return sum(max(0, per_call - len(running.received)) for running in self._running.values())

    @property
    def _working_set(self) -> int:
        """How many messages keep every worker busy."""
        return self._options.concurrency * self._per_call

    def _credit(self) -> int:
        options = self._options
        message_s = self._message_s
        if message_s is None:
            return self._working_set
        if self._running:
            now_s = self._clock.monotonic_s()
            longest_s = max(running.message_s(now_s) for running in self._running.values())
            message_s = max(message_s, longest_s)
        ahead = self._ahead(self._ahead_s, message_s)
        return max(self._working_set, min(ahead, options.prefetched_max))

    @property
    def _ahead_s(self) -> float:
        """The handler time that prefetched messages should cover."""
        return min(_AHEAD_S, self._options.lease_ms / 4_000)

    def _ahead(self, seconds: float, message_s: float) -> int:
        """How many messages all workers finish in this time."""
        return int(seconds * self._options.concurrency / max(message_s, 1e-6))

    def _leave(self, count: int) -> None:
        self._count -= count
        self._notify_room()

    def _notify_room(self) -> None:
        if self._is_asked and self._room():
            self._finished.notify_all()

    def _alone_of(self, received: Sequence[Received]) -> int:
        """How many of these are handled alone and fill no batch; 0 if every message is handled alone."""
        if self._options.batch_size == 1:
            return 0
        return sum(one.attempt > 1 for one in received)
