"""Handlers of the routes that people and tools use: health, state, subjects, reading groups, dead letters, messages.

JSON only. Groups are changed in `groups.py`. The removal of a subject is answered once it is
durable, so it survives a power cut.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from qmq_broker.face.authentication.authenticator import caller_of
from qmq_broker.face.http.request_response import make_known
from qmq_broker.face.routes.bodies import read_body
from qmq_broker.face.routes.find import Finder
from qmq_broker.face.routes.json_messages import dead_to_json, record_to_json
from qmq_broker.face.routes.queries import number
from qmq_broker.face.routes.route import NUMBER_MAX, check_subject, sight
from qmq_broker.service.broker import Broker
from qmq_broker.service.query import (
    LISTED_BYTES_MAX,
    LISTED_MAX,
    DeadLetterStatus,
    GroupStatus,
    SubjectStatus,
)
from qmq_broker.service.serving import Serving
from qmq_broker.storage.index.key_search import TimeRange
from qmq_client.wire.errors import InvalidMessageError
from qmq_client.wire.groups import check_group
from qmq_client.wire.limits import KEY_BYTES_MAX
from qmq_client.wire.names import check_name
from qmq_client.wire.operations import StateChange, SubjectRequest
from qmq_client.wire.requests import JSON_CONTENT_TYPE
from qmq_client.wire.shown import shorten

#: Messages that are listed by sequence, and found by id or key, unless the request gives a `count`.
_PEEKED: Final = 20
_FOUND: Final = 100
#: Groups that one iteration of the loop reads: some ten milliseconds.
_GROUPS_PER_STEP: Final = 200
#: Dead letters that one iteration of the loop reads, perhaps from the disk.
_DEAD_PER_STEP: Final = 200


class Admin:
    """Handlers of these routes, for one broker. Belongs to the loop thread."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._finder = Finder(broker)

    async def health(self, _: Request) -> Response:
        """Whether the process is alive; checks nothing else."""
        return _json({"status": "alive"})

    async def ready(self, request: Request) -> Response:
        """Whether requests are served, and if not, why."""
        serving = self._broker.serving
        is_ready = serving.state in (Serving.SERVING, Serving.READ_ONLY)
        has_room = is_ready and self._broker.intake.has_room()
        return _json(
            {
                "status": serving.state,
                # Callers without a token get no reason: it may describe a fault of the disk.
                "reason": serving.reason if caller_of(request.scope).rights else "",
                "takes_messages": has_room and serving.state is Serving.SERVING,
            },
            status=200 if is_ready else 503,
        )

    async def change_state(self, request: Request) -> Response:
        """Accept messages, refuse them, or stop in an orderly way."""
        wanted = await read_body(request, StateChange)
        reason = wanted.reason or "requested by an operator"
        if wanted.state == "draining":
            self._broker.ask_to_stop(reason)
        else:
            self._broker.set_read_only(wanted.state == "read-only", reason)
        serving = self._broker.serving
        return _json({"status": serving.state, "reason": serving.reason})

    async def caller(self, request: Request) -> Response:
        """The caller's name and roles, as far as the broker knows them."""
        caller = caller_of(request.scope)
        return _json({"name": caller.name, "roles": [str(right) for right in caller.rights]})

    async def subjects(self, request: Request) -> Response:
        """The subjects that the caller may see."""
        sees = sight(request.scope)
        subjects = await asyncio.to_thread(self._broker.query.subjects)
        listed = [one for one in subjects if sees(one.subject)]
        return await _long_json({"subjects": listed})

    async def remove_subject(self, request: Request) -> Response:
        """Remove an empty subject; durable when it is answered."""
        wanted = await read_body(request, SubjectRequest)
        check_name(wanted.subject, field="subject")
        check_subject(request.scope, wanted.subject)
        self._broker.serving.check_delivers()
        done: asyncio.Future[SubjectStatus] = asyncio.get_running_loop().create_future()
        now_ms = self._broker.time.now_ms()
        self._broker.subject_removal.remove(wanted.subject, now_ms, partial(make_known, done))
        last = await done
        await asyncio.to_thread(self._broker.sync_actions)
        return _json(last)

    async def room(self, _: Request) -> Response:
        """The use of each limit, by token."""
        return _json(self._broker.room.status())

    async def groups(self, request: Request) -> Response:
        """The groups that the caller may see, on request only those of a subject or a name."""
        subject = _optional_name(request, "subject")
        group = _group(request) if "group" in request.query_params else None
        now_ms = self._broker.time.now_ms()
        sees = sight(request.scope)
        if subject or group:
            found = self._broker.query.groups(subject=subject, group=group, now_ms=now_ms)
            return await _long_json({"groups": [one for one in found if sees(one.subject)]})
        listed: list[GroupStatus] = []
        for count, one in enumerate(self._broker.query.all_groups(now_ms), start=1):
            if sees(one.subject):
                listed.append(one)
            if count % _GROUPS_PER_STEP == 0:
                await asyncio.sleep(0)
        return await _long_json({"groups": listed})

    async def dead(self, request: Request) -> Response:
        """Dead letters of one group, with their messages on request."""
        subject = _name(request, "subject")
        group, first = _group(request), number(request, "first", default=0)
        count = min(LISTED_MAX, number(request, "count", default=LISTED_MAX))
        with_records = number(request, "messages", default=0) == 1
        listed: list[DeadLetterStatus] = []
        room_bytes = LISTED_BYTES_MAX
        while True:
            some = self._broker.query.dead_letters(
                subject,
                group,
                first_sequence=first,
                count=min(_DEAD_PER_STEP, count - len(listed)),
                records_bytes=room_bytes if with_records else 0,
            )
            listed += some
            if len(some) < _DEAD_PER_STEP or len(listed) == count:
                return _json({"dead": [dead_to_json(letter) for letter in listed]})
            room_bytes -= sum(len(one.record) for one in some if one.record is not None)
            first = some[-1].sequence + 1
            await asyncio.sleep(0)

    async def trace(self, request: Request) -> Response:
        """The history of one message."""
        sees = sight(request.scope)
        return _json(await self._finder.trace(request.path_params["message_id"], sees))

    async def messages(self, request: Request) -> Response:
        """Messages by id, by key and time, or by sequence."""
        if "id" in request.query_params:
            count = number(request, "count", default=_FOUND)
            sees = sight(request.scope)
            return _json(await self._finder.by_id(request.query_params["id"], count, sees))
        subject = _name(request, "subject")
        if "key" in request.query_params:
            times = TimeRange(
                number(request, "from", default=TimeRange().first_ms),
                number(request, "to", default=NUMBER_MAX),
            )
            count = number(request, "count", default=_FOUND)
            return _json(await self._finder.by_key(subject, _key(request), times, count))
        peeked = self._broker.query.records(
            subject,
            first_sequence=number(request, "first", default=0),
            count=number(request, "count", default=_PEEKED),
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


async def _long_json(value: object) -> Response:
    """`_json` for content that may be long: it is encoded outside the loop."""
    content = await asyncio.to_thread(msgspec.json.encode, value)
    return Response(content, media_type=JSON_CONTENT_TYPE)


def _json(value: object, *, status: int = 200) -> Response:
    content = msgspec.json.encode(value)
    return Response(content, status_code=status, media_type=JSON_CONTENT_TYPE)
