"""The table of routes: each route of the broker once, with its handler, types and roles.

Dispatch and authorization (`app.py`), the OpenAPI document (`openapi.py`) and the check of docs/http.md are
derived from it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from qmq_broker.face.authentication.access import Role
from qmq_broker.face.http.request_response import RequestResponse
from qmq_broker.face.http.requests import Head
from qmq_broker.face.routes.admin import Admin
from qmq_broker.face.routes.delayed import DelayedRoutes, JsonDelayed
from qmq_broker.face.routes.find import JsonSearch, JsonTrace
from qmq_broker.face.routes.groups import GroupRoutes
from qmq_broker.face.routes.hot import HotRoutes
from qmq_broker.face.routes.json_messages import JsonDead, JsonDeliveries, JsonSend
from qmq_broker.face.routes.keepers import KeeperRoutes
from qmq_broker.face.routes.openapi import OpenApi
from qmq_broker.face.routes.ranges import READ_BYTES_MAX, FileRoutes
from qmq_broker.face.routes.route import NUMBER_MAX, About, Parameter, Route
from qmq_broker.face.routes.scrape import Scraper
from qmq_broker.service.broker import Broker
from qmq_broker.service.delay.query import SPANS_MS, DelayedStatus, DelayStatus, HistogramRow
from qmq_broker.service.keeping import KeeperStatus
from qmq_broker.service.query import LISTED_MAX, GroupStatus, SubjectStatus
from qmq_broker.service.room import RoomStatus
from qmq_broker.service.serving import Serving
from qmq_broker.storage.files import layout
from qmq_broker.storage.index.key_search import FOUND_MAX
from qmq_client.wire.delayed import (
    CancelAnswer,
    CancelRequest,
    RescheduleAnswer,
    RescheduleRequest,
)
from qmq_client.wire.limits import KEY_BYTES_MAX
from qmq_client.wire.operations import (
    GROUP_FORM,
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
from qmq_client.wire.requests import (
    MESSAGE_ID_FORM,
    NAME_FORM,
    PullRequest,
    SendAnswer,
    SettleAnswer,
    SettleRequest,
)

HotHandler = Callable[[HotRoutes, Head, RequestResponse], Awaitable[None]]
Handler = Callable[[Request], Awaitable[Response]]


class Handlers:
    """The objects that serve the routes of people and tools, for one broker."""

    def __init__(self, broker: Broker, *, has_tokens: bool) -> None:
        self.admin = Admin(broker)
        self.groups = GroupRoutes(broker)
        self.delayed = DelayedRoutes(broker)
        self.keepers = KeeperRoutes(broker)
        self.files = FileRoutes(broker)
        self.metrics = Scraper(broker)
        self.openapi = OpenApi(ROUTES, has_tokens=has_tokens)


#: A caller with any role on a subject may see that it exists, and the positions of its groups.
_READERS: Final = (Role.PRODUCER, Role.CONSUMER)
#: Only a caller who may consume a message may read its content.
_CONSUMERS: Final = (Role.CONSUMER,)
_PRODUCERS: Final = (Role.PRODUCER,)

_NAME: Final = {"type": "string", **NAME_FORM}
_ANY_NUMBER: Final = {"type": "integer", "minimum": 0, "maximum": NUMBER_MAX}


def _number_to(highest: int) -> dict[str, Any]:
    return {**_ANY_NUMBER, "maximum": highest}


def _one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


def _query(
    name: str, summary: str, schema: dict[str, Any], example: str, *, is_required: bool = False
) -> Parameter:
    return Parameter(
        name=name, summary=summary, schema=schema, example=example, is_required=is_required
    )


_SUBJECT: Final = _query("subject", "Only this subject.", _NAME, "orders")
_GROUP: Final = _query("group", "Only this group.", {"type": "string", **GROUP_FORM}, "billing")
_FIRST: Final = _query("first", "First sequence.", _ANY_NUMBER, "0")
_DUE: Final = (
    _query("from", "Due at this time or later, ms since 1970.", _ANY_NUMBER, "1790000000000"),
    _query("to", "Due before this time.", _ANY_NUMBER, "1790003600000"),
)
_ORDERS: Final = {"subject": "orders", "group": "billing"}
_ID: Final = "ab" * 16
_HOT: Final = (411, 413, 415, 429, 507)
_GROUP_CHANGE: Final = (404, 409, 507)
_KEEPER: Final = {"name": "archive", "store_id": _ID, "kept_offset": 0, "kept_actions_offset": 0}

HOT_ROUTES: Final[tuple[Route[HotHandler], ...]] = (
    Route(
        "POST", "/v1/send", HotRoutes.send,
        summary="Store messages: all of them or none.",
        roles=_PRODUCERS, about=About.IN_BODY,
        body=JsonSend, answer=SendAnswer, statuses=(409, *_HOT), has_frames=True,
        example={"messages": [{"subject": "orders", "body": {"seat": "14C"}, "key": "14C"}]},
    ),
    Route(
        "POST", "/v1/pull", HotRoutes.pull,
        summary="Get messages for a group; may also settle earlier ones.",
        roles=_CONSUMERS, about=About.IN_BODY,
        body=PullRequest, answer=JsonDeliveries, statuses=(404, 409, *_HOT), has_frames=True,
        example={**_ORDERS, "consumer": "one", "max_messages": 10},
    ),
    Route(
        "POST", "/v1/settle", HotRoutes.settle,
        summary="Ack, nack, reject or extend delivered messages.",
        roles=_CONSUMERS, about=About.IN_BODY,
        body=SettleRequest, answer=SettleAnswer, statuses=(404, *_HOT), has_frames=True,
        example={**_ORDERS, "consumer": "one", "settlements": [{"token": 1, "acks": [[0, 10]]}]},
    ),
)  # fmt: skip

ADMIN_ROUTES: Final[tuple[Route[Callable[[Handlers], Handler]], ...]] = (
    Route(
        "GET", "/healthz", lambda to: to.admin.health,
        summary="Whether the process is alive.",
        about=About.NOTHING, is_open=True, answer={"status": str},
    ),
    Route(
        "GET", "/readyz", lambda to: to.admin.ready,
        summary="Whether the broker serves: 200 or 503.",
        about=About.NOTHING, is_open=True,
        answer={"status": Serving, "reason": str, "takes_messages": bool},
    ),
    Route(
        "GET", "/openapi.json", lambda to: to.openapi.show,
        summary="This document.",
        about=About.NOTHING, answer={"openapi": str, "paths": dict[str, Any]},
    ),
    Route(
        "GET", "/metrics", lambda to: to.metrics.scrape,
        summary="Metrics in Prometheus' text format.",
        roles=_READERS, about=About.ALL, answer={}, statuses=(429, 501), media_type="text/plain",
    ),
    Route(
        "GET", "/v1/caller", lambda to: to.admin.caller,
        summary="The caller's name and roles.",
        about=About.NOTHING, answer={"name": str, "roles": list[str]},
    ),
    Route(
        "GET", "/v1/subjects", lambda to: to.admin.subjects,
        summary="List subjects and their sequences.",
        roles=_READERS, about=About.LISTED, answer={"subjects": list[SubjectStatus]},
    ),
    Route(
        "POST", "/v1/subjects/remove", lambda to: to.admin.remove_subject,
        summary="Remove a subject that has no messages, no delayed messages and no groups.",
        about=About.IN_BODY, body=SubjectRequest, example={"subject": "orders"},
        answer=SubjectStatus, statuses=(404, 409, 429, 507),
    ),
    Route(
        "GET", "/v1/room", lambda to: to.admin.room,
        summary="Show the use of each limit on what callers can create, by token.",
        roles=_READERS, about=About.ALL, answer=RoomStatus,
    ),
    Route(
        "GET", "/v1/groups", lambda to: to.admin.groups,
        summary="List groups with their positions and settings.",
        roles=_READERS, about=About.LISTED,
        query=(_SUBJECT, _GROUP), answer={"groups": list[GroupStatus]},
    ),
    Route(
        "POST", "/v1/groups/pause", lambda to: to.groups.pause,
        summary="Pause a group.",
        about=About.IN_BODY, body=GroupRequest, example=_ORDERS,
        answer=GroupStatus, statuses=_GROUP_CHANGE,
    ),
    Route(
        "POST", "/v1/groups/resume", lambda to: to.groups.resume,
        summary="Resume a paused group.",
        about=About.IN_BODY, body=GroupRequest, example=_ORDERS,
        answer=GroupStatus, statuses=_GROUP_CHANGE,
    ),
    Route(
        "POST", "/v1/groups/seek", lambda to: to.groups.seek,
        summary="Move a group to another position.",
        about=About.IN_BODY, body=SeekRequest, example={**_ORDERS, "to": "earliest"},
        answer=GroupStatus, statuses=_GROUP_CHANGE,
    ),
    Route(
        "POST", "/v1/groups/configure", lambda to: to.groups.configure,
        summary="Change a group's settings.",
        about=About.IN_BODY, body=ConfigureRequest, example={**_ORDERS, "max_attempts": 5},
        answer=GroupStatus, statuses=_GROUP_CHANGE,
    ),
    Route(
        "POST", "/v1/groups/remove", lambda to: to.groups.remove,
        summary="Remove a group, its position and its dead letters.",
        about=About.IN_BODY, body=GroupRequest, example=_ORDERS,
        answer=GroupStatus, statuses=_GROUP_CHANGE,
    ),
    Route(
        "GET", "/v1/dead", lambda to: to.admin.dead,
        summary="List dead letters of one group.",
        roles=_CONSUMERS,
        query=(
            replace(_SUBJECT, is_required=True),
            replace(_GROUP, is_required=True),
            _FIRST,
            _query("count", "Limit.", _number_to(LISTED_MAX), "100"),
            _query("messages", "1 to include the messages.", _number_to(1), "1"),
        ),
        answer={"dead": list[JsonDead]}, statuses=(404,),
    ),
    Route(
        "POST", "/v1/dead/replay", lambda to: to.groups.replay,
        summary="Deliver dead letters to their group again.",
        about=About.IN_BODY, body=DeadRequest, example=_ORDERS,
        answer=DeadAnswer, statuses=(404, 507),
    ),
    Route(
        "POST", "/v1/dead/purge", lambda to: to.groups.purge,
        summary="Delete dead letters.",
        about=About.IN_BODY, body=DeadRequest, example=_ORDERS,
        answer=DeadAnswer, statuses=(404, 507),
    ),
    Route(
        "GET", "/v1/messages", lambda to: to.admin.messages,
        summary="Find messages by id, by subject, key and time, or by subject and sequence.",
        roles=_CONSUMERS, about=About.LISTED,
        query=(
            _query("id", "The message with this id.", {"type": "string", **MESSAGE_ID_FORM}, _ID),
            _SUBJECT,
            _query("key", "With this key.", {"type": "string", "maxLength": KEY_BYTES_MAX}, "14C"),
            _query("from", "Stored at this time or later, ms since 1970.", _ANY_NUMBER, "0"),
            _query("to", "Stored before this time.", _ANY_NUMBER, "1790000000000"),
            _FIRST,
            _query("count", "Limit.", _number_to(FOUND_MAX), "100"),
        ),
        answer=JsonSearch, statuses=(404, 429),
    ),
    Route(
        "GET", "/v1/messages/{message_id}/trace", lambda to: to.admin.trace,
        summary="The history of one message.",
        roles=_CONSUMERS, about=About.LISTED, answer=JsonTrace, statuses=(404, 429),
    ),
    Route(
        "GET", "/v1/files", lambda to: to.files.names,
        summary="List the log files.",
        roles=_CONSUMERS, about=About.ALL,
        query=(
            _query(
                "directory", "The folder to list; empty for the data directory itself.",
                _one_of(layout.COMMIT_LOG, layout.ACTION_LOG, layout.STATE, layout.ROOT),
                layout.COMMIT_LOG,
            ),
        ),
        answer={"names": list[str]}, statuses=(429,),
    ),
    Route(
        "GET", "/v1/files/read", lambda to: to.files.read,
        summary="Read bytes of a log file, up to its durable end.",
        roles=_CONSUMERS, about=About.ALL,
        query=(
            _query(
                "path", "Folder and name as listed.", {"type": "string"}, layout.FORMAT,
                is_required=True,
            ),
            _query(
                "first", "First byte.", _number_to(NUMBER_MAX - READ_BYTES_MAX), "0",
                is_required=True,
            ),
            _query(
                "count", "Limit in bytes.", _number_to(READ_BYTES_MAX), "4096", is_required=True
            ),
        ),
        answer={}, statuses=(404, 429), media_type="application/octet-stream",
    ),
    Route(
        "GET", "/v1/delayed", lambda to: to.delayed.listed,
        summary="List delayed messages, the next due first.",
        roles=_READERS,
        query=(_SUBJECT, *_DUE, _query("count", "Limit; 1,000 at most.", _ANY_NUMBER, "100")),
        answer={"delayed": list[DelayedStatus], "has_more": bool}, statuses=(429,),
    ),
    Route(
        "GET", "/v1/delayed/status", lambda to: to.delayed.status,
        summary="The number of delayed messages, the lateness of releases, and faults.",
        roles=_READERS, about=About.ALL, answer=DelayStatus,
    ),
    Route(
        "GET", "/v1/delayed/histogram", lambda to: to.delayed.histogram,
        summary="Count delayed messages by due time.",
        roles=_READERS,
        query=(_SUBJECT, *_DUE, _query("span", "Time span of a row.", _one_of(*SPANS_MS), "hour")),
        answer={"span": str, "span_ms": int, "rows": list[HistogramRow]}, statuses=(429,),
    ),
    Route(
        "POST", "/v1/delayed/retry", lambda to: to.delayed.retry,
        summary="Try again to read delayed messages that could not be read.",
        about=About.ALL, answer={"buckets": list[int]},
    ),
    Route(
        "POST", "/v1/delayed/accept-clock", lambda to: to.delayed.accept_clock,
        summary="Accept that the clock was changed, and release delayed messages by it.",
        about=About.ALL, answer={"clock": str, "clock_held": int},
    ),
    Route(
        "POST", "/v1/delayed/cancel", lambda to: to.delayed.cancel,
        summary="Cancel delayed messages.",
        roles=_PRODUCERS, about=About.IN_BODY,
        body=CancelRequest, example={"message_ids": [_ID], "subject": "orders"},
        answer=CancelAnswer, statuses=(429, 507),
    ),
    Route(
        "POST", "/v1/delayed/reschedule", lambda to: to.delayed.reschedule,
        summary="Change the due time of a message.",
        roles=_PRODUCERS, about=About.IN_BODY,
        body=RescheduleRequest, example={"message_id": _ID, "deliver_at_ms": 1_790_000_000_000},
        answer=RescheduleAnswer, statuses=(404, 429, 507),
    ),
    # After the other routes, because it would take the last word of their paths for an id
    Route(
        "GET", "/v1/delayed/{message_id}", lambda to: to.delayed.show,
        summary="One delayed message.",
        roles=_CONSUMERS, about=About.LISTED, answer=JsonDelayed, statuses=(404, 429),
    ),
    Route(
        "GET", "/v1/keepers", lambda to: to.keepers.listed,
        summary="List keepers: archives that retention waits for, and their progress.",
        roles=_READERS, about=About.ALL, answer={"keepers": list[KeeperStatus]},
    ),
    # For consumers, who may read the whole log and could hold it back by a group too
    Route(
        "POST", "/v1/keepers/keep", lambda to: to.keepers.keep,
        summary="Register a keeper or report its progress; retention waits for the rest.",
        roles=_CONSUMERS, about=About.ALL, body=KeepRequest, example=_KEEPER,
        answer=KeeperStatus, statuses=(507,),
    ),
    Route(
        "POST", "/v1/keepers/remove", lambda to: to.keepers.remove,
        summary="Stop waiting for a keeper.",
        about=About.ALL, body=KeeperRequest, example={"name": "archive"},
        answer=KeeperStatus, statuses=(404, 507),
    ),
    Route(
        "POST", "/v1/state", lambda to: to.admin.change_state,
        summary="Accept messages, refuse them, or stop in an orderly way.",
        about=About.ALL, body=StateChange, example={"state": "read-only", "reason": "backup"},
        answer={"status": Serving, "reason": str},
    ),
)  # fmt: skip

ROUTES: Final[tuple[Route[Any], ...]] = (*HOT_ROUTES, *ADMIN_ROUTES)
