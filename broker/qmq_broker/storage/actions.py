"""What consumers did, as values: the entries of the action log.

One tagged array of MessagePack each; the tag is the first element and never given to another kind.
Fields are added at the end only, with a default. What they mean is the service's affair; replaying
them in order gives the state of every group. Ranges are half open, of pull sequences unless a
field says otherwise.
"""

from __future__ import annotations

import msgspec

from qmq_client.wire.deliveries import DeliveryRun


class GroupDefined(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A group began to consume a subject, or its settings were changed."""

    at_ms: int
    subject: str
    group: str
    #: Consume queue sequence that the group begins with.
    first_sequence: int
    max_attempts: int


class Pulled(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Messages were handed out to a consumer."""

    at_ms: int
    subject: str
    group: str
    consumer: str
    #: The broker's epoch; with a pull sequence it names one hand-out for ever.
    token: int
    first_pull_sequence: int
    runs: tuple[DeliveryRun, ...]
    lease_until_ms: int


class Acked(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Messages are done for the group."""

    at_ms: int
    subject: str
    group: str
    consumer: str
    first: int
    next: int


class Nacked(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Messages were given back."""

    at_ms: int
    subject: str
    group: str
    consumer: str
    first: int
    next: int
    retry_at_ms: int
    error: str


class Extended(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Leases were prolonged."""

    at_ms: int
    subject: str
    group: str
    consumer: str
    first: int
    next: int
    lease_until_ms: int


class Expired(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Leases ended without a sign of life."""

    at_ms: int
    subject: str
    group: str
    consumer: str
    first: int
    next: int
    retry_at_ms: int


class Dead(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """A message became a dead letter of the group."""

    at_ms: int
    subject: str
    group: str
    #: Consume queue sequence of the message.
    sequence: int
    attempts: int
    reason: str
    error: str


class Skipped(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Messages that were given up by force before the group was done with them."""

    at_ms: int
    subject: str
    group: str
    #: Consume queue sequences.
    first: int
    next: int


Action = GroupDefined | Pulled | Acked | Nacked | Extended | Expired | Dead | Skipped
