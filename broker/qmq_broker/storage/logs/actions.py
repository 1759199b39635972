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


class BackoffTerms(msgspec.Struct, frozen=True, array_like=True):
    """How long a group waits before it gives a message again."""

    first_ms: int
    factor: float
    max_ms: int


class GroupSettings(msgspec.Struct, frozen=True, array_like=True):
    """What is kept with a group beside its number of attempts."""

    #: Only messages with at least one of these …
    any_tags: tuple[str, ...] = ()
    #: … and all of these.
    all_tags: tuple[str, ...] = ()
    #: Of messages with one key the next is given when the one before is done.
    is_ordered: bool = False
    #: None for the broker's own.
    backoff: BackoffTerms | None = None
    #: The group goes when nobody asked for it for so long; 0 for never.
    idle_ms: int = 0


class Configured(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """The group's settings are these from now on."""

    at_ms: int
    subject: str
    group: str
    settings: GroupSettings


class Sought(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """The group goes on at this consume queue sequence; what it held or waited for is given up."""

    at_ms: int
    subject: str
    group: str
    sequence: int


class Paused(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """The group is given nothing, or again something, from now on."""

    at_ms: int
    subject: str
    group: str
    is_paused: bool


class Passed(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Messages up to here, of those not given yet, are none for the group: they do not fit it."""

    at_ms: int
    subject: str
    group: str
    #: Consume queue sequence that the group comes to next.
    next: int


class Keyed(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """An ordered group came to these messages: each waits until it is the first of its key."""

    at_ms: int
    subject: str
    group: str
    #: Consume queue sequence that the group comes to next.
    next: int
    #: Those that are for the group.
    sequences: tuple[int, ...]
    #: For each of them the hash of its key; 0 for a message without one, which waits for nobody.
    keys: tuple[int, ...]


class Replayed(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """Dead letters are to be delivered again, as if for the first time."""

    at_ms: int
    subject: str
    group: str
    #: Consume queue sequences.
    first: int
    next: int
    #: Of an ordered group: for each of them the hash of its key.
    keys: tuple[int, ...] = ()


class Purged(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """Dead letters are forgotten."""

    at_ms: int
    subject: str
    group: str
    #: Consume queue sequences.
    first: int
    next: int


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """The group is no more."""

    at_ms: int
    subject: str
    group: str


class SetAside(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """Messages that waited for their next delivery are away until they are brought back."""

    at_ms: int
    subject: str
    group: str
    #: Consume queue sequences.
    first: int
    next: int
    #: Names this going away for ever.
    ticket: int


class BroughtBack(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """A message that was away waits again, and is read from its copy."""

    at_ms: int
    subject: str
    group: str
    #: Consume queue sequence of the message.
    sequence: int
    #: Consume queue sequence of its copy, in the subject of copies.
    copy: int


Action = (
    GroupDefined
    | Pulled
    | Acked
    | Nacked
    | Extended
    | Expired
    | Dead
    | Skipped
    | Configured
    | Sought
    | Paused
    | Passed
    | Keyed
    | Replayed
    | Purged
    | Ended
    | SetAside
    | BroughtBack
)
