"""The routes that change groups and their dead letters.

They answer once the change is durable: it survives a power cut.
"""

from __future__ import annotations

import asyncio
from typing import Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from qmq_broker.errors import BusyError, no_group
from qmq_broker.face.routes.bodies import read_body
from qmq_broker.face.routes.route import check_subject
from qmq_broker.service.broker import Broker
from qmq_broker.service.query import GroupStatus
from qmq_client.wire.groups import check_group
from qmq_client.wire.names import check_name
from qmq_client.wire.operations import (
    ConfigureRequest,
    DeadAnswer,
    DeadRequest,
    GroupRequest,
    SeekRequest,
)
from qmq_client.wire.requests import JSON_CONTENT_TYPE
from qmq_client.wire.start import parse_start

#: Dead letters replayed or purged in one iteration of the loop: some ten milliseconds.
_DEAD_PER_STEP: Final = 1_000

_R = TypeVar("_R", GroupRequest, SeekRequest, ConfigureRequest, DeadRequest)


class GroupRoutes:
    """Handlers of changes of groups and dead letters."""

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
        """Move the group to another position."""
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
        changes, answer = self._broker.changes, DeadAnswer(count=0)
        for _ in range(self._slices):
            try:
                some, next_first = changes.replay_some(wanted, self._now_ms, self._per_step)
            except BusyError:
                if not answer.count:
                    raise
                answer = msgspec.structs.replace(answer, has_more=True)
                break
            count, gone = answer.count + some.count, answer.gone + some.gone
            answer = DeadAnswer(count=count, gone=gone, has_more=some.has_more)
            if next_first is None:
                break
            wanted = msgspec.structs.replace(wanted, first=next_first)
            await asyncio.sleep(0)
        return await self._answer(answer)

    async def purge(self, request: Request) -> Response:
        """Forget dead letters."""
        wanted = await self._read(request, DeadRequest)
        changes, answer = self._broker.changes, DeadAnswer(count=0)
        for _ in range(self._slices):
            some = changes.purge_some(wanted, self._now_ms, self._per_step)
            answer = DeadAnswer(count=answer.count + some.count, has_more=some.has_more)
            if not some.has_more:
                break
            await asyncio.sleep(0)
        return await self._answer(answer)

    @property
    def _slices(self) -> int:
        """Process one request about dead letters in slices, one per iteration of the loop."""
        return -(-self._broker.settings.limits.dead_letters_per_request // self._per_step)

    @property
    def _per_step(self) -> int:
        return min(_DEAD_PER_STEP, self._broker.settings.limits.dead_letters_per_request)

    async def _set_paused(self, request: Request, *, is_paused: bool) -> Response:
        wanted = await self._read(request, GroupRequest)
        subject, group = wanted.subject, wanted.group
        self._broker.changes.pause(subject, group, self._now_ms, is_paused=is_paused)
        return await self._status(subject, group)

    async def _read(self, request: Request, kind: type[_R]) -> _R:
        wanted = await read_body(request, kind)
        check_name(wanted.subject, field="subject")
        check_subject(request.scope, wanted.subject)
        check_group(wanted.group)
        self._broker.serving.check_delivers()
        return wanted

    def _find(self, subject: str, group: str) -> GroupStatus:
        found = self._broker.query.groups(subject=subject, group=group, now_ms=self._now_ms)
        if not found:
            raise no_group(group, subject)
        return found[0]

    async def _status(self, subject: str, group: str) -> Response:
        return await self._answer(self._find(subject, group))

    async def _answer(self, value: msgspec.Struct) -> Response:
        content = msgspec.json.encode(value)
        await asyncio.to_thread(self._broker.sync_actions)
        return Response(content, media_type=JSON_CONTENT_TYPE)
