"""The leases of what one consumer has in hand: prolonged while its handler runs, else let go of in good time.

The end of a lease counts as an attempt that failed. So what no handler will begin in time is given
back before, untried, and what was pulled for a faster handler as soon as that shows; what a handler works on for longer than its timeout comes back as its failure;
and what a stop leaves without an outcome comes back when its lease would have ended.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Final

from qmq_client.consumer.counters import Counters
from qmq_client.consumer.delivery import Outcome, Received, given_back, given_back_untried
from qmq_client.consumer.error_texts import error_text
from qmq_client.consumer.handler import Handler
from qmq_client.consumer.ledger import Ledger
from qmq_client.consumer.prefetch import Prefetch, Running
from qmq_client.consumer.work import Work
from qmq_client.errors import HandlerTimeoutError

_LOG: Final = logging.getLogger("qmq.consumer")
#: An answer is taken to have been under way for at most this share of the lease.
_ANSWER_SHARE: Final = 0.25
#: What waits for a handler until this share of its lease is left is given back.
_BEGIN_SHARE: Final = 0.25
#: For a cancelled handler to tell of it by itself.
_CANCEL_GRACE_S: Final = 1.0
_NOT_DONE: Final = "consumer stopped, and the handler was not done"
_NOT_SETTLED: Final = "consumer stopped, and nobody had settled it"
_NOT_BEGUN: Final = "no handler of this consumer could begin in time"
_SLOW: Final = "the handlers of this consumer became slower than it was pulled for"


def lease_end_s(lease_s: float, *, asked_at_s: float, now_s: float) -> float:
    """When a lease ends that came with an answer: it began while that was under way."""
    return now_s + lease_s - min(now_s - asked_at_s, lease_s * _ANSWER_SHARE)


class Leases:
    """Looks after the leases of one member's messages. Thread safe."""

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
        #: Messages whose handler has returned, and that are to be settled by hand.
        self._held: set[Received] = set()

    def hold(self, batch: Sequence[Received]) -> None:
        """A handler has returned: what of its messages has no outcome yet stays in hand."""
        held = [one for one in batch if not one.is_settled]
        self._held.update(held)
        self._prefetch.finish(len(batch) - len(held))
        for one in held:  # settled by another thread in between
            if one.is_settled:
                self.release(one)

    def release(self, received: Received) -> None:
        """It has an outcome, and its handler may have returned before."""
        try:
            self._held.remove(received)
        except KeyError:
            return
        self._prefetch.leave(1)

    def extend(self, received: Received, lease_ms: int, now_s: float) -> None:
        """Its handler asked for this much more time."""
        received.lease_ends_at_s = now_s + lease_ms / 1000
        self._ledger.extend([received], lease_ms)

    def look(self, now_s: float) -> None:
        """Let go of what is late and of what hangs, prolong the leases of running handlers."""
        self._let_go(now_s)
        self._end_overdue(now_s)
        if not self._options.at_most_once:
            self._work.note(self._prefetch.take_surplus(), given_back_untried(_SLOW))
        self._prolong(now_s)

    def let_go_of_all(self, now_s: float) -> None:
        """Give back what has no outcome at the end of a stop, for when its lease would have ended.

        Not sooner: a plain handler may still run. The messages become no dead letters by this.
        """
        if self._options.at_most_once:
            return
        for running in self._prefetch.running():
            left = self._given_back_late(running.received, _NOT_DONE, now_s)
            if left:
                self._work.tell_unfinished(left, _NOT_DONE)
        self._given_back_late(list(self._held), _NOT_SETTLED, now_s)

    def _given_back_late(
        self, received: Sequence[Received], text: str, now_s: float
    ) -> list[Received]:
        """Give each back when its lease ends; those that had no outcome, and a lease."""
        left: list[Received] = []
        for one in received:
            lease_s = one.lease_ends_at_s - now_s
            outcome = given_back_untried(text, math.ceil(lease_s * 1000))
            if lease_s > 0 and self._work.note([one], outcome):
                left.append(one)
        return left

    def _let_go(self, now_s: float) -> None:
        ending = self._prefetch.take_ending(now_s + _BEGIN_SHARE * self._options.lease_ms / 1000)
        late = [one for one in ending if one.lease_ends_at_s <= now_s]
        timely = [one for one in ending if one.lease_ends_at_s > now_s]
        self._work.note(timely, given_back_untried(_NOT_BEGUN))
        forgotten = [one for one in list(self._held) if one.lease_ends_at_s <= now_s]
        for one in forgotten:
            one.is_settled = True
            self.release(one)
        self._counters.add("late", len(late) + len(forgotten))

    def _end_overdue(self, now_s: float) -> None:
        """Give back the messages of calls that have run for longer than the timeout.

        The event loop has cancelled an asynchronous call a little earlier. A plain one cannot be
        ended: it runs on, and its outcome no longer counts.
        """
        timeout_ms = self._options.timeout_ms
        if not timeout_ms:
            return
        allowed_s = timeout_ms / 1000 + (_CANCEL_GRACE_S if self._is_async else 0.0)
        for running in self._prefetch.running():
            if now_s - running.started_at_s < allowed_s:
                continue
            left = [one for one in running.received if not one.is_settled]
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
        return given_back(error_text(HandlerTimeoutError(timeout_ms)))
    return given_back_untried(
        f"the inbox gave no transaction within timeout_ms, {timeout_ms}", None
    )
