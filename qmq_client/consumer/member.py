"""One handler as a member of its group: pull, work, settle, each one bounded pass.

The three passes share the prefetch and the ledger and know nothing of each other, so each may run on
threads of its own (`Consumers`) or all on one (`qmq_client.testing.drain`). None of them raises for
anything that a broker or a handler does.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from qmq_client.clock import Clock
from qmq_client.consumer.asking import pull_request
from qmq_client.consumer.async_calls import AsyncCalls
from qmq_client.consumer.calling import Calls
from qmq_client.consumer.counters import Counters
from qmq_client.consumer.delivery import Grip, Outcome, Received, given_back_untried, received_of
from qmq_client.consumer.error_texts import error_text
from qmq_client.consumer.handler import Handler
from qmq_client.consumer.identity import Identity
from qmq_client.consumer.inbox_outage import InboxOutages
from qmq_client.consumer.inbox_source import make_inbox
from qmq_client.consumer.leases import Leases, lease_end_s
from qmq_client.consumer.ledger import Ledger
from qmq_client.consumer.outage import Failures, Outage, is_outage
from qmq_client.consumer.prefetch import Prefetch
from qmq_client.consumer.settling import Settling
from qmq_client.consumer.work import Work
from qmq_client.errors import TransportError
from qmq_client.transport.port import Transport
from qmq_client.wire.deliveries import Deliveries

_LOG: Final = logging.getLogger("qmq.consumer")
#: Between two pulls that bring nothing, whatever `wait_ms` is: an idle consumer does not spin.
_EMPTY_S: Final = 0.1
_STOPPED: Final = "consumer stopped before the handler began"
_INBOX_AWAY: Final = "the database of this consumer's inbox is away"


class Pass(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one pass did."""

    #: Messages pulled, handled or settled.
    count: int
    #: How long to wait before the next pass.
    pause_s: float = 0.0
    #: Whether the broker did not do what it was asked.
    has_failed: bool = False
    #: Whether the pause may end as soon as the broker answers anybody.
    is_outage: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Ways to the broker: long polls must not stand in the way of settlements."""

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
        self._inbox = make_inbox(handler.inbox, handler.options, is_async=handler.is_async)
        self._inbox_outage = inbox_outages.of(self._inbox)
        self._async_calls = async_calls
        self._identity = identity
        self._clock = clock
        self._pull_failures = Failures("pull", self.options.name, outage)
        self._settle_failures = Failures("settle", self.options.name, outage)
        self._settling = Settling(handler, self.ledger, counters=self.counters, identity=identity)
        self._is_stopping = False
        grip = Grip(
            settle=self._settle_by_hand,
            extend=self._extend_by_hand,
            refusal=_grip_refusal(handler),
        )
        self._work = Work(
            Calls(handler, grip, async_calls),
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
        """Let go of connections that belong to the handlers' loop, before it ends; say the last words."""
        self._work.failures.close()
        if self._inbox is None or not self._inbox.is_async or not self._async_calls.is_running:
            return
        try:
            self._async_calls.call(self._inbox.close(), timeout_s=timeout_s)
        except Exception as error:  # drivers say goodbye to servers that may be gone
            _LOG.warning(
                "inbox_close_failed consumer=%s error=%s", self.options.name, error_text(error)
            )

    def pull_once(self, *, is_blocking: bool = True) -> Pass:
        """Ask for as many messages as there is room for; may wait for room and for messages."""
        room = self.prefetch.room(is_blocking=is_blocking)
        if not room:
            return Pass(count=0)
        pause_s = self._inbox_outage.pause_s(self._work.prober)
        if pause_s or self._is_stopping:  # no stop waits for a probe
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
            # Settlements of a refused request go alone next time, and are given up there if it
            # is they that are refused.
            self._settling.put_back(outgoing, error)
            self.counters.add("pull_failures")
            # A stop ends the pull that waits by closing its connection.
            pause_s = self._pull_failures.pause_s(error, is_meant=self._is_stopping)
            return _failed_pass(error, pause_s)
        self._pull_failures.answered()
        self._receive(deliveries, asked_at_s)
        self._settling.report(outgoing, deliveries.head.stale)
        waited_s = self._clock.monotonic_s() - asked_at_s
        return Pass(count=len(deliveries.messages), pause_s=self._gathering_s(deliveries, waited_s))

    def _gathering_s(self, deliveries: Deliveries, waited_s: float) -> float:
        """How long to let messages gather at the broker before the next pull.

        While a batch may wait to fill, pulls for a few messages each would only be requests more. What
        was delivered before joins no batch.
        """
        options = self.options
        if not deliveries.messages:
            return max(0.0, _EMPTY_S - waited_s)
        if not options.max_wait_ms:
            return 0.0
        fresh = sum(one.attempt == 1 for one in deliveries.messages)
        return options.max_wait_ms / 2_000 if 0 < fresh < options.batch_size else 0.0

    def work_once(self, *, is_blocking: bool = True) -> Pass:
        """One handler call; may wait for messages."""
        batch = self.prefetch.take(is_blocking=is_blocking)
        if not batch:
            return Pass(count=0)
        try:
            self._work.run(batch)
        finally:
            self._leases.hold(batch)
        if self._inbox_outage.is_open:
            self._work.note(self.prefetch.take_waiting(), given_back_untried(_INBOX_AWAY))
        return Pass(count=len(batch))

    def settle_once(self) -> Pass:
        """Prolong leases of running handlers, let go of what is late, send what is known."""
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
        """Begin no further messages and give back those that no handler has begun; how many."""
        self._is_stopping = True
        return self._work.note(self.prefetch.stop(), given_back_untried(_STOPPED))

    def let_go_of_all(self) -> None:
        """Give back what has no outcome at the end of a stop; see `Leases.let_go_of_all`."""
        self._leases.let_go_of_all(self._clock.monotonic_s())

    def _receive(self, deliveries: Deliveries, asked_at_s: float) -> None:
        lease_s = deliveries.head.lease_ms / 1000
        if self.options.at_most_once:
            lease_s = math.inf  # nobody else ever gets them
        ends_at_s = lease_end_s(lease_s, asked_at_s=asked_at_s, now_s=self._clock.monotonic_s())
        received = received_of(deliveries, ends_at_s)
        self.counters.add("pulled", len(received))
        if self._inbox_outage.is_open:  # it began while the broker was asked
            self._work.note(received, given_back_untried(_INBOX_AWAY))
        elif received and not self.prefetch.put(received):
            self._work.note(received, given_back_untried(_STOPPED))

    def _settle_by_hand(self, received: Received, outcome: Outcome) -> bool:
        if self._inbox is not None:
            return self._work.wish(received, outcome)
        is_first = self._work.note([received], outcome) == 1
        self._leases.release(received)
        return is_first

    def _extend_by_hand(self, received: Received, lease_ms: int) -> None:
        self._leases.extend(received, lease_ms, self._clock.monotonic_s())


def _failed_pass(error: TransportError, pause_s: float) -> Pass:
    return Pass(count=0, pause_s=pause_s, has_failed=True, is_outage=is_outage(error))


def _grip_refusal(handler: Handler) -> str:
    """Why deliveries of this handler cannot be settled by hand; nothing when they can."""
    if not handler.options.auto_ack or handler.options.batch_size > 1:
        return ""
    return "Set auto_ack=False to settle by hand, or return, raise Retry or Reject."
