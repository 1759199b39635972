"""Cancelling a message at the broker; an optional ability of transports."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from qmq_client.transport.port import Transport
from qmq_client.wire.delayed import Cancellation


@runtime_checkable
class Cancelling(Protocol):
    """A transport to a broker that keeps delayed messages."""

    def cancel(
        self, message_ids: tuple[str, ...], *, withdrawn_from: str | None = None
    ) -> tuple[Cancellation, ...]:
        """Cancel delayed messages; the outcome of each, durable on return.

        `withdrawn_from`: the subject of all of them, if they were removed from the outbox. Those that
        are unknown are not stored either when an earlier send of them to that subject arrives later.
        """
        ...


def cancel_at_broker(
    transport: Transport, message_id: str, *, withdrawn_from: str | None = None
) -> Cancellation:
    """Cancel one message; raises `TransportError`. Unknown at a broker that keeps no delayed messages.

    `withdrawn_from`: its subject, if it was removed from the outbox. An earlier attempt may have brought
    it to the broker, with only the answer lost, or may still do so; if it is unknown there as well, it
    is cancelled.
    """
    outcome = Cancellation.UNKNOWN
    if isinstance(transport, Cancelling):
        outcome = transport.cancel((message_id,), withdrawn_from=withdrawn_from)[0]
    if withdrawn_from is not None and outcome is Cancellation.UNKNOWN:
        return Cancellation.CANCELLED
    return outcome
