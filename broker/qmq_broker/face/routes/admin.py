"""The routes that people and tools use: health, subjects, groups, dead letters, reading messages.

Starlette, JSON only. No data is changed here (see `groups.py`); `POST /v1/state` changes what is
served.

The route that removes a subject, and the one that tells how much room is used.

A removal is answered once it is durable: what an operator was told survives a power cut.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from qmq_broker.face.answers import (
    INTERNAL,
    error_answer,
    error_code,
    error_headers,
    error_status,
    refuse,
)
from qmq_broker.face.callers.access import Role
from qmq_broker.face.callers.door import caller_of
from qmq_broker.face.exchanges.exchange import make_known
from qmq_broker.face.routes.bodies import read_body
from qmq_broker.face.routes.delayed import delayed_routes
from qmq_broker.face.routes.find import Finder
from qmq_broker.face.routes.groups import group_routes
from qmq_broker.face.routes.json_messages import dead_to_json, record_to_json
from qmq_broker.face.routes.keepers import keeper_routes
from qmq_broker.face.routes.openapi import document
from qmq_broker.face.routes.queries import NUMBER_MAX, number
from qmq_broker.face.routes.ranges import range_routes
from qmq_broker.face.routes.rules import HOT_ROUTES, guard, route_name, sight
from qmq_broker.face.routes.scrape import metric_routes
from qmq_broker.service.broker import Broker
from qmq_broker.service.query import LISTED_MAX, GroupStatus, SubjectStatus
from qmq_broker.service.serving import Serving
from qmq_broker.storage.index.key_search import FOUND_MAX, TimeRange
from qmq_client.wire.errors import InvalidMessageError, QmqError
from qmq_client.wire.groups import check_group
from qmq_client.wire.limits import KEY_BYTES_MAX
from qmq_client.wire.names import check_name
from qmq_client.wire.operations import StateChange, SubjectRequest
from qmq_client.wire.requests import JSON_CONTENT_TYPE, UNKNOWN_ROUTES
from qmq_client.wire.shown import shorten


def subject_routes(broker: Broker) -> list[Route]:
    """The routes, for the application of `admin.py`."""
    subjects = _Subjects(broker)
    return [
        Route("/v1/subjects/remove", subjects.remove, methods=["POST"]),
        Route("/v1/room", subjects.room),
    ]


class _Subjects:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def remove(self, request: Request) -> Response:
        """Forget a subject that is empty."""
        wanted = await read_body(request, SubjectRequest)
        check_name(wanted.subject, field="subject")
        caller_of(request.scope).check(Role.ADMIN, wanted.subject)
        self._broker.serving.check_delivers()
        done: asyncio.Future[SubjectStatus] = asyncio.get_running_loop().create_future()
        now_ms = self._broker.time.now_ms()
        self._broker.subject_removal.remove(wanted.subject, now_ms, partial(make_known, done))
        last = await done
        await asyncio.to_thread(self._broker.sync_actions)
        return Response(msgspec.json.encode(last), media_type=JSON_CONTENT_TYPE)

    async def room(self, _: Request) -> Response:
        """How much of each bound is used, and by which token."""
        return Response(
            msgspec.json.encode(self._broker.room.status()), media_type=JSON_CONTENT_TYPE
        )


_PEEKED: Final = 20
_FOUND: Final = 100
#: Groups of a list that are looked at in one turn of the loop: some ten milliseconds.
_GROUPS_PER_TURN: Final = 200


def admin_app(broker: Broker) -> Starlette:
    """An ASGI application over one broker."""
    admin = _Admin(broker)
    application = Starlette(
        debug=False,
        routes=[
            Route("/healthz", admin.health),
            Route("/readyz", admin.ready),
            Route("/openapi.json", admin.openapi),
            Route("/v1/caller", admin.caller),
            Route("/v1/subjects", admin.subjects),
            Route("/v1/groups", admin.groups),
            Route("/v1/dead", admin.dead),
            Route("/v1/messages", admin.messages),
            Route("/v1/messages/{message_id}/trace", admin.trace),
            Route("/v1/state", admin.change_state, methods=["POST"]),
            *group_routes(broker),
            *subject_routes(broker),
            *delayed_routes(broker),
            *keeper_routes(broker),
            *range_routes(broker),
            *metric_routes(broker),
        ],
        exception_handlers={QmqError: admin.refused, HTTPException: _on_http},
    )
    # Answered in our words instead of the framework's; it is raised on, and `app.py` logs it.
    application.add_exception_handler(Exception, _on_unforeseen)
    guard(application)
    return application


class _Admin:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._finder = Finder(broker)
        #: The OpenAPI document, once somebody has asked for it.
        self._document: bytes | None = None

    async def refused(self, _: Request, error: Exception) -> Response:
        """The answer to a refused request."""
        assert isinstance(error, QmqError)
        self._broker.measures.refused[error_code(error)] += 1
        headers = {name.decode(): value.decode() for name, value in error_headers(error)}
        return _json(error_answer(error), status=error_status(error), headers=headers)

    async def health(self, _: Request) -> Response:
        """The process is alive; says nothing else."""
        return _json({"status": "alive"})

    async def ready(self, request: Request) -> Response:
        """Whether requests are served, and if not, why."""
        serving = self._broker.serving
        is_ready = serving.state in (Serving.SERVING, Serving.READ_ONLY)
        has_room = is_ready and self._broker.intake.has_room()
        return _json(
            {
                "status": serving.state,
                # Callers without a token get no details: they may say what is wrong with the disk.
                "reason": serving.reason if caller_of(request.scope).rights else "",
                "takes_messages": has_room and serving.state is Serving.SERVING,
            },
            status=200 if is_ready else 503,
        )

    async def change_state(self, request: Request) -> Response:
        """Accept messages, refuse them, or shut down in order."""
        wanted = await read_body(request, StateChange)
        reason = wanted.reason or "asked for by an operator"
        if wanted.state == "draining":
            self._broker.ask_to_stop(reason)
        else:
            self._broker.set_read_only(wanted.state == "read-only", reason)
        serving = self._broker.serving
        return _json({"status": serving.state, "reason": serving.reason})

    async def openapi(self, request: Request) -> Response:
        """All routes, for programs."""
        if self._document is None:
            routes = [route for route in request.app.routes if isinstance(route, Route)]
            self._document = document([*HOT_ROUTES, *map(route_name, routes)])
        return Response(self._document, media_type=JSON_CONTENT_TYPE)

    async def caller(self, request: Request) -> Response:
        """Who is calling, as far as the broker knows, and what they may do."""
        caller = caller_of(request.scope)
        return _json({"name": caller.name, "roles": [str(right) for right in caller.rights]})

    async def subjects(self, request: Request) -> Response:
        sees = sight(request)
        subjects = await asyncio.to_thread(self._broker.query.subjects)
        listed = [one for one in subjects if sees(one.subject)]
        return await _long_json({"subjects": listed})

    async def groups(self, request: Request) -> Response:
        subject = _optional_name(request, "subject")
        group = _group(request) if "group" in request.query_params else None
        now_ms = self._broker.time.now_ms()
        sees = sight(request)
        if subject or group:
            found = self._broker.query.groups(subject=subject, group=group, now_ms=now_ms)
            return await _long_json({"groups": [one for one in found if sees(one.subject)]})
        listed: list[GroupStatus] = []
        for count, one in enumerate(self._broker.query.all_groups(now_ms), start=1):
            if sees(one.subject):
                listed.append(one)
            if count % _GROUPS_PER_TURN == 0:
                await asyncio.sleep(0)
        return await _long_json({"groups": listed})

    async def dead(self, request: Request) -> Response:
        """Dead letters of one group, with their messages on request."""
        subject = _name(request, "subject")
        letters = self._broker.query.dead_letters(
            subject,
            _group(request),
            first_sequence=number(request, "first", default=0),
            count=number(request, "count", default=LISTED_MAX, highest=LISTED_MAX),
            with_records=number(request, "messages", default=0, highest=1) == 1,
        )
        return _json({"dead": [dead_to_json(letter) for letter in letters]})

    async def trace(self, request: Request) -> Response:
        """The life of one message."""
        sees = sight(request, Role.CONSUMER)
        return _json(await self._finder.trace(request.path_params["message_id"], sees))

    async def messages(self, request: Request) -> Response:
        """Messages by id, by key and time, or by sequence."""
        if "id" in request.query_params:
            count = number(request, "count", default=_FOUND, highest=FOUND_MAX)
            sees = sight(request, Role.CONSUMER)
            return _json(await self._finder.by_id(request.query_params["id"], count, sees))
        subject = _name(request, "subject")
        if "key" in request.query_params:
            times = TimeRange(
                number(request, "from", default=TimeRange().first_ms),
                number(request, "to", default=NUMBER_MAX),
            )
            count = number(request, "count", default=_FOUND, highest=FOUND_MAX)
            return _json(await self._finder.by_key(subject, _key(request), times, count))
        peeked = self._broker.query.records(
            subject,
            first_sequence=number(request, "first", default=0),
            count=number(request, "count", default=_PEEKED, highest=LISTED_MAX),
        )
        return _json(
            {
                "subject": subject,
                "next_sequence": peeked.next_sequence,
                "messages": [
                    record_to_json(subject, data, number) for number, data in peeked.records
                ],
            }
        )


def _name(request: Request, field: str) -> str:
    return check_name(request.query_params.get(field, ""), field=field)


def _key(request: Request) -> str:
    key = request.query_params["key"]
    if 0 < len(key.encode()) <= KEY_BYTES_MAX:
        return key
    raise InvalidMessageError(
        field="key",
        limit=f"1 to {KEY_BYTES_MAX} bytes of UTF-8",
        value=shorten(key),
        remedy="Give the key of a message.",
    )


def _group(request: Request) -> str:
    return check_group(request.query_params.get("group", ""))


def _optional_name(request: Request, field: str) -> str | None:
    return _name(request, field) if field in request.query_params else None


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: "there is nothing at this path", 405: "this method is not for this path"}
    refused = refuse(
        error.status_code,
        UNKNOWN_ROUTES.get(error.status_code, "request"),
        what.get(error.status_code, "the request was refused"),
        remedy="GET /openapi.json lists what there is.",
    )
    return _json(refused.answer, status=refused.status, headers=dict(error.headers or {}))


async def _on_unforeseen(_: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        raise error  # there is nobody to answer
    return _json(INTERNAL, status=500)


async def _long_json(value: object) -> Response:
    """The same of what may be long: made beside the loop."""
    content = await asyncio.to_thread(msgspec.json.encode, value)
    return Response(content, media_type=JSON_CONTENT_TYPE)


def _json(value: object, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(
        msgspec.json.encode(value),
        status_code=status,
        headers=headers,
        media_type=JSON_CONTENT_TYPE,
    )
