"""Outcomes from the ledger to the broker, and what the broker answers.

Outcomes that are refused as stale are reported to the handler's owner, and messages that an outcome
made a dead letter to whoever reads the log. When a request is refused for
its content, it is halved until the bad outcome stands alone, so that no other is lost with it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from qmq_client.consumer.asking import settle_request
from qmq_client.consumer.counters import Counters
from qmq_client.consumer.delivery import Verdict
from qmq_client.consumer.error_texts import error_text, in_one_line
from qmq_client.consumer.handler import Handler, OnStale, StaleDelivery
from qmq_client.consumer.identity import Identity
from qmq_client.consumer.ledger import Entry, Ledger, Outgoing, as_outgoing, stale_entries
from qmq_client.consumer.options import ConsumerOptions
from qmq_client.errors import BrokerBusyError, BrokerRefusedError, TransportError
from qmq_client.transport.port import Transport

_LOG: Final = logging.getLogger("qmq.consumer")
#: Statuses that are about the settlements themselves, not about who sends them where.
_NEVER_TAKEN: Final = frozenset({400, 413, 422})


class Settling:
    """How one consumer settles. Thread safe."""

    def __init__(
        self, handler: Handler, ledger: Ledger, *, counters: Counters, identity: Identity
    ) -> None:
        self._handler = handler
        self._options = handler.options
        self._ledger = ledger
        self._counters = counters
        self._identity = identity

    def send(self, transport: Transport, outgoing: Outgoing) -> int:
        """Send outcomes; how many were taken. Raises `TransportError` when they are to be sent again.

        Those that the broker will never take are given up: their leases end, and the messages come
        again.
        """
        request = settle_request(self._options, self._identity.name, outgoing.settlements)
        try:
            answer = transport.settle(request)
        except BrokerRefusedError as error:
            if error.status not in _NEVER_TAKEN:
                raise
            count = len(outgoing.entries)
            if count > 1:
                halves = outgoing.entries[: count // 2], outgoing.entries[count // 2 :]
                return sum(self.send(transport, as_outgoing(half)) for half in halves)
            self._counters.add("settle_refused")
            first = outgoing.entries[0].received
            _LOG.error(
                "settle_refused consumer=%s message_id=%s error=%s",
                self._options.name,
                first.message_id,
                error,
            )
            return 0
        self.report(outgoing, answer.stale)
        return len(outgoing.entries)

    def put_back(self, outgoing: Outgoing, error: TransportError) -> None:
        """Keep what could not be sent."""
        is_uncertain = not isinstance(error, BrokerBusyError | BrokerRefusedError)
        self._ledger.put_back(outgoing, is_uncertain=is_uncertain)

    def report(self, outgoing: Outgoing, stale: Sequence[tuple[int, int, int]]) -> None:
        """Tell what the broker answered: what came too late, and what is a dead letter now."""
        outcomes, extensions = log_answer(self._options, outgoing, stale)
        if stale:
            self._counters.add("stale", len(outcomes))
            self._counters.add("lost_leases", len(extensions))
        if outcomes and self._handler.on_stale is not None:
            self._tell_owner(self._handler.on_stale, tuple(map(self._stale_delivery, outcomes)))

    def _tell_owner(self, on_stale: OnStale, stale: tuple[StaleDelivery, ...]) -> None:
        try:
            on_stale(stale)
        except Exception as error:  # the owner's code, and the last thing this pass does
            _LOG.warning(
                "on_stale_failed consumer=%s error=%s", self._options.name, error_text(error)
            )

    def _stale_delivery(self, entry: Entry) -> StaleDelivery:
        received = entry.received
        return StaleDelivery(
            subject=self._options.subject,
            group=self._options.group,
            message_id=received.message_id,
            sequence=received.sequence,
            attempt=received.attempt,
            outcome=entry.outcome.verdict.value if entry.outcome is not None else "",
        )


def log_answer(
    options: ConsumerOptions, sent: Outgoing, stale: Sequence[tuple[int, int, int]]
) -> tuple[list[Entry], list[Entry]]:
    """Log what an answer means; returns the outcomes and the extensions that came too late."""
    outcomes, extensions = stale_entries(sent, stale)
    for what, entries in (("stale_outcomes", outcomes), ("lost_leases", extensions)):
        if entries:
            first = entries[0].received
            _LOG.warning(
                "%s consumer=%s messages=%d first_message_id=%s attempt=%d",
                what,
                options.name,
                len(entries),
                first.message_id,
                first.attempt,
            )
    # Most answers are about acks alone.
    if any(one.nacks or one.rejects for one in sent.settlements):
        late = set(outcomes)
        _log_dead(options, [one for one in sent.entries if one not in late])
    return outcomes, extensions


def _log_dead(options: ConsumerOptions, taken: Sequence[Entry]) -> None:
    """A line for each message that its group gets no more, with the broker's word for why."""
    for entry in taken:
        received, outcome = entry.received, entry.outcome
        if outcome is None or not outcome.is_dead_letter(received.attempt, options.max_attempts):
            continue
        _LOG.error(
            "dead_letter consumer=%s message_id=%s sequence=%d attempt=%d reason=%s error=%s",
            options.name,
            received.message_id,
            received.sequence,
            received.attempt,
            "rejected" if outcome.verdict is Verdict.REJECT else "attempts_used_up",
            in_one_line(outcome.text),
        )
