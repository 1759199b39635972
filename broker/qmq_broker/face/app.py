"""The broker's HTTP application: finds the route of each request and answers it.

The three hot routes read requests and write answers themselves; the others are a Starlette
application. An unforeseen error is logged with its place in the code and answered with a 500 that
reveals no internals.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute
from starlette.types import Message

from qmq_broker.face.answers import (
    INTERNAL,
    RequestRefusedError,
    error_answer,
    error_code,
    error_headers,
    refuse,
)
from qmq_broker.face.authentication.authenticator import Authenticator
from qmq_broker.face.http.request_response import RequestResponse
from qmq_broker.face.http.requests import (
    BodyRoom,
    ClientGone,
    Encoding,
    encode,
    read_head,
)
from qmq_broker.face.limits import FaceLimits
from qmq_broker.face.logs import FaultLog, Repeats, log_event
from qmq_broker.face.routes.bodies import BODY_BYTES_MAX
from qmq_broker.face.routes.hot import HotRoutes, answer_error
from qmq_broker.face.routes.queries import check_once
from qmq_broker.face.routes.route import ROUTE, Route, authorize
from qmq_broker.face.routes.table import ADMIN_ROUTES, HOT_ROUTES, ROUTES, Handler, Handlers
from qmq_broker.service.broker import Broker
from qmq_client.wire.errors import QmqError
from qmq_client.wire.requests import JSON_CONTENT_TYPE, UNKNOWN_ROUTES, ErrorAnswer

_LOG: Final = logging.getLogger(__name__)
_OPEN: Final = frozenset(route.path for route in ROUTES if route.is_open)
_HOT: Final = {route.path: route for route in HOT_ROUTES}


class App:
    """Serves the requests of one broker."""

    def __init__(
        self,
        broker: Broker,
        limits: FaceLimits,
        *,
        instance: int,
        authenticator: Authenticator | None = None,
    ) -> None:
        """Without an authenticator, every client may do everything."""
        self._authenticator = authenticator or Authenticator(None, broker.time.now_ms)
        self._room = BodyRoom(limits)
        broker.room.bounds_of_face = self._room.bounds
        self._faults = FaultLog()
        self._hot = HotRoutes(
            broker, limits, self._room, self._authenticator, self._faults, instance=instance
        )
        # Waiting pulls check again whether their token is still valid
        self._authenticator.on_changed = broker.delivery.waiting.wake_all
        self._refused = broker.metrics.refused
        self._admin = self._admin_app(Handlers(broker, has_tokens=self._authenticator.has_tokens))
        self._failures = Repeats()

    async def serve(self, request: RequestResponse) -> None:
        """Authenticate the client, let the route answer, and answer errors."""
        scope = request.scope
        try:
            self._authenticator.authenticate(scope, is_open=scope["path"] in _OPEN)
            route = _HOT.get(scope["path"])
            if route is None:
                await self._ask_admin(request)
            else:
                scope[ROUTE] = route
                await self._hot.serve(partial(route.handler, self._hot), request)
        except RequestRefusedError as refusal:
            self._refused[error_code(refusal)] += 1
            await answer_error(request, read_head(scope).answer_encoding(), refusal)
        except ClientGone:
            return
        except Exception as error:  # the top of a request
            times = self._failures.due(type(error).__name__, asyncio.get_running_loop().time())
            if times:
                log_event(
                    _LOG,
                    logging.ERROR,
                    "request_failed",
                    error=error,
                    times=times,
                    method=scope.get("method"),
                    path=scope.get("path"),
                )
            if not request.response_started:
                await request.answer(500, Encoding.JSON, encode(Encoding.JSON, INTERNAL))

    async def _ask_admin(self, request: RequestResponse) -> None:
        """Let Starlette answer, if there is memory for its answer."""
        start: Message = {}
        parts: list[bytes] = []

        async def receive() -> Message:
            body = await request.beginning(BODY_BYTES_MAX + 1)
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            start.update(message)
            parts.append(message.get("body", b""))

        await self._admin(request.scope, receive, send)
        body = b"".join(parts)
        headers = tuple(one for one in start["headers"] if one[0] != b"content-length")
        self._room.check_answer(len(body))
        with self._room.answer(len(body), request.scope):
            await request.respond(start["status"], body, headers)

    def take_dropped(self) -> int:
        """How many clients were dropped since the last call, because others needed the memory of their answers."""
        return self._room.take_dropped()

    def _admin_app(self, handlers: Handlers) -> Starlette:
        """The routes for people and tools."""
        application = Starlette(
            routes=[
                StarletteRoute(
                    route.path, _guarded(route, route.handler(handlers)), methods=[route.method]
                )
                for route in ADMIN_ROUTES
            ],
            exception_handlers={QmqError: self._on_refused, HTTPException: _on_http},
        )
        # A redirect would lead to the host that the request named
        application.router.redirect_slashes = False
        return application

    async def _on_refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, QmqError)
        self._faults.note(request.scope[ROUTE].path, error)
        self._refused[error_code(error)] += 1
        headers = {name.decode(): value.decode() for name, value in error_headers(error)}
        return _error(error.status, error_answer(error), headers)


def _guarded(route: Route[Any], handler: Handler) -> Handler:
    async def ask(request: Request) -> Response:
        request.scope[ROUTE] = route
        check_once(request)
        authorize(request)
        return await handler(request)

    return ask


async def _on_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: "no route has this path", 405: "the route of this path does not allow this method"}
    refused = refuse(
        error.status_code,
        UNKNOWN_ROUTES.get(error.status_code, "request"),
        what.get(error.status_code, "the request was refused"),
        remedy="GET /openapi.json lists the routes and their methods.",
    )
    return _error(refused.status, error_answer(refused), dict(error.headers or {}))


def _error(status: int, answer: ErrorAnswer, headers: dict[str, str]) -> Response:
    content = msgspec.json.encode(answer)
    return Response(content, status, headers=headers, media_type=JSON_CONTENT_TYPE)
