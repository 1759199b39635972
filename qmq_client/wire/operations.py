"""What operators ask of groups, dead letters and the broker: bodies of requests in JSON, and answers.

A group is named as listings name it: `group`, or `group@consumer` for one consumer of a broadcast.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from qmq_client.wire.requests import Backoff, Natural, Tags

_BEHIND_ALL = 2**63 - 1
#: Of the words that a change of state is given.
REASON_CHARACTERS_MAX: Final = 500


class GroupRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One group: to be paused, resumed or removed."""

    subject: str
    group: str


class SubjectRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One subject: to be removed."""

    subject: str


class SeekRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Let a group go on from another place.

    What it holds or waits for is given up: outcomes of it come back stale. Dead letters at the new
    place or behind it are taken back, because their messages come again.
    """

    subject: str
    group: str
    #: See `start.py`.
    to: str


class ConfigureRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Change what is kept with a group; what is left out stays.

    A filter holds for messages that the group has not come to yet.
    """

    subject: str
    group: str
    tags: Tags | UnsetType = UNSET
    max_attempts: Annotated[int, msgspec.Meta(ge=1)] | UnsetType = UNSET
    backoff: Backoff | UnsetType = UNSET


class DeadRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dead letters of one group, by sequence, half open: to be replayed or purged."""

    subject: str
    group: str
    first: Natural = 0
    next: Natural = _BEHIND_ALL


class DeadAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What became of dead letters."""

    #: Replayed or purged.
    count: Natural
    #: Dead letters of the range whose messages the retention has taken: they cannot be replayed.
    gone: Natural = 0
    #: Whether the range holds more than one request takes: ask again.
    has_more: bool = False


class KeepRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything below these offsets is kept elsewhere; retention waits for the rest."""

    #: The holder's name; the same characters as a group's.
    name: str
    #: Of which store, 32 hex digits: offsets of another one mean nothing.
    store_id: str
    #: Of the commit log …
    kept_offset: Natural
    #: … and of the action log.
    kept_actions_offset: Natural


class KeeperRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One keeper: to be waited for no longer."""

    name: str


class StateChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/state`."""

    #: What the broker is to do from now on.
    state: Literal["serving", "read-only", "draining"]
    #: Shown to callers that are refused.
    reason: Annotated[str, msgspec.Meta(max_length=REASON_CHARACTERS_MAX)] = ""
