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


def cancel_at_broker(transport: Transport, message_id: str) -> Cancellation:
    """Take one message back; raises `TransportError`. Unknown to a broker that keeps none."""
    if not isinstance(transport, Cancelling):
        return Cancellation.UNKNOWN
    return transport.cancel((message_id,))[0]
