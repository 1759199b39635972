"""The interface to a broker: three blocking calls, the same for every engine.

Only subclasses of `TransportError` are raised; every other exception is translated inside the
transport. Calls may come from any thread, at most a few at once.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from qmq_client.errors import ConfigurationError
from qmq_client.wire.delayed import Cancellation
from qmq_client.wire.deliveries import Deliveries
from qmq_client.wire.requests import PullRequest, SendAnswer, SettleAnswer, SettleRequest


class Transport(Protocol):
    """A connection to a broker."""

    def send(self, frame: bytes) -> SendAnswer:
        """Send one message frame, wholly or not at all.

        On return every message of the frame is as durable as `SendAnswer.durability` says, and the
        answer was checked to name this very frame. Safe to repeat: ids are the same.
        """
        ...

    def pull(self, request: PullRequest) -> Deliveries:
        """Pull messages for a group, perhaps none after `wait_ms`; also applies the request's settlements."""
        ...

    def settle(self, request: SettleRequest) -> SettleAnswer:
        """Report outcomes; the answer lists ranges whose lease had ended as stale."""
        ...

    def close(self) -> None:
        """Close connections; calls under way may fail. Safe to call twice."""
        ...


def checked_transport(given: Transport) -> Transport:
    """Return the transport; raises `ConfigurationError` for other objects, such as the None of an unset variable."""
    if hasattr(given, "send") or hasattr(given, "pull"):
        return given
    raise ConfigurationError(
        setting="broker",
        value=repr(given),
        remedy="Give a URL like http://127.0.0.1:9470, or a BrokerAddress.",
    )


@runtime_checkable
class Cancelling(Protocol):
    """A transport to a broker that keeps delayed messages."""

    def cancel(
        self, message_ids: tuple[str, ...], *, withdrawn_from: str | None = None
    ) -> tuple[Cancellation, ...]:
        """Cancel delayed messages; returns the outcome of each, durable on return.

        `withdrawn_from`: the subject of all of them, if they were removed from the outbox. Unknown
        ones are then refused if an earlier send of them to that subject arrives later.
        """
        ...


def cancel_at_broker(
    transport: Transport, message_id: str, *, withdrawn_from: str | None = None
) -> Cancellation:
    """Cancel one message; raises `TransportError`. Returns UNKNOWN for a broker without delayed messages.

    `withdrawn_from`: its subject, if it was removed from the outbox. An earlier attempt may have
    stored it at the broker, with only the answer lost, or may still do so; if the broker does not
    know it, it counts as cancelled.
    """
    outcome = Cancellation.UNKNOWN
    if isinstance(transport, Cancelling):
        outcome = transport.cancel((message_id,), withdrawn_from=withdrawn_from)[0]
    if withdrawn_from is not None and outcome is Cancellation.UNKNOWN:
        return Cancellation.CANCELLED
    return outcome
