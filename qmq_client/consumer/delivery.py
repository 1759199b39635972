"""One delivery of a message: the received message, its outcome, and the object with which a handler settles it.

`Received` is what the threads pass to each other, `Outcome` what the ledger keeps, `Delivery` what a
handler may ask for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Final

import msgspec

from qmq_client.consumer.error_texts import error_text, reason_text
from qmq_client.consumer.options import LEASE_MS_MAX, LEASE_MS_MIN
from qmq_client.errors import ConfigurationError, ProtocolError, UnknownVersionError
from qmq_client.message import Message
from qmq_client.retry import Retry
from qmq_client.wire.deliveries import Deliveries
from qmq_client.wire.message_id import format_message_id
from qmq_client.wire.record import record_message_id


class Received(msgspec.Struct, eq=False, gc=False):
    """A message as the broker delivered it; the same object is used until the message is settled.

    A struct, as are the others that are made for every message: a dataclass costs several times as much.
    """

    subject: str
    #: The broker's token at the delivery.
    token: int
    sequence: int
    pull_sequence: int
    #: From 1.
    attempt: int
    record: bytes
    #: Monotonic second after which the message may belong to another consumer.
    lease_ends_at_s: float
    #: Whether an outcome was passed to the ledger, or the lease was given up.
    is_settled: bool = False
    #: In a batch with an inbox: the outcome that the handler set, for when the batch is committed.
    outcome: Outcome | None = None
    #: Whether the handler may still set the outcome.
    takes_outcome: bool = False
    #: Whether a handler was called with the message.
    is_begun: bool = False

    @property
    def message_id(self) -> str:
        """32 hex digits, as the record says, even when its checksum is wrong."""
        return format_message_id(record_message_id(self.record))


def received_of(deliveries: Deliveries, lease_ends_at_s: float) -> list[Received]:
    """The messages of one answer, whose leases begin together."""
    subject, token = deliveries.head.subject, deliveries.head.token
    # Positional arguments: keyword arguments take twice as long, for every message.
    return [
        Received(
            subject,
            token,
            one.sequence,
            one.pull_sequence,
            one.attempt,
            one.record,
            lease_ends_at_s,
        )
        for one in deliveries.messages
    ]


class Verdict(Enum):
    """The possible outcomes of a delivery."""

    ACK = "ack"
    NACK = "nack"
    REJECT = "reject"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a delivery. Requires: `text` is bounded."""

    verdict: Verdict
    #: Only for NACK; None for the group's backoff.
    delay_ms: int | None = None
    #: Error of a NACK, reason of a REJECT.
    text: str = ""
    #: Only for NACK; False if no handler ran to its end, so that the delivery does not count as an attempt.
    was_tried: bool = True

    def is_dead_letter(self, attempt: int, max_attempts: int) -> bool:
        """Whether this outcome makes the message a dead letter at this attempt."""
        if self.verdict is Verdict.NACK:
            return self.was_tried and attempt >= max_attempts
        return self.verdict is Verdict.REJECT


ACKED: Final = Outcome(verdict=Verdict.ACK)


def nacked(error: object, delay_ms: int | None = None) -> Outcome:
    """A NACK with this reason."""
    return Outcome(verdict=Verdict.NACK, delay_ms=delay_ms, text=reason_text(error))


def nacked_untried(error: str, delay_ms: int | None = 0) -> Outcome:
    """A NACK for a message that no handler started, or whose handler a stop ended; it is not an attempt."""
    text = reason_text(error)
    return Outcome(verdict=Verdict.NACK, delay_ms=delay_ms, text=text, was_tried=False)


def rejected(reason: object) -> Outcome:
    """A REJECT with this reason."""
    return Outcome(verdict=Verdict.REJECT, text=reason_text(reason))


def unreadable(error: ProtocolError) -> Outcome:
    """The outcome of a message that cannot be read: a REJECT, because another delivery would fail too.

    A message of another version is nacked instead: a consumer of that version may be in the group.
    """
    text = f"malformed: {error_text(error)}"
    return nacked(text) if isinstance(error, UnknownVersionError) else rejected(text)


class Settler:
    """Settles and extends the deliveries of one consumer, from any thread."""

    __slots__ = ("extend", "refusal", "settle")

    def __init__(
        self,
        *,
        settle: Callable[[Received, Outcome], bool],
        extend: Callable[[Received, int], None],
        refusal: str = "",
    ) -> None:
        self.settle = settle
        self.extend = extend
        #: The remedy in the error, where a handler may not settle its messages itself.
        self.refusal = refusal


class Delivery:
    """One delivery of a message to a handler. Any thread may use it, also after the handler returned.

    The first outcome counts; a later one returns False and changes nothing.
    """

    __slots__ = ("_received", "_settler", "message")

    def __init__(self, received: Received, message: Message, settler: Settler) -> None:
        self._received = received
        self._settler = settler
        self.message = message

    @property
    def attempt(self) -> int:
        """Number of deliveries of the message to this group, including this one.

        Deliveries that were returned before a handler ran to its end do not count.
        """
        return self._received.attempt

    @property
    def sequence(self) -> int:
        """Place of the message in its subject, from 0."""
        return self._received.sequence

    def ack(self) -> bool:
        """The message is done."""
        return self._settle(ACKED)

    def nack(
        self, *, after: float | timedelta | None = None, error: str | BaseException = ""
    ) -> bool:
        """Return the message; it is delivered again after `after` or the group's backoff."""
        return self._settle(nacked(error, Retry(after).after_ms))

    def reject(self, reason: str | BaseException = "") -> bool:
        """Make the message a dead letter of the group now."""
        return self._settle(rejected(reason))

    def extend(self, lease_ms: int) -> None:
        """Ask for the lease to end `lease_ms` from now."""
        if not LEASE_MS_MIN <= lease_ms <= LEASE_MS_MAX:
            raise ConfigurationError(
                setting="lease_ms",
                value=str(lease_ms),
                remedy=f"Give milliseconds from {LEASE_MS_MIN} to {LEASE_MS_MAX}.",
            )
        self._settler.extend(self._received, lease_ms)

    def _settle(self, outcome: Outcome) -> bool:
        if self._settler.refusal:
            raise ConfigurationError(setting="auto_ack", value="True", remedy=self._settler.refusal)
        return self._settler.settle(self._received, outcome)

    def __repr__(self) -> str:
        received = self._received
        return (
            f"<Delivery {received.message_id} {received.subject}:{received.sequence} "
            f"attempt {received.attempt}>"
        )
