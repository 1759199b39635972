"""The actions of consumers and operators on a group, as values: the content of the action log.

Each action is a tagged MessagePack array; the tag is its first element and never reused. That is
how this format is versioned: a new kind needs no new version of the directory, and a program that
does not know it refuses the log. New fields go to the end and have a default; a program that does not
know them refuses the log, too. `runs` get no new fields: they are a part of answers as well. The service decides
what actions mean; replaying them in order gives the state of every group. Ranges are half open, of
pull sequences unless a field says otherwise.
"""

from __future__ import annotations

import msgspec

from qmq_client.wire.deliveries import DeliveryRun


class GroupAction(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What all actions have: the time, and the group. Each kind adds its fields after these."""

    at_ms: int
    subject: str
    group: str


class GroupDefined(GroupAction, frozen=True, tag=1):
    """A group began to consume a subject, or its settings were changed."""

    #: Consume queue sequence at which the group begins.
    first_sequence: int
    max_attempts: int


class Pulled(GroupAction, frozen=True, tag=2):
    """Messages were delivered to a consumer."""

    consumer: str
    #: Identifies the opening of the store; with a pull sequence it identifies one delivery forever.
    token: int
    first_pull_sequence: int
    runs: tuple[DeliveryRun, ...]
    lease_until_ms: int


class RangeAction(GroupAction, frozen=True):
    """What concerns a range of pull sequences of one consumer. Each kind adds its fields after these."""

    consumer: str
    first: int
    next: int


class Acked(RangeAction, frozen=True, tag=3):
    """The group is done with these messages."""


class Nacked(RangeAction, frozen=True, tag=4):
    """Messages were nacked."""

    retry_at_ms: int
    error: str
    #: False: they wait as they did before this delivery, but for the time, and it is no attempt.
    was_tried: bool = True


class Extended(RangeAction, frozen=True, tag=5):
    """Leases were prolonged."""

    lease_until_ms: int


class Expired(RangeAction, frozen=True, tag=6):
    """Leases ended without a word from the consumer."""

    retry_at_ms: int


class Dead(GroupAction, frozen=True, tag=7):
    """A message became a dead letter of the group."""

    #: Consume queue sequence of the message.
    sequence: int
    attempts: int
    reason: str
    error: str


class SequencesAction(GroupAction, frozen=True):
    """What concerns a range of consume queue sequences. Each kind adds its fields after these."""

    first: int
    next: int


class Skipped(SequencesAction, frozen=True, tag=8):
    """Messages were given up by force before the group was done with them."""


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
    #: Messages with the same key are delivered one after the other.
    is_ordered: bool = False
    #: None for the broker's default.
    backoff: BackoffTerms | None = None
    #: The group ends after this long without a pull; 0 for never.
    idle_ms: int = 0


class Configured(GroupAction, frozen=True, tag=9):
    """The group has these settings from now on."""

    settings: GroupSettings


class Sought(GroupAction, frozen=True, tag=10):
    """The group continues at this consume queue sequence; what it held or waited for is dropped."""

    sequence: int


class Paused(GroupAction, frozen=True, tag=11):
    """The group is paused or resumed from now on."""

    is_paused: bool


class Passed(GroupAction, frozen=True, tag=12):
    """Messages up to here that were not delivered yet do not match the group's filter."""

    #: Consume queue sequence that the group comes to next.
    next: int


class Keyed(GroupAction, frozen=True, tag=13):
    """An ordered group reached these messages: each waits until it is the first of its key."""

    #: Consume queue sequence that the group comes to next.
    next: int
    #: The sequences that match the group.
    sequences: tuple[int, ...]
    #: For each of them the hash of its key; 0 for a message without one, which waits for no other.
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

    #: Names this long retry; never used again.
    retry_id: int


class BroughtBack(GroupAction, frozen=True, tag=18):
    """The long retry of a message ends: it waits for redelivery again, and is read from its copy."""

    #: Consume queue sequence of the message.
    sequence: int
    #: Consume queue sequence of the copy, in the subject of copies. None if the copy is lost: then
    #: the message is read from its original place, if it is still there.
    copy: int | None


class MovedBack(GroupAction, frozen=True, tag=19):
    """A start found that messages of the group are gone; it forgets what it knew of them."""

    #: The consume queue sequence at which the subject ends.
    next: int
    #: The same for the subject of copies.
    next_copy: int


class Owned(GroupAction, frozen=True, tag=20):
    """The token, by its name, whose share of the broker's room the group takes.

    Without a group, it is the subject that takes it.
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
    """The name of a kind of action, as listings and tables have it."""
    return kind.__name__.lower()
