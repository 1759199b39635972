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
from qmq_broker.service.query import GroupStatus
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
)
from qmq_client.wire.requests import PullRequest, SendAnswer, SettleAnswer, SettleRequest

#: Whatever is asked: the request itself, its time, its head, and trouble of the broker.
ALWAYS: Final = (400, 408, 431, 500, 503)
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


_SUBJECT: Final = _text("subject", "Of this subject.")
_GROUP: Final = _text("group", "Of this group.")
_FIRST: Final = _number("first", "From this sequence on.")
_COUNT: Final = _number("count", "So many at most.")
_DUE_FROM: Final = _number("from", "Due at this time or later, ms since 1970.")
_DUE_TO: Final = _number("to", "Due before this time.")
#: A body that is too long, or that makes no sense.
_BODY: Final = (413, 422)
_HOT: Final = (411, 413, 415, 422, 429)


def _group_change(about: str, body: type) -> Operation:
    return Operation(about=about, body=body, answer=GroupStatus, statuses=(404, 409, *_BODY))


def _dead_change(about: str) -> Operation:
    return Operation(about=about, body=DeadRequest, answer=DeadAnswer, statuses=(404, *_BODY))


OPERATIONS: Final[Mapping[str, Operation]] = {
    "POST /v1/send": Operation(
        about="Store messages, wholly or not at all.",
        body=JsonSend,
        answer=SendAnswer,
        statuses=(409, *_HOT, 507),
        has_frames=True,
    ),
    "POST /v1/pull": Operation(
        about="Messages for a group.",
        body=PullRequest,
        answer=JsonDeliveries,
        statuses=(404, 409, *_HOT),
        has_frames=True,
    ),
    "POST /v1/settle": Operation(
        about="Ack, nack, reject or extend what was given out.",
        body=SettleRequest,
        answer=SettleAnswer,
        statuses=(404, *_HOT),
        has_frames=True,
    ),
    "GET /healthz": Operation(about="The process is alive.", answer=("status",), is_open=True),
    "GET /readyz": Operation(
        about="200 when it serves, 503 when not.",
        answer=("status", "reason", "takes_messages"),
        is_open=True,
    ),
    "GET /openapi.json": Operation(about="This document.", answer=("openapi", "paths")),
    "GET /metrics": Operation(
        about="Numbers for Prometheus, in its text format.",
        answer=(),
        statuses=(429, 501),
        has_text=True,
    ),
    "GET /v1/caller": Operation(about="Who is asking.", answer=("name", "roles")),
    "GET /v1/subjects": Operation(about="Subjects and their sequences.", answer=("subjects",)),
    "GET /v1/groups": Operation(
        about="Groups, how far they are, and how they are set.",
        query=(_SUBJECT, _GROUP),
        answer=("groups",),
        statuses=(422,),
    ),
    "GET /v1/dead": Operation(
        about="Dead letters of one group.",
        query=(
            _text("subject", "Of this subject.", is_required=True),
            _text("group", "Of this group.", is_required=True),
            _FIRST,
            _COUNT,
            _number("messages", "1 for the messages themselves."),
        ),
        answer=("dead",),
        statuses=(404, 422),
    ),
    "GET /v1/messages": Operation(
        about="Messages by id, by subject, key and time, or by subject and sequence.",
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
        statuses=(404, 422, 429),
    ),
    "GET /v1/messages/{message_id}/trace": Operation(
        about="The life of one message.", answer=JsonTrace, statuses=(404, 422, 429)
    ),
    "GET /v1/files": Operation(
        about="Names of the files of the logs.",
        query=(_text("directory", "commitlog, actionlog, state, or nothing."),),
        answer=("names",),
        statuses=(422, 429),
    ),
    "GET /v1/files/read": Operation(
        about="Bytes of one of them, as far as they are durable.",
        query=(
            _text("path", "As listed, behind its folder.", is_required=True),
            _number("first", "From this byte on.", is_required=True),
            _number("count", "So many at most.", is_required=True),
        ),
        answer=(),
        statuses=(404, 422, 429),
        has_bytes=True,
    ),
    "GET /v1/delayed": Operation(
        about="Messages that wait for their time, the first due first.",
        query=(_SUBJECT, _DUE_FROM, _DUE_TO, _COUNT),
        answer=("delayed", "has_more"),
        statuses=(422, 429),
    ),
    "GET /v1/delayed/status": Operation(
        about="How many wait, how late releases are, what is wrong.", answer=()
    ),
    "GET /v1/delayed/histogram": Operation(
        about="How many are due when.",
        query=(_SUBJECT, _DUE_FROM, _DUE_TO, _text("span", "second, minute, hour or day.")),
        answer=("span", "span_ms", "rows"),
        statuses=(422, 429),
    ),
    "GET /v1/delayed/{message_id}": Operation(
        about="One delayed message.", answer=JsonDelayed, statuses=(404, 422, 429)
    ),
    "POST /v1/delayed/retry": Operation(
        about="Look again at messages that could not be read.", answer=("buckets",)
    ),
    "POST /v1/delayed/cancel": Operation(
        about="Take messages back.",
        body=CancelRequest,
        answer=CancelAnswer,
        statuses=(429, *_BODY),
    ),
    "POST /v1/delayed/reschedule": Operation(
        about="Give a message another time.",
        body=RescheduleRequest,
        answer=RescheduleAnswer,
        statuses=(404, 429, 507, *_BODY),
    ),
    "GET /v1/keepers": Operation(
        about="Who keeps the logs elsewhere, and how far: retention waits for them.",
        answer=("keepers",),
    ),
    "POST /v1/keepers/keep": Operation(
        about="Let retention wait for what is not kept elsewhere yet.",
        body=KeepRequest,
        answer=KeeperStatus,
        statuses=(507, *_BODY),
    ),
    "POST /v1/keepers/remove": Operation(
        about="Wait for a keeper no longer.",
        body=KeeperRequest,
        answer=KeeperStatus,
        statuses=(404, 507, *_BODY),
    ),
    "POST /v1/state": Operation(
        about="Take messages or not, or stop in order.",
        body=StateChange,
        answer=("status", "reason"),
        statuses=_BODY,
    ),
    "POST /v1/groups/pause": _group_change("Give the group nothing.", GroupRequest),
    "POST /v1/groups/resume": _group_change("Give it messages again.", GroupRequest),
    "POST /v1/groups/seek": _group_change("Go on from another place.", SeekRequest),
    "POST /v1/groups/configure": _group_change("Change what is kept with it.", ConfigureRequest),
    "POST /v1/groups/remove": _group_change("Forget the group.", GroupRequest),
    "POST /v1/dead/replay": _dead_change("Deliver dead letters again."),
    "POST /v1/dead/purge": _dead_change("Forget dead letters."),
}


def structs() -> list[Any]:
    """Every type that a body or an answer is made of."""
    found = [one for each in OPERATIONS.values() for one in (each.body, each.answer)]
    return list(dict.fromkeys(one for one in found if isinstance(one, type)))
