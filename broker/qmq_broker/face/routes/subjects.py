"""The route that removes a subject, and the one that tells how much room is used.

A removal is answered once it is durable: what an operator was told survives a power cut.
"""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from qmq_broker.face.callers.access import Role
from qmq_broker.face.callers.door import caller_of
from qmq_broker.face.exchanges.exchange import make_known
from qmq_broker.face.routes.bodies import read_body
from qmq_broker.service.broker import Broker
from qmq_broker.service.query import SubjectStatus
from qmq_client.wire.names import check_name
from qmq_client.wire.operations import SubjectRequest
from qmq_client.wire.requests import JSON_CONTENT_TYPE


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
