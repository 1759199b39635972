"""HTTP routes that list, update and remove keepers: archives that retention waits for.

A change is answered once it is durable, so it survives a power cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from qmq_broker.face.http.request_response import make_known
from qmq_broker.face.routes.bodies import read_body
from qmq_broker.service.broker import Broker
from qmq_broker.service.keeping import KeeperStatus, OnKept
from qmq_broker.storage.files.keepers import Keeper
from qmq_broker.storage.keepers import LogOffsets
from qmq_client.wire.errors import InvalidMessageError
from qmq_client.wire.names import check_name
from qmq_client.wire.operations import KeeperRequest, KeepRequest
from qmq_client.wire.requests import JSON_CONTENT_TYPE
from qmq_client.wire.shown import shorten


class KeeperRoutes:
    """Handlers of the routes of keepers."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def listed(self, _: Request) -> Response:
        """All keepers, in order of their names."""
        now_ms = self._broker.time.now_ms()
        return _json({"keepers": self._broker.keeping.statuses(now_ms)})

    async def keep(self, request: Request) -> Response:
        """Record how far a keeper has kept the logs; retention waits for the rest."""
        wanted = await read_body(request, KeepRequest)
        check_name(wanted.name, field="name")
        store_id = self._broker.store_id
        if wanted.store_id != store_id:
            raise InvalidMessageError(
                field="store_id",
                limit=f"{store_id}, which this broker serves",
                value=shorten(wanted.store_id),
                remedy="Report to the broker whose logs are kept.",
            )
        reported = LogOffsets(wanted.kept_offset, wanted.kept_actions_offset)
        now_ms = self._broker.time.now_ms()
        keep = self._broker.keeping.keep
        return await self._changed(lambda on_done: keep(wanted.name, reported, now_ms, on_done))

    async def remove(self, request: Request) -> Response:
        """Remove a keeper: retention no longer waits for it."""
        wanted = await read_body(request, KeeperRequest)
        check_name(wanted.name, field="name")
        end = self._broker.keeping.end
        return await self._changed(lambda on_done: end(wanted.name, on_done))

    async def _changed(self, change: Callable[[OnKept], None]) -> Response:
        self._broker.serving.check_delivers()
        done: asyncio.Future[Keeper] = asyncio.get_running_loop().create_future()
        change(partial(make_known, done))
        keeper = await done
        status = self._broker.keeping.status(keeper, self._broker.time.now_ms())
        return _json(status)


def _json(value: KeeperStatus | dict[str, list[KeeperStatus]]) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON_CONTENT_TYPE)
