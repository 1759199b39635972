"""What each route takes and answers, for `GET /openapi.json`: one table beside the routes themselves.

The document is made of it in `openapi.py`; tests hold both to what the routes do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from qmq_broker.face.routes.delayed import JsonDelayed
from qmq_broker.face.routes.find import JsonSearch, JsonTrace
from qmq_broker.face.routes.json_messages import JsonDeliveries, JsonSend
from qmq_broker.service.keeping import KeeperStatus
from qmq_broker.service.query import GroupStatus, SubjectStatus
from qmq_broker.service.room import RoomStatus
from qmq_client.wire.delayed import (
    CancelAnswer,
    CancelRequest,
    RescheduleAnswer,
    RescheduleRequest,
)
from qmq_client.wire.operations import (
    ConfigureRequest,
    DeadAnswer,
    DeadRequest,
    GroupRequest,
    KeeperRequest,
    KeepRequest,
    SeekRequest,
    StateChange,
    SubjectRequest,
)
from qmq_client.wire.requests import PullRequest, SendAnswer, SettleAnswer, SettleRequest

#: Whatever is asked: the request itself, its time, its query, its head, and trouble of the broker.
ALWAYS: Final = (400, 408, 422, 431, 500, 503)
#: Besides, where one has to be known.
GUARDED: Final = (401, 403)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a query."""

    name: str
    about: str
    is_number: bool = False
    is_required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One route."""

    about: str
    #: What the answer is, or the names of its fields.
    answer: type | tuple[str, ...]
    query: tuple[Parameter, ...] = ()
    body: type | None = None
    #: Besides `ALWAYS`, and `GUARDED` unless it is open.
    statuses: tuple[int, ...] = ()
    is_open: bool = False
    #: Takes and gives frames as well as JSON.
    has_frames: bool = False
    #: Gives bytes, and no JSON.
    has_bytes: bool = False
    #: Gives plain text, and no JSON.
    has_text: bool = False


def _text(name: str, about: str, *, is_required: bool = False) -> Parameter:
    return Parameter(name=name, about=about, is_required=is_required)


def _number(name: str, about: str, *, is_required: bool = False) -> Parameter:
    return Parameter(name=name, about=about, is_number=True, is_required=is_required)


_SUBJECT: Final = _text("subject", "Only this subject.")
_GROUP: Final = _text("group", "Only this group.")
_FIRST: Final = _number("first", "First sequence.")
_COUNT: Final = _number("count", "Limit.")
_DUE_FROM: Final = _number("from", "Due at this time or later, ms since 1970.")
_DUE_TO: Final = _number("to", "Due before this time.")
#: A body that is too long.
_TOO_LONG: Final = 413
_HOT: Final = (411, 413, 415, 429, 507)


def _group_change(about: str, body: type) -> Operation:
    return Operation(
        about=about, body=body, answer=GroupStatus, statuses=(404, 409, 507, _TOO_LONG)
    )


def _dead_change(about: str) -> Operation:
    return Operation(
        about=about, body=DeadRequest, answer=DeadAnswer, statuses=(404, 507, _TOO_LONG)
    )


OPERATIONS: Final[Mapping[str, Operation]] = {
    "POST /v1/send": Operation(
        about="Store messages: all of them or none.",
        body=JsonSend,
        answer=SendAnswer,
        statuses=(409, *_HOT),
        has_frames=True,
    ),
    "POST /v1/pull": Operation(
        about="Get messages for a group; may also settle earlier ones.",
        body=PullRequest,
        answer=JsonDeliveries,
        statuses=(404, 409, *_HOT),
        has_frames=True,
    ),
    "POST /v1/settle": Operation(
        about="Ack, nack, reject or extend delivered messages.",
        body=SettleRequest,
        answer=SettleAnswer,
        statuses=(404, *_HOT),
        has_frames=True,
    ),
    "GET /healthz": Operation(
        about="Whether the process is alive.", answer=("status",), is_open=True
    ),
    "GET /readyz": Operation(
        about="Whether the broker serves: 200 or 503.",
        answer=("status", "reason", "takes_messages"),
        is_open=True,
    ),
    "GET /openapi.json": Operation(about="This document.", answer=("openapi", "paths")),
    "GET /metrics": Operation(
        about="Metrics in Prometheus' text format.",
        answer=(),
        statuses=(429, 501),
        has_text=True,
    ),
    "GET /v1/caller": Operation(about="The caller's name and roles.", answer=("name", "roles")),
    "GET /v1/subjects": Operation(about="List subjects and their sequences.", answer=("subjects",)),
    "POST /v1/subjects/remove": Operation(
        about="Remove a subject without messages, delayed messages and groups.",
        body=SubjectRequest,
        answer=SubjectStatus,
        statuses=(404, 409, 429, 507, _TOO_LONG),
    ),
    "GET /v1/room": Operation(
        about="Show how much is used of what callers can create, and by which token.",
        answer=RoomStatus,
    ),
    "GET /v1/groups": Operation(
        about="List groups with their positions and settings.",
        query=(_SUBJECT, _GROUP),
        answer=("groups",),
    ),
    "GET /v1/dead": Operation(
        about="List dead letters of one group.",
        query=(
            _text("subject", "Only this subject.", is_required=True),
            _text("group", "Only this group.", is_required=True),
            _FIRST,
            _COUNT,
            _number("messages", "1 to include the messages."),
        ),
        answer=("dead",),
        statuses=(404,),
    ),
    "GET /v1/messages": Operation(
        about="Find messages by id, by subject, key and time, or by subject and sequence.",
        query=(
            _text("id", "The message with this id."),
            _SUBJECT,
            _text("key", "With this key."),
            _number("from", "Stored at this time or later, ms since 1970."),
            _number("to", "Stored before this time."),
            _FIRST,
            _COUNT,
        ),
        answer=JsonSearch,
        statuses=(404, 429),
    ),
    "GET /v1/messages/{message_id}/trace": Operation(
        about="The history of one message.", answer=JsonTrace, statuses=(404, 429)
    ),
    "GET /v1/files": Operation(
        about="List the log files.",
        query=(_text("directory", "commitlog, actionlog, state, or empty."),),
        answer=("names",),
        statuses=(429,),
    ),
    "GET /v1/files/read": Operation(
        about="Read bytes of a log file, up to its durable end.",
        query=(
            _text("path", "Folder and name as listed.", is_required=True),
            _number("first", "First byte.", is_required=True),
            _number("count", "Limit in bytes.", is_required=True),
        ),
        answer=(),
        statuses=(404, 429),
        has_bytes=True,
    ),
    "GET /v1/delayed": Operation(
        about="List delayed messages, the next due first.",
        query=(_SUBJECT, _DUE_FROM, _DUE_TO, _COUNT),
        answer=("delayed", "has_more"),
        statuses=(429,),
    ),
    "GET /v1/delayed/status": Operation(
        about="The number of delayed messages, the lateness of releases, and faults.", answer=()
    ),
    "GET /v1/delayed/histogram": Operation(
        about="Count delayed messages by due time.",
        query=(_SUBJECT, _DUE_FROM, _DUE_TO, _text("span", "second, minute, hour or day.")),
        answer=("span", "span_ms", "rows"),
        statuses=(429,),
    ),
    "GET /v1/delayed/{message_id}": Operation(
        about="One delayed message.", answer=JsonDelayed, statuses=(404, 429)
    ),
    "POST /v1/delayed/retry": Operation(
        about="Read delayed messages again that could not be read.", answer=("buckets",)
    ),
    "POST /v1/delayed/accept-clock": Operation(
        about="Release delayed messages by the clock as it is, after it was changed.",
        answer=("clock", "clock_held"),
    ),
    "POST /v1/delayed/cancel": Operation(
        about="Cancel delayed messages.",
        body=CancelRequest,
        answer=CancelAnswer,
        statuses=(429, 507, _TOO_LONG),
    ),
    "POST /v1/delayed/reschedule": Operation(
        about="Change the due time of a message.",
        body=RescheduleRequest,
        answer=RescheduleAnswer,
        statuses=(404, 429, 507, _TOO_LONG),
    ),
    "GET /v1/keepers": Operation(
        about="List keepers: archives that retention waits for, and their progress.",
        answer=("keepers",),
    ),
    "POST /v1/keepers/keep": Operation(
        about="Register a keeper or report its progress; retention waits for the rest.",
        body=KeepRequest,
        answer=KeeperStatus,
        statuses=(507, _TOO_LONG),
    ),
    "POST /v1/keepers/remove": Operation(
        about="Stop waiting for a keeper.",
        body=KeeperRequest,
        answer=KeeperStatus,
        statuses=(404, 507, _TOO_LONG),
    ),
    "POST /v1/state": Operation(
        about="Accept messages, refuse them, or shut down in order.",
        body=StateChange,
        answer=("status", "reason"),
        statuses=(_TOO_LONG,),
    ),
    "POST /v1/groups/pause": _group_change("Pause a group.", GroupRequest),
    "POST /v1/groups/resume": _group_change("Resume a paused group.", GroupRequest),
    "POST /v1/groups/seek": _group_change("Move a group to another position.", SeekRequest),
    "POST /v1/groups/configure": _group_change("Change a group's settings.", ConfigureRequest),
    "POST /v1/groups/remove": _group_change(
        "Remove a group, its position and its dead letters.", GroupRequest
    ),
    "POST /v1/dead/replay": _dead_change("Deliver dead letters to their group again."),
    "POST /v1/dead/purge": _dead_change("Delete dead letters."),
}


def structs() -> list[Any]:
    """Every type that a body or an answer is made of."""
    found = [one for each in OPERATIONS.values() for one in (each.body, each.answer)]
    return list(dict.fromkeys(one for one in found if isinstance(one, type)))
