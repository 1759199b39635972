"""The broker as one ASGI application: three hot routes by hand, the rest through Starlette.

The last line of defence: an unforeseen error is logged with its place and answered with a 500 that
says nothing about the inside.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from qmq_broker.face.answers import INTERNAL, RequestRefusedError, error_code
from qmq_broker.face.callers.door import Door
from qmq_broker.face.exchanges.exchange import AsgiExchange, Exchange, KeptAnswer
from qmq_broker.face.exchanges.requests import (
    BodyRoom,
    ClientGone,
    Encoding,
    encode,
    read_head,
    send_whole,
)
from qmq_broker.face.limits import FaceLimits
from qmq_broker.face.logs import Repeats, log_event
from qmq_broker.face.routes.admin import admin_app
from qmq_broker.face.routes.hot import HotRoutes, Route, answer_error
from qmq_broker.service.broker import Broker

_LOG: Final = logging.getLogger(__name__)


class App:
    """ASGI 3 application of one broker."""

    def __init__(
        self, broker: Broker, limits: FaceLimits, *, instance: int, door: Door | None = None
    ) -> None:
        """Without a `door`, everybody may do everything."""
        self._door = door or Door(None, broker.time.now_ms)
        self._room = BodyRoom(limits)
        self._hot = HotRoutes(broker, limits, self._room, self._door, instance=instance)
        # Pulls that wait ask again whether they may
        self._door.on_changed = broker.delivery.waiting.wake_all
        self._admin = admin_app(broker)
        self._refused = broker.measures.refused
        self._failures = Repeats()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        exchange = AsgiExchange(scope, receive, send)
        route = self.hot_route(scope["path"].encode())
        if route is not None:
            await self.serve(exchange, partial(route, exchange))
        else:
            await self.serve(exchange, partial(self._ask, exchange, receive))

    def hot_route(self, path: bytes) -> Route | None:
        """The hot route of this path; None if it is not one of the three."""
        return self._hot.find(path)

    async def _ask(self, exchange: AsgiExchange, receive: Receive) -> None:
        """Let the other routes answer, if there is room for their answer."""
        answer = KeptAnswer()
        await self._admin(exchange.scope, receive, answer.send)
        self._room.check_answer(len(answer.body))
        with self._room.answer(len(answer.body), exchange.scope):
            await send_whole(exchange.send, answer.start, answer.body)

    def take_dropped(self) -> int:
        """How many clients were dropped since the last call: others needed the room of their answers."""
        return self._room.take_dropped()

    async def serve(self, exchange: Exchange, work: Callable[[], Awaitable[None]]) -> None:
        """Let a known caller in, run the work, and answer whatever goes wrong."""
        scope = exchange.scope
        try:
            self._door.authenticate(scope)
            await work()
        except RequestRefusedError as refusal:
            self._refused[error_code(refusal)] += 1
            await answer_error(exchange, read_head(scope).answer_encoding(), refusal)
        except (ClientGone, ClientDisconnect):
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
            if not exchange.is_answering:
                await exchange.answer(500, Encoding.JSON, encode(Encoding.JSON, INTERNAL))
