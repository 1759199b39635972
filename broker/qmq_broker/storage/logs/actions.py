"""What consumers did, as values: the entries of the action log.

One tagged array of MessagePack each; the tag is the first element and never given to another kind: it
is the version of this format. A new kind needs no new version of the directory; a program that does not
know it refuses the log. Fields are added at the end only, with a default. What they mean is the service's affair; replaying
them in order gives the state of every group. Ranges are half open, of pull sequences unless a
field says otherwise.
"""

from __future__ import annotations

from typing import Any, Final, get_args

import msgspec

from qmq_broker.errors import UnknownFormatError
from qmq_client.wire.deliveries import DeliveryRun
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.requests import decode_msgpack


class GroupAction(msgspec.Struct, frozen=True, array_like=True):
    """What all actions say: when, and of which group. Each adds its fields behind these."""

    at_ms: int
    subject: str
    group: str


class GroupDefined(GroupAction, frozen=True, tag=1):
    """A group began to consume a subject, or its settings were changed."""

    #: Consume queue sequence that the group begins with.
    first_sequence: int
    max_attempts: int


class Pulled(GroupAction, frozen=True, tag=2):
    """Messages were handed out to a consumer."""

    consumer: str
    #: The broker's epoch; with a pull sequence it names one hand-out for ever.
    token: int
    first_pull_sequence: int
    runs: tuple[DeliveryRun, ...]
    lease_until_ms: int


class Acked(GroupAction, frozen=True, tag=3):
    """Messages are done for the group."""

    consumer: str
    first: int
    next: int


class Nacked(GroupAction, frozen=True, tag=4):
    """Messages were given back."""

    consumer: str
    first: int
    next: int
    retry_at_ms: int
    error: str


class Extended(GroupAction, frozen=True, tag=5):
    """Leases were prolonged."""

    consumer: str
    first: int
    next: int
    lease_until_ms: int


class Expired(GroupAction, frozen=True, tag=6):
    """Leases ended without a sign of life."""

    consumer: str
    first: int
    next: int
    retry_at_ms: int


class Dead(GroupAction, frozen=True, tag=7):
    """A message became a dead letter of the group."""

    #: Consume queue sequence of the message.
    sequence: int
    attempts: int
    reason: str
    error: str


class Skipped(GroupAction, frozen=True, tag=8):
    """Messages that were given up by force before the group was done with them."""

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


class Configured(GroupAction, frozen=True, tag=9):
    """The group's settings are these from now on."""

    settings: GroupSettings


class Sought(GroupAction, frozen=True, tag=10):
    """The group goes on at this consume queue sequence; what it held or waited for is given up."""

    sequence: int


class Paused(GroupAction, frozen=True, tag=11):
    """The group is given nothing, or again something, from now on."""

    is_paused: bool


class Passed(GroupAction, frozen=True, tag=12):
    """Messages up to here, of those not given yet, are none for the group: they do not fit it."""

    #: Consume queue sequence that the group comes to next.
    next: int


class Keyed(GroupAction, frozen=True, tag=13):
    """An ordered group came to these messages: each waits until it is the first of its key."""

    #: Consume queue sequence that the group comes to next.
    next: int
    #: Those that are for the group.
    sequences: tuple[int, ...]
    #: For each of them the hash of its key; 0 for a message without one, which waits for nobody.
    keys: tuple[int, ...]


class Replayed(GroupAction, frozen=True, tag=14):
    """Dead letters are to be delivered again, as if for the first time."""

    #: Consume queue sequences.
    first: int
    next: int
    #: Of an ordered group: for each of them the hash of its key.
    keys: tuple[int, ...] = ()


class Purged(GroupAction, frozen=True, tag=15):
    """Dead letters are forgotten."""

    #: Consume queue sequences.
    first: int
    next: int


class Ended(GroupAction, frozen=True, tag=16):
    """The group is no more."""


class SetAside(GroupAction, frozen=True, tag=17):
    """Messages that waited for their next delivery are away until they are brought back."""

    #: Consume queue sequences.
    first: int
    next: int
    #: Names this going away for ever.
    ticket: int


class BroughtBack(GroupAction, frozen=True, tag=18):
    """A message that was away waits again, and is read from its copy."""

    #: Consume queue sequence of the message.
    sequence: int
    #: Consume queue sequence of its copy, in the subject of copies; None when the copy is lost: then the
    #: message is read where it stands itself, if it still does.
    copy: int | None


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

#: Kinds that this version knows: 1 to this.
KIND_MAX: Final = max(kind.__struct_config__.tag for kind in get_args(Action))


def decode_actions(content: bytes) -> list[Action]:
    """The actions of one frame; raises `ProtocolError`.

    Raises `UnknownFormatError` when a later version wrote an action of a kind that is not known here:
    that is no damage, and nothing may be made of the actions around it.
    """
    try:
        return decode_msgpack(content, list[Action])
    except ProtocolError:
        later = later_kind(content)
        if later is None:
            raise
        raise unknown_kind(later) from None


def later_kind(content: bytes) -> int | None:
    """A kind of action in a frame that this version does not know; None when there is none."""
    try:
        kinds = [one[0] for one in decode_msgpack(content, list[list[Any]]) if one]
    except ProtocolError:
        return None
    return max((kind for kind in kinds if type(kind) is int and kind > KIND_MAX), default=None)


def unknown_kind(kind: int) -> UnknownFormatError:
    """The refusal of a log with an action of a later version."""
    return UnknownFormatError(
        setting="an action",
        found=f"of kind {kind}",
        known=f"kinds 1 to {KIND_MAX}",
        remedy="Start the version that wrote it, or a later one.",
    )
