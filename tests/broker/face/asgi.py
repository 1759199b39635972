"""The face without sockets: one request straight into the application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl

from qmq_broker.face.app import App
from qmq_broker.face.authentication.authenticator import Authenticator
from qmq_broker.face.http.request_response import RequestResponse, SteppedCoroutine
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
        self, rig: Rig, limits: FaceLimits | None = None, authenticator: Authenticator | None = None
    ) -> None:
        self.rig = rig
        #: Whether the writer gets its turns.
        self.is_writing = True
        self.app = App(
            rig.broker, limits or FaceLimits(), instance=0xABCD, authenticator=authenticator
        )

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
        task = asyncio.ensure_future(wire.serve(self.app, scope))
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


class Wire(asyncio.Transport):
    """The connection of one request; `parts` are the pieces in which its body arrives."""

    def __init__(
        self,
        parts: Sequence[bytes],
        is_gone: asyncio.Event | None = None,
        is_read: asyncio.Event | None = None,
    ) -> None:
        super().__init__()
        self._parts = list(parts)
        self._is_read = is_read
        self._is_gone = is_gone or asyncio.Event()
        self._is_closed = False
        self.written = b""

    async def serve(self, app: App, scope: Scope) -> None:
        """Let the application answer; returns when its route has."""
        self._flow = FlowControl(self)
        request = RequestResponse(scope, self, self._flow, keep_alive=True, on_end=lambda: None)
        ended = asyncio.get_running_loop().create_future()
        if len(self._parts) == 1:  # with its head
            request.receive(self._parts.pop())
            request.receive_end()
        feeding = asyncio.ensure_future(self._feed(request))
        SteppedCoroutine(app.serve(request), lambda: ended.set_result(None), set()).step()
        try:
            await ended
        finally:
            feeding.cancel()

    async def _feed(self, request: RequestResponse) -> None:
        for part in self._parts:
            request.receive(part)
            await asyncio.sleep(0)
        if self._parts:
            request.receive_end()
        await self._is_gone.wait()
        request.lose()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)
        if len(data) > 64 * 1024 and self._is_read is not None and not self._is_read.is_set():
            self._flow.pause_writing()
            waiting = asyncio.ensure_future(self._is_read.wait())
            waiting.add_done_callback(lambda _: self._flow.resume_writing())

    def close(self) -> None:
        self._is_closed = True

    def is_closing(self) -> bool:
        return self._is_closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def reply(self) -> Reply:
        """What was sent."""
        head, _, body = self.written.partition(b"\r\n\r\n")
        status_line, *lines = head.split(b"\r\n")
        pairs = [line.partition(b": ") for line in lines]
        return Reply(
            status=int(status_line.split(b" ", 2)[1]),
            headers={name: value for name, _, value in pairs},
            body=body,
        )


def error_of(reply: Reply) -> ErrorAnswer:
    if reply.headers[b"content-type"] == FRAME:
        return decode_control(reply.body, ErrorAnswer)
    return ErrorAnswer(**reply.json)
