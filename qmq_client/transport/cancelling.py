"""Cancelling a message at the broker; an optional ability of transports."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from qmq_client.transport.port import Transport
from qmq_client.wire.delayed import Cancellation


@runtime_checkable
class Cancelling(Protocol):
    """A transport to a broker that keeps delayed messages."""

    def cancel(
        self, message_ids: tuple[str, ...], *, is_withdrawn: bool = False
    ) -> tuple[Cancellation, ...]:
        """Cancel delayed messages; the outcome of each, durable on return.

        `is_withdrawn`: they were removed from the outbox. Those that are unknown are not stored
        either when an earlier send of them arrives later.
        """
        ...


def cancel_at_broker(
    transport: Transport, message_id: str, *, is_withdrawn: bool = False
) -> Cancellation:
    """Cancel one message; raises `TransportError`. Unknown at a broker that keeps no delayed messages.

    `is_withdrawn`: it was removed from the outbox. An earlier attempt may have brought it to the
    broker, with only the answer lost, or may still do so; if it is unknown there as well, it is
    cancelled.
    """
    outcome = Cancellation.UNKNOWN
    if isinstance(transport, Cancelling):
        outcome = transport.cancel((message_id,), is_withdrawn=is_withdrawn)[0]
    if is_withdrawn and outcome is Cancellation.UNKNOWN:
        return Cancellation.CANCELLED
    return outcome
