"""The broker's face in the played world: the real application, from a request's head to its answer.

Left out is only HTTP's own grammar, and the sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

from uvicorn.protocols.http.flow_control import FlowControl

from qmq_broker.face.app import App
from qmq_broker.face.http.request_response import RequestResponse
from qmq_broker.face.limits import FaceLimits
from qmq_broker.service.serving import Serving
from tests.simulation.broker import BrokerLife

_PREFIX: Final = "/v1/"
_HEAD_END: Final = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes back."""

    status: int
    body: bytes
    headers: dict[str, str]


@dataclass(slots=True, eq=False)
class Call:
    """One request at the broker."""

    #: Behind the version, as `qmq_client.transport.http` names it.
    route: str
    body: bytes
    respond: Callable[[Answer], None]
    content_type: str
    #: Whether the broker takes no messages, and this has some.
    is_refused_for_certain: bool = False
    #: Ends the world: what is raised at an answer would be the application's to catch.
    accuse: Callable[[str], None] = lambda what: None
    #: Told once, in the broker's loop, when the connection is gone.
    lose: Callable[[], None] = lambda: None


class Face:
    """Serves the calls of one life of the broker."""

    def __init__(self, life: BrokerLife) -> None:
        self.life = life
        self._app = App(life.broker, FaceLimits(), instance=0)

    def serve(self, call: Call) -> None:
        """Begin with one request, in a turn of the broker's loop; its answer may come later."""
        path = _PREFIX + call.route
        is_closed = self.life.broker.serving.state is not Serving.SERVING
        call.is_refused_for_certain = call.route == "send" and is_closed
        call.accuse = self._accuse
        wire = _Wire(call)
        request = RequestResponse(
            _scope(call, path), wire, FlowControl(wire), keep_alive=True, on_end=wire.end
        )
        call.lose = request.lose
        request.receive(call.body)
        request.receive_end()
        self.life.loop.drive(self._app.serve(request))

    def _accuse(self, what: str) -> None:
        def fail() -> None:
            raise AssertionError(what)

        self.life.in_loop("has broken a promise", fail)


class _Wire(asyncio.Transport):
    """The way back of one answer."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call
        self._parts: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Keep a part of the answer until it is whole."""
        self._parts.append(bytes(data))

    def close(self) -> None:
        """Nobody but the client hangs up here."""
        self._call.accuse(f"{self._call.route} was left without an answer")

    def end(self) -> None:
        """The answer is whole."""
        head, _, body = b"".join(self._parts).partition(_HEAD_END)
        status_line, *lines = head.split(b"\r\n")
        pairs = [line.split(b": ", 1) for line in lines]
        _respond(self._call, int(status_line.split(b" ", 2)[1]), pairs, body)


def _respond(call: Call, status: int, pairs: Any, body: bytes) -> None:
    if status == 500:
        call.accuse(f"{call.route} failed at the broker: {body[:200]!r}")
    if status == 200 and call.is_refused_for_certain:
        call.accuse("a broker that takes no messages took some")
    headers = {name.decode().lower(): value.decode() for name, value in pairs}
    call.respond(Answer(status, body, headers))


def _scope(call: Call, path: str) -> MutableMapping[str, Any]:
    return {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"content-type", call.content_type.encode()),
            (b"content-length", str(len(call.body)).encode()),
        ],
        "server": ("broker", 9470),
        "client": None,
    }
