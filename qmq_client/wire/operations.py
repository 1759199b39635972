"""JSON bodies of operators' requests about groups, dead letters and the broker, and of the answers.

A group has the name of the listings: `group`, or `group@consumer` for one consumer of a broadcast.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from qmq_client.wire.names import NAME_PATTERN
from qmq_client.wire.requests import Backoff, Name, Natural, StartText, Tags

_BEHIND_ALL = 2**63 - 1
#: Longest reason of a change of state.
REASON_CHARACTERS_MAX: Final = 500

GROUP_FORM: Final = {"pattern": f"^{NAME_PATTERN}(@{NAME_PATTERN})?$"}
#: The name of a group, as in listings.
GroupName = Annotated[str, msgspec.Meta(extra_json_schema=GROUP_FORM)]
_StoreId = Annotated[str, msgspec.Meta(extra_json_schema={"pattern": "^[0-9a-f]{32}$"})]


class GroupRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pause, resume or remove one group."""

    subject: Name
    group: GroupName


class SubjectRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Remove one subject."""

    subject: Name


class SeekRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Move a group to another position.

    Its deliveries and retries are dropped: outcomes that arrive for them are refused as stale. Dead
    letters at the new place or after it are removed, because their messages are delivered again.
    """

    subject: Name
    group: GroupName
    to: StartText


class ConfigureRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Change the settings of a group; settings that are left out keep their values.

    A new filter applies to messages beyond the group's position.
    """

    subject: Name
    group: GroupName
    tags: Tags | UnsetType = UNSET
    max_attempts: Annotated[int, msgspec.Meta(ge=1)] | UnsetType = UNSET
    backoff: Backoff | UnsetType = UNSET


class DeadRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replay or purge dead letters of one group: those with a sequence from `first` to before `next`."""

    subject: Name
    group: GroupName
    first: Natural = 0
    next: Natural = _BEHIND_ALL


class DeadAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a replay or purge of dead letters."""

    #: Dead letters that were replayed or purged.
    count: Natural
    #: Dead letters of the range that cannot be replayed: retention has deleted their messages.
    gone: Natural = 0
    #: Whether the range has more than one request can take: repeat the request.
    has_more: bool = False


class KeepRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A keeper has the logs below these offsets; retention waits for it with the rest."""

    #: The keeper's name; the same characters as a group's.
    name: Name
    #: The id of the store that the offsets belong to, 32 hex digits.
    store_id: _StoreId
    #: Offset in the commit log.
    kept_offset: Natural
    #: Offset in the action log.
    kept_actions_offset: Natural


class KeeperRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Remove one keeper: retention no longer waits for it."""

    name: Name


class StateChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/state`."""

    #: The new state of the broker.
    state: Literal["serving", "read-only", "draining"]
    #: Clients whose requests are refused read this.
    reason: Annotated[str, msgspec.Meta(max_length=REASON_CHARACTERS_MAX)] = ""
