"""The actions of consumers and operators on a group, as values: the content of the action log.

Each action is a tagged MessagePack array; the tag is its first element and never reused. This versions the
format: a new kind needs no new version of the directory, and a program that does not know it refuses the log.
New fields go to the end and have a default; a program that does not know them refuses the log, too.
`runs` get no new fields, because they are also part of answers. Replaying all actions in order
gives the state of every group. Ranges are half open, of pull sequences unless a field says
otherwise.
"""

from __future__ import annotations

import msgspec

from qmq_client.wire.deliveries import DeliveryRun


class GroupAction(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The fields of all actions: time and group. Each kind adds its fields after these."""

    at_ms: int
    subject: str
    group: str


class GroupDefined(GroupAction, frozen=True, tag=1):
    """A group was created on a subject, or its settings were changed."""

    #: Consume queue sequence at which the group begins.
    first_sequence: int
    max_attempts: int


class Pulled(GroupAction, frozen=True, tag=2):
    """Messages were delivered to a consumer."""

    consumer: str
    #: Identifies the opening of the store; together with a pull sequence it permanently identifies one delivery.
    token: int
    first_pull_sequence: int
    runs: tuple[DeliveryRun, ...]
    lease_until_ms: int


class RangeAction(GroupAction, frozen=True):
    """The fields of actions on a range of pull sequences of one consumer. Each kind adds its fields after these."""

    consumer: str
    first: int
    next: int


class Acked(RangeAction, frozen=True, tag=3):
    """Messages were acked."""


class Nacked(RangeAction, frozen=True, tag=4):
    """Messages were nacked."""

    retry_at_ms: int
    error: str
    #: False: the delivery does not count as an attempt, and the messages wait as before it, except for the time.
    was_tried: bool = True


class Extended(RangeAction, frozen=True, tag=5):
    """Leases were extended."""

    lease_until_ms: int


class Expired(RangeAction, frozen=True, tag=6):
    """Leases ended without an outcome from the consumer."""

    retry_at_ms: int


class Dead(GroupAction, frozen=True, tag=7):
    """A message became a dead letter of the group."""

    #: Consume queue sequence of the message.
    sequence: int
    attempts: int
    reason: str
    error: str


class SequencesAction(GroupAction, frozen=True):
    """The fields of actions on a range of consume queue sequences. Each kind adds its fields after these."""

    first: int
    next: int


class Skipped(SequencesAction, frozen=True, tag=8):
    """Messages were deleted by force before the group settled them."""


class BackoffTerms(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How long a group waits before it delivers a message again."""

    first_ms: int
    factor: float
    max_ms: int


class GroupSettings(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The settings of a group besides its number of attempts."""

    #: Only messages with at least one of these …
    any_tags: tuple[str, ...] = ()
    #: … and all of these.
    all_tags: tuple[str, ...] = ()
    #: Messages with the same key are delivered one after the other (an ordered group).
    is_ordered: bool = False
    #: None for the broker's default.
    backoff: BackoffTerms | None = None
    #: The group ends after this long without a pull; 0 for never.
    idle_ms: int = 0


class Configured(GroupAction, frozen=True, tag=9):
    """The group has these settings from now on."""

    settings: GroupSettings


class Sought(GroupAction, frozen=True, tag=10):
    """The group continues at this consume queue sequence; messages in flight or waiting are dropped."""

    sequence: int


class Paused(GroupAction, frozen=True, tag=11):
    """The group is paused or resumed from now on."""

    is_paused: bool


class Passed(GroupAction, frozen=True, tag=12):
    """Undelivered messages up to here do not match the group's filter."""

    #: The group's next consume queue sequence.
    next: int


class Keyed(GroupAction, frozen=True, tag=13):
    """An ordered group reached these messages: each waits until it is the first of its key."""

    #: The group's next consume queue sequence.
    next: int
    #: The sequences that match the group.
    sequences: tuple[int, ...]
    #: For each of them the hash of its key; 0 for a message without a key, which waits for no other message.
    keys: tuple[int, ...]


class Replayed(SequencesAction, frozen=True, tag=14):
    """Dead letters will be delivered again, as if for the first time."""

    #: In an ordered group: the hash of each message's key.
    keys: tuple[int, ...] = ()


class Purged(SequencesAction, frozen=True, tag=15):
    """Dead letters are forgotten."""


class Ended(GroupAction, frozen=True, tag=16):
    """The group no longer exists."""


class SetAside(SequencesAction, frozen=True, tag=17):
    """Messages that waited for redelivery begin a long retry."""

    #: Identifies this long retry; never used again.
    retry_id: int


class BroughtBack(GroupAction, frozen=True, tag=18):
    """The long retry of a message ended: it waits for redelivery again, and is read from its copy."""

    #: Consume queue sequence of the message.
    sequence: int
    #: Consume queue sequence of the copy, in the subject of copies. None if the copy is lost: then
    #: the message is read from its original place, if it still exists.
    copy: int | None


class MovedBack(GroupAction, frozen=True, tag=19):
    """A start found that messages of the group are lost; the group forgets their state."""

    #: The consume queue sequence at which the subject ends.
    next: int
    #: The same for the subject of copies.
    next_copy: int


class Owned(GroupAction, frozen=True, tag=20):
    """The name of the token whose share of the broker's limits the group uses.

    Without a group, the subject uses the share.
    """

    owner: str


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
    | MovedBack
    | Owned
)


def kind_name(kind: type[Action]) -> str:
    """The name of a kind of action in listings and tables."""
    return kind.__name__.lower()
