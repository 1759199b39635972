"""Operators' requests about groups, dead letters and the broker, as JSON bodies, and the answers.

A group is named as listings name it: `group`, or `group@consumer` for one consumer of a broadcast.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from qmq_client.wire.names import NAME_PATTERN
from qmq_client.wire.requests import Backoff, Name, Natural, StartText, Tags

_BEHIND_ALL = 2**63 - 1
#: Of the words that a change of state is given.
REASON_CHARACTERS_MAX: Final = 500

GROUP_FORM: Final = {"pattern": f"^{NAME_PATTERN}(@{NAME_PATTERN})?$"}
#: A group as listings name it.
GroupName = Annotated[str, msgspec.Meta(extra_json_schema=GROUP_FORM)]
_StoreId = Annotated[str, msgspec.Meta(extra_json_schema={"pattern": "^[0-9a-f]{32}$"})]


class GroupRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One group: to be paused, resumed or removed."""

    subject: Name
    group: GroupName


class SubjectRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One subject: to be removed."""

    subject: Name


class SeekRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Let a group continue from another place.

    What it holds or waits for is given up: outcomes of it come back stale. Dead letters at the new
    place or after it are taken back, because their messages come again.
    """

    subject: Name
    group: GroupName
    to: StartText


class ConfigureRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Change what is kept with a group; what is left out stays.

    A filter holds for messages that the group has not come to yet.
    """

    subject: Name
    group: GroupName
    tags: Tags | UnsetType = UNSET
    max_attempts: Annotated[int, msgspec.Meta(ge=1)] | UnsetType = UNSET
    backoff: Backoff | UnsetType = UNSET


class DeadRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dead letters of one group, by sequence, half open: to be replayed or purged."""

    subject: Name
    group: GroupName
    first: Natural = 0
    next: Natural = _BEHIND_ALL


class DeadAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome for dead letters."""

    #: Replayed or purged.
    count: Natural
    #: Dead letters of the range whose messages the retention has taken: they cannot be replayed.
    gone: Natural = 0
    #: Whether the range holds more than one request takes: ask again.
    has_more: bool = False


class KeepRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything below these offsets is kept elsewhere; retention waits for the rest."""

    #: The holder's name; the same characters as a group's.
    name: Name
    #: Of which store, 32 hex digits: offsets of another one mean nothing.
    store_id: _StoreId
    #: Of the commit log …
    kept_offset: Natural
    #: … and of the action log.
    kept_actions_offset: Natural


class KeeperRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One keeper: to be waited for no longer."""

    name: Name


class StateChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/state`."""

    #: What the broker is to do from now on.
    state: Literal["serving", "read-only", "draining"]
    #: Shown to callers that are refused.
    reason: Annotated[str, msgspec.Meta(max_length=REASON_CHARACTERS_MAX)] = ""
