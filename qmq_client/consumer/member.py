"""One handler as a member of its group: pull, work, settle, each one bounded pass.

The three passes share the prefetch and the ledger and know nothing of each other, so each may run
on separate threads (`Consumers`) or all on one (`qmq_client.testing.drain`). None of them raises
errors of a broker or a handler.

The end of a lease counts as a failed attempt. So the lease of a running message is extended, and a
message that no handler will start in time is returned before, untried. A message whose handler
exceeds its timeout is reported as failed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from qmq_client.clock import Clock
from qmq_client.consumer.async_calls import AsyncCalls
from qmq_client.consumer.counters import Counters
from qmq_client.consumer.delivery import (
    Outcome,
    Received,
    Settler,
    nacked,
    nacked_untried,
    received_of,
)
from qmq_client.consumer.error_texts import error_text
from qmq_client.consumer.handler import Handler
from qmq_client.consumer.identity import Identity
from qmq_client.consumer.inbox_source import make_inbox
from qmq_client.consumer.ledger import Ledger, Settling, pull_request
from qmq_client.consumer.outage import Failures, InboxOutages, Outage, is_outage
from qmq_client.consumer.prefetch import Prefetch, Running
from qmq_client.consumer.work import Calls, Work
from qmq_client.errors import HandlerTimeoutError, TransportError
from qmq_client.transport.port import Transport
from qmq_client.wire.deliveries import Deliveries

#: The assumed longest transfer time of an answer, as a share of the lease.
_ANSWER_SHARE: Final = 0.25
#: A message that still waits for a handler when only this share of its lease is left is returned.
_BEGIN_SHARE: Final = 0.25
#: Time for a cancelled handler to report its outcome itself.
_CANCEL_GRACE_S: Final = 1.0
_NOT_DONE: Final = "consumer stopped before the handler had finished"
_NOT_SETTLED: Final = "consumer stopped before the message was settled"
_NOT_BEGUN: Final = "no handler of this consumer could start in time"
_SLOW: Final = "the handlers of this consumer became slower after the message was pulled"


def lease_end_s(lease_s: float, *, asked_at_s: float, now_s: float) -> float:
    """The end of a lease, which began before the answer arrived."""
    return now_s + lease_s - min(now_s - asked_at_s, lease_s * _ANSWER_SHARE)


class Leases:
    """Extends and ends the leases of one member's messages. Thread safe."""

    def __init__(
        self,
        handler: Handler,
        prefetch: Prefetch,
        ledger: Ledger,
        work: Work,
        *,
        counters: Counters,
    ) -> None:
        self._options = handler.options
        self._is_async = handler.is_async
        self._prefetch = prefetch
        self._ledger = ledger
        self._work = work
        self._counters = counters
        #: Messages whose handler has returned, and that will be settled by hand.
        self._held: set[Received] = set()

    def hold(self, batch: Sequence[Received]) -> None:
        """Record that a handler call has returned; messages without an outcome stay prefetched."""
        held = [one for one in batch if not one.is_settled]
        self._held.update(held)
        self._prefetch.finish(len(batch) - len(held))
        for one in held:  # settled by another thread in between
            if one.is_settled:
                self.release(one)

    def release(self, received: Received) -> None:
        """Forget a message that has an outcome; its handler may have returned before."""
        try:
            self._held.remove(received)
        except KeyError:
            return
        self._prefetch.leave(1)

    def extend(self, received: Received, lease_ms: int, now_s: float) -> None:
        """Extend the lease as the handler requested."""
        received.lease_ends_at_s = now_s + lease_ms / 1000
        self._ledger.extend([received], lease_ms)

    def look(self, now_s: float) -> None:
        """Return messages of late and hanging handlers, and extend the leases of running ones."""
        self._let_go(now_s)
        self._end_overdue(now_s)
        if not self._options.at_most_once:
            self._work.note(self._prefetch.take_surplus(), nacked_untried(_SLOW))
        self._prolong(now_s)

    def let_go_of_all(self, now_s: float) -> None:
        """At the end of a stop, return messages without an outcome, with a delay until their leases would have ended.

        Not sooner, because a plain handler may still run. This does not make them dead letters.
        """
        if self._options.at_most_once:
            return
        for running in self._prefetch.running():
            left = self._nacked_late(running.received, _NOT_DONE, now_s)
            if left:
                self._work.log_unfinished(left, _NOT_DONE)
        self._nacked_late(list(self._held), _NOT_SETTLED, now_s)

    def _nacked_late(self, received: Sequence[Received], text: str, now_s: float) -> list[Received]:
        """Return each message, delayed until its lease ends; returns those that had no outcome, and a lease."""
        left: list[Received] = []
        for one in received:
            lease_s = one.lease_ends_at_s - now_s
            outcome = nacked_untried(text, math.ceil(lease_s * 1000))
            if lease_s > 0 and self._work.note([one], outcome):
                left.append(one)
        return left

    def _let_go(self, now_s: float) -> None:
        ending = self._prefetch.take_ending(now_s + _BEGIN_SHARE * self._options.lease_ms / 1000)
        late = [one for one in ending if one.lease_ends_at_s <= now_s]
        timely = [one for one in ending if one.lease_ends_at_s > now_s]
        self._work.note(timely, nacked_untried(_NOT_BEGUN))
        forgotten = [one for one in list(self._held) if one.lease_ends_at_s <= now_s]
        for one in forgotten:
            one.is_settled = True
            self.release(one)
        self._counters.add("late", len(late) + len(forgotten))

    def _end_overdue(self, now_s: float) -> None:
        """Return the messages of calls that have run for longer than the timeout.

        The event loop has already cancelled an asynchronous call. A plain one cannot be ended: it
        keeps running, and its outcome no longer counts.
        """
        timeout_ms = self._options.timeout_ms
        if not timeout_ms:
            return
        allowed_s = timeout_ms / 1000 + (_CANCEL_GRACE_S if self._is_async else 0.0)
        for running in self._prefetch.running():
            received = running.received
            if now_s - running.started_at_s < allowed_s:
                continue
            left = [one for one in received if not one.is_settled]
            if not left:
                continue
            outcome = _overdue(running, timeout_ms)
            count = self._work.note(left, outcome)
            self._counters.add("timed_out", count)
            _LOG.warning(
                "handler_timed_out consumer=%s messages=%d message_id=%s attempt=%d error=%s",
                self._options.name,
                count,
                left[0].message_id,
                left[0].attempt,
                f"{outcome.text}; it still runs and occupies one of {self._options.concurrency} threads",
            )

    def _prolong(self, now_s: float) -> None:
        options = self._options
        lease_s = options.lease_ms / 1000
        for running in self._prefetch.running():
            if now_s - running.started_at_s >= options.lease_ms_max / 1000:
                continue
            due = [
                one
                for one in running.received
                if not one.is_settled and one.lease_ends_at_s - now_s < lease_s / 2
            ]
            for one in due:
                one.lease_ends_at_s = now_s + lease_s
            self._ledger.extend(due, options.lease_ms)


def _overdue(running: Running, timeout_ms: int) -> Outcome:
    if any(one.is_begun for one in running.received):
        return nacked(error_text(HandlerTimeoutError(timeout_ms=timeout_ms)))
    return nacked_untried(
        f"the inbox did not begin a transaction within timeout_ms, {timeout_ms}", None
    )


_LOG: Final = logging.getLogger("qmq.consumer")
#: Least time between two pulls without messages, for any `wait_ms`: an idle consumer does not spin.
_EMPTY_S: Final = 0.1
_STOPPED: Final = "consumer stopped before the handler began"
_INBOX_UNREACHABLE: Final = "the database of this consumer's inbox is unreachable"


class Pass(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The result of one pass."""

    #: Messages pulled, handled or settled.
    count: int
    #: How long to wait before the next pass.
    pause_s: float = 0.0
    #: Whether the broker failed to answer or refused.
    has_failed: bool = False
    #: Whether the pause may end as soon as the broker answers any request.
    is_outage: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Connections to the broker: long polls must not block settlements."""

    pulling: Transport
    settling: Transport


class Member:
    """One handler's share in its group, in this process."""

    def __init__(
        self,
        handler: Handler,
        lines: Lines,
        *,
        identity: Identity,
        clock: Clock,
        async_calls: AsyncCalls,
        outage: Outage,
        inbox_outages: InboxOutages,
        on_exit: Callable[[BaseException], None],
    ) -> None:
        self.handler = handler
        self.options = handler.options
        self.counters = Counters()
        self.prefetch = Prefetch(handler.options, clock)
        self.ledger = Ledger(is_kept=not handler.options.at_most_once)
        self._lines = lines
        self._inbox = make_inbox(
            handler.inbox,
            handler.options,
            is_async=handler.is_async,
            session_kind=handler.parameters.session_kind,
        )
        self._inbox_outage = inbox_outages.of(self._inbox)
        self._async_calls = async_calls
        self._identity = identity
        self._clock = clock
        self._pull_failures = Failures("pull", self.options.name, outage)
        self._settle_failures = Failures("settle", self.options.name, outage)
        self._settling = Settling(handler, self.ledger, counters=self.counters, identity=identity)
        self._is_stopping = False
        settler = Settler(
            settle=self._settle_by_hand,
            extend=self._extend_by_hand,
            refusal=_manual_refusal(handler),
        )
        self._work = Work(
            Calls(handler, settler, async_calls),
            self.ledger,
            inbox=self._inbox,
            inbox_outage=self._inbox_outage,
            counters=self.counters,
            clock=clock,
            on_exit=on_exit,
        )
        self._leases = Leases(
            handler, self.prefetch, self.ledger, self._work, counters=self.counters
        )

    def check(self) -> None:
        """Raise when the inbox is not usable."""
        if self._inbox is not None:
            from qmq_client.database.errors import database_errors

            with database_errors(f"of the inbox of {self.options.name}"):
                if self._inbox.is_async:
                    self._async_calls.call(self._inbox.check())
                else:
                    self._inbox.check()

    def close(self, timeout_s: float) -> None:
        """Close connections that belong to the handlers' loop before it ends; log remaining counts."""
        self._work.failures.close()
        if self._inbox is None or not self._inbox.is_async or not self._async_calls.is_running:
            return
        try:
            self._async_calls.call(self._inbox.close(), timeout_s=timeout_s)
        except Exception as error:  # closing a connection may fail if its server is gone
            _LOG.warning(
                "inbox_close_failed consumer=%s error=%s", self.options.name, error_text(error)
            )

    def pull_once(self, *, is_blocking: bool = True) -> Pass:
        """Pull as many messages as there is room for; may wait for room and for messages."""
        room = self.prefetch.room(is_blocking=is_blocking)
        if not room:
            return Pass(count=0)
        pause_s = self._inbox_outage.pause_s(self._work.prober)
        if pause_s or self._is_stopping:  # a stop does not wait for a probe
            return Pass(count=0, pause_s=pause_s)
        outgoing = self.ledger.drain()
        asked_at_s = self._clock.monotonic_s()
        try:
            deliveries = self._lines.pulling.pull(
                pull_request(
                    self.options,
                    self._identity,
                    max_messages=room,
                    wait_ms=self.options.wait_ms if is_blocking else 0,
                    settlements=outgoing.settlements,
                )
            )
        except TransportError as error:
            # Settlements of a refused pull are sent separately next time, and dropped if they are the refused part.
            self._settling.put_back(outgoing, error)
            self.counters.add("pull_failures")
            # A stop ends a waiting pull by closing its connection.
            pause_s = self._pull_failures.pause_s(error, is_meant=self._is_stopping)
            return _failed_pass(error, pause_s)
        self._pull_failures.answered()
        self._receive(deliveries, asked_at_s)
        self._settling.report(outgoing, deliveries.head.stale)
        waited_s = self._clock.monotonic_s() - asked_at_s
        return Pass(count=len(deliveries.messages), pause_s=self._gathering_s(deliveries, waited_s))

    def _gathering_s(self, deliveries: Deliveries, waited_s: float) -> float:
        """How long to wait before the next pull, so that messages collect at the broker.

        While a batch may wait to fill, pulls for a few messages would only add requests.
        Redelivered messages do not join a batch.
        """
        options = self.options
        if not deliveries.messages:
            return max(0.0, _EMPTY_S - waited_s)
        if not options.max_wait_ms:
            return 0.0
        fresh = sum(one.attempt == 1 for one in deliveries.messages)
        return options.max_wait_ms / 2_000 if 0 < fresh < options.batch_size else 0.0

    def work_once(self, *, is_blocking: bool = True) -> Pass:
        """Run a handler call, or several of a quick handler; may wait for messages."""
        running = self.prefetch.take(is_blocking=is_blocking)
        if running is None:
            return Pass(count=0)
        try:
            self._work.run_slice(running)
        finally:
            self._leases.hold(running.received)
        if self._inbox_outage.is_open:
            self._work.note(self.prefetch.take_waiting(), nacked_untried(_INBOX_UNREACHABLE))
        return Pass(count=running.done + len(running.received))

    def settle_once(self) -> Pass:
        """Extend leases of running handlers, return late messages, and send outcomes."""
        self._leases.look(self._clock.monotonic_s())
        self._work.failures.look()
        outgoing = self.ledger.drain()
        if not outgoing.entries:
            return Pass(count=0)
        try:
            count = self._settling.send(self._lines.settling, outgoing)
        except TransportError as error:
            self._settling.put_back(outgoing, error)
            self.counters.add("settle_failures")
            return _failed_pass(error, self._settle_failures.pause_s(error))
        self._settle_failures.answered()
        return Pass(count=count)

    def stop(self) -> int:
        """Start no further messages and return those that no handler has started; returns how many."""
        self._is_stopping = True
        return self._work.note(self.prefetch.stop(), nacked_untried(_STOPPED))

    def let_go_of_all(self) -> None:
        """Return messages without an outcome at the end of a stop; see `Leases.let_go_of_all`."""
        self._leases.let_go_of_all(self._clock.monotonic_s())

    def _receive(self, deliveries: Deliveries, asked_at_s: float) -> None:
        lease_s = deliveries.head.lease_ms / 1000
        if self.options.at_most_once:
            lease_s = math.inf  # no other consumer would get them
        ends_at_s = lease_end_s(lease_s, asked_at_s=asked_at_s, now_s=self._clock.monotonic_s())
        received = received_of(deliveries, ends_at_s)
        self.counters.add("pulled", len(received))
        if self._inbox_outage.is_open:  # the stop began during the pull
            self._work.note(received, nacked_untried(_INBOX_UNREACHABLE))
        elif received and not self.prefetch.put(received):
            self._work.note(received, nacked_untried(_STOPPED))

    def _settle_by_hand(self, received: Received, outcome: Outcome) -> bool:
        if self._inbox is not None:
            return self._work.set_outcome(received, outcome)
        is_first = self._work.note([received], outcome) == 1
        self._leases.release(received)
        return is_first

    def _extend_by_hand(self, received: Received, lease_ms: int) -> None:
        self._leases.extend(received, lease_ms, self._clock.monotonic_s())


def _failed_pass(error: TransportError, pause_s: float) -> Pass:
    return Pass(count=0, pause_s=pause_s, has_failed=True, is_outage=is_outage(error))


def _manual_refusal(handler: Handler) -> str:
    """The reason why deliveries of this handler cannot be settled by hand; empty if they can."""
    if not handler.options.auto_ack or handler.options.batch_size > 1:
        return ""
    return "Set auto_ack=False to settle by hand, or return, raise Retry or Reject."
