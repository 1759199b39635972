"""Taking a message back at the broker; a transport need not be able to."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from qmq_client.transport.port import Transport
from qmq_client.wire.delayed import Cancellation


@runtime_checkable
class Cancelling(Protocol):
    """A transport to a broker that keeps delayed messages."""

    def cancel(self, message_ids: tuple[str, ...]) -> tuple[Cancellation, ...]:
        """Take delayed messages back; what became of each, durable when it was done."""
        ...


def cancel_at_broker(
    transport: Transport, message_id: str, *, is_withdrawn: bool = False
) -> Cancellation:
    """Take one message back; raises `TransportError`. Unknown to a broker that keeps none.

    `is_withdrawn`: it was in the outbox and is not any more. An attempt before may have brought it to
    the broker, and only the answer was lost; one that is unknown there as well is cancelled.
    """
    outcome = Cancellation.UNKNOWN
    if isinstance(transport, Cancelling):
        outcome = transport.cancel((message_id,))[0]
    if is_withdrawn and outcome is Cancellation.UNKNOWN:
        return Cancellation.CANCELLED
    return outcome
