"""The routes that change groups and their dead letters.

They answer once the change is durable: what an operator was told survives a power cut.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from qmq_broker.errors import NotFoundError
from qmq_broker.face.callers.access import Role
from qmq_broker.face.callers.door import caller_of
from qmq_broker.face.routes.bodies import read_body
from qmq_broker.service.broker import Broker
from qmq_broker.service.query import GroupStatus
from qmq_client.wire.groups import check_group
from qmq_client.wire.names import check_name
from qmq_client.wire.operations import (
    ConfigureRequest,
    DeadRequest,
    GroupRequest,
    SeekRequest,
)
from qmq_client.wire.requests import JSON_CONTENT_TYPE
from qmq_client.wire.start import parse_start

_R = TypeVar("_R", GroupRequest, SeekRequest, ConfigureRequest, DeadRequest)


def group_routes(broker: Broker) -> list[Route]:
    """The routes, for the application of `admin.py`."""
    changes = _GroupRoutes(broker)
    posts = {
        "/v1/groups/pause": changes.pause,
        "/v1/groups/resume": changes.resume,
        "/v1/groups/seek": changes.seek,
        "/v1/groups/configure": changes.configure,
        "/v1/groups/remove": changes.remove,
        "/v1/dead/replay": changes.replay,
        "/v1/dead/purge": changes.purge,
    }
    return [Route(path, route, methods=["POST"]) for path, route in posts.items()]


class _GroupRoutes:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @property
    def _now_ms(self) -> int:
        return self._broker.time.now_ms()

    async def pause(self, request: Request) -> Response:
        """Deliver nothing to the group until it is resumed."""
        return await self._set_paused(request, is_paused=True)

    async def resume(self, request: Request) -> Response:
        """Deliver to the group again."""
        return await self._set_paused(request, is_paused=False)

    async def seek(self, request: Request) -> Response:
        """Move the group to another place."""
        wanted = await self._read(request, SeekRequest)
        start = parse_start(wanted.to, field="to")
        self._broker.changes.seek(wanted.subject, wanted.group, start, self._now_ms)
        return await self._status(wanted.subject, wanted.group)

    async def configure(self, request: Request) -> Response:
        """Change the group's settings."""
        wanted = await self._read(request, ConfigureRequest)
        self._broker.changes.configure(wanted, self._now_ms)
        return await self._status(wanted.subject, wanted.group)

    async def remove(self, request: Request) -> Response:
        """Forget the group."""
        wanted = await self._read(request, GroupRequest)
        last = self._find(wanted.subject, wanted.group)
        self._broker.changes.remove(wanted.subject, wanted.group, self._now_ms)
        return await self._answer(last)

    async def replay(self, request: Request) -> Response:
        """Deliver dead letters again."""
        wanted = await self._read(request, DeadRequest)
        return await self._answer(self._broker.changes.replay(wanted, self._now_ms))

    async def purge(self, request: Request) -> Response:
        """Forget dead letters."""
        wanted = await self._read(request, DeadRequest)
        return await self._answer(self._broker.changes.purge(wanted, self._now_ms))

    async def _set_paused(self, request: Request, *, is_paused: bool) -> Response:
        wanted = await self._read(request, GroupRequest)
        subject, group = wanted.subject, wanted.group
        self._broker.changes.pause(subject, group, self._now_ms, is_paused=is_paused)
        return await self._status(subject, group)

    async def _read(self, request: Request, kind: type[_R]) -> _R:
        wanted = await read_body(request, kind)
        check_name(wanted.subject, field="subject")
        caller_of(request.scope).check(Role.ADMIN, wanted.subject)
        check_group(wanted.group)
        self._broker.serving.check_delivers()
        return wanted

    def _find(self, subject: str, group: str) -> GroupStatus:
        found = self._broker.query.groups(subject=subject, group=group, now_ms=self._now_ms)
        if not found:
            raise NotFoundError(f"there is no group {group} on subject {subject}")
        return found[0]

    async def _status(self, subject: str, group: str) -> Response:
        return await self._answer(self._find(subject, group))

    async def _answer(self, value: msgspec.Struct) -> Response:
        content = msgspec.json.encode(value)
        await asyncio.to_thread(self._broker.sync_actions)
        return Response(content, media_type=JSON_CONTENT_TYPE)
