"""The face without sockets: one request straight into the ASGI application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.types import Message, Scope

from qmq_broker.face.app import App
from qmq_broker.face.callers.door import Door
from qmq_broker.face.limits import FaceLimits
from qmq_client.wire.requests import (
    FRAME_CONTENT_TYPE,
    JSON_CONTENT_TYPE,
    ErrorAnswer,
    decode_control,
)
from tests.broker.service.rig import Rig

FRAME = FRAME_CONTENT_TYPE.encode()
JSON = JSON_CONTENT_TYPE.encode()
Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer as it would go to the socket."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        assert self.headers[b"content-type"] == JSON
        return json.loads(self.body)


class Client:
    """Calls the application; the writer runs between its steps."""

    def __init__(
        self, rig: Rig, limits: FaceLimits | None = None, door: Door | None = None
    ) -> None:
        self.rig = rig
        #: Whether the writer gets its turns.
        self.is_writing = True
        self.app = App(rig.broker, limits or FaceLimits(), instance=0xABCD, door=door)

    def post(self, path: str, body: object, content_type: bytes = JSON, **more: Any) -> Reply:
        """POST bytes, or a value as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return asyncio.run(self.call("POST", path, data, content_type=content_type, **more))

    def get(self, path: str, **more: Any) -> Reply:
        """GET."""
        return asyncio.run(self.call("GET", path, b"", content_type=None, **more))

    async def call(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        content_type: bytes | None = JSON,
        headers: Headers = (),
        has_length: bool = True,
        parts: Sequence[bytes] | None = None,
        is_gone: asyncio.Event | None = None,
        is_read: asyncio.Event | None = None,
    ) -> Reply:
        """One request; `parts` are the pieces in which its body arrives.

        With `is_read` the client reads no long answer before it is set.
        """
        scope = make_scope(method, path, headers)
        if content_type is not None:
            scope["headers"].append((b"content-type", content_type))
        if has_length and method == "POST":
            scope["headers"].append((b"content-length", str(len(body)).encode()))
        wire = Wire(parts if parts is not None else [body], is_gone, is_read)
        task = asyncio.ensure_future(self.app(scope, wire.receive, wire.send))
        while not task.done():
            await asyncio.sleep(0)
            if self.is_writing:
                self.rig.broker.writer.step()
            self.rig.run_posted()
        await task
        return wire.reply()


def make_scope(method: str, path: str, headers: Headers = ()) -> Scope:
    """The scope of a request."""
    url = urlsplit(path)
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": url.path,
        "raw_path": url.path.encode(),
        "query_string": url.query.encode(),
        "root_path": "",
        "headers": list(headers),
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 9470),
    }


class Wire:
    """Both directions of one request."""

    def __init__(
        self,
        parts: Sequence[bytes],
        is_gone: asyncio.Event | None = None,
        is_read: asyncio.Event | None = None,
    ) -> None:
        self._parts = list(parts)
        self._is_read = is_read
        self._is_full = False
        self._is_gone = is_gone or asyncio.Event()
        self.sent: list[Message] = []
        self.received = 0

    async def receive(self) -> Message:
        if self._parts:
            self.received += 1
            body = self._parts.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(self._parts)}
        await self._is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self._is_full and self._is_read is not None:
            await self._is_read.wait()
        self._is_full = len(message.get("body", b"")) > 64 * 1024
        self.sent.append(message)

    def reply(self) -> Reply:
        """What was sent."""
        start, *bodies = self.sent
        return Reply(
            status=start["status"],
            headers=dict(start["headers"]),
            body=b"".join(body["body"] for body in bodies),
        )


def error_of(reply: Reply) -> ErrorAnswer:
    if reply.headers[b"content-type"] == FRAME:
        return decode_control(reply.body, ErrorAnswer)
    return ErrorAnswer(**reply.json)
