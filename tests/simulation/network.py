"""The network of the played world, and the transport that every client gets.

A request may be late, lost, or arrive twice; so may an answer be late or lost; a client may be cut off
for a while, and a broker that is down refuses. What the client makes of answers is the client's own
code: statuses, frames and control messages are read by `qmq_client.transport.http` and the wire.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import httpx

from qmq_client.errors import BrokerUnreachableError
from qmq_client.transport.http import _decode
from qmq_client.transport.http_errors import check_status
from qmq_client.wire.delayed import CancelAnswer, Cancellation, CancelRequest
from qmq_client.wire.deliveries import Deliveries, parse_deliveries
from qmq_client.wire.frame import parse_message_frame
from qmq_client.wire.requests import (
    FRAME_CONTENT_TYPE,
    JSON_CONTENT_TYPE,
    PullRequest,
    SendAnswer,
    SettleAnswer,
    SettleRequest,
    decode_json,
    encode_control,
    encode_json,
)
from tests.simulation.broker import BrokerLife
from tests.simulation.ears import Ears
from tests.simulation.face import Answer, Call, Face, OnHandOut
from tests.simulation.scheduler import MS, Process, Scheduler, Signal

#: How long a client waits for an answer beside what it lets the broker wait.
ANSWER_US: Final = 3_000 * MS
_WAY_US: Final = 3 * MS
_SLOW_US: Final = 6_000 * MS
_FRAME_BYTES_MAX: Final = 8 * 1024 * 1024


@dataclass(slots=True, kw_only=True)
class Weather:
    """How bad the network is: chances for each request."""

    loses_requests: float = 0.0
    loses_answers: float = 0.0
    doubles: float = 0.0
    delays: float = 0.0
    #: Names of processes that are cut off.
    cut_off: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Reply:
    """What comes back to one caller."""

    came: Signal = field(default_factory=Signal)
    answer: Answer | None = None
    is_reset: bool = False
    is_over: bool = False


class Network:
    """All ways between the clients and the one broker."""

    def __init__(self, scheduler: Scheduler, on_hand_out: OnHandOut) -> None:
        self.weather = Weather()
        self._scheduler = scheduler
        self._on_hand_out = on_hand_out
        self._face: Face | None = None
        #: Replies of calls that are at the broker.
        self._at_broker: dict[_Reply, None] = {}

    def call(self, process: Process, route: str, body: bytes, timeout_us: int) -> Answer:
        """One request of a client's strand; raises `BrokerUnreachableError`."""
        reply, weather, rng = _Reply(), self.weather, self._scheduler.rng
        process.check()
        if self._draw(weather.loses_requests):
            if rng.random() < 0.5:  # at once, as a reset; else nothing is ever heard
                self._reset_soon(reply)
        else:
            self._carry(process, route, body, reply)
            if self._draw(weather.doubles):
                self._carry(process, route, body, _Reply(), delay_us=rng.randrange(_SLOW_US))
        process.wait(reply.came, timeout_us, f"waits for {route}")
        reply.is_over = True
        if reply.answer is None:
            reason = "the connection was lost" if reply.is_reset else "no answer in time"
            raise BrokerUnreachableError(f"{route}: {reason} (played)")
        return reply.answer

    def _carry(
        self, process: Process, route: str, body: bytes, reply: _Reply, delay_us: int = 0
    ) -> None:
        def arrive() -> None:
            face = self._face
            if process.name in self.weather.cut_off:
                return
            if face is None or face.life.process.is_dead:
                self._reset_soon(reply)
                return
            self._at_broker[reply] = None
            respond = self._way_back(process, reply)
            call = Call(route, body, respond, lambda: not (reply.is_over or process.is_dead))
            face.life.in_loop(f"serves {route}", lambda: face.serve(call))

        self._scheduler.after(delay_us + self._way_us(), f"{route} of {process.name}", arrive)

    def _way_back(self, process: Process, reply: _Reply) -> Callable[[Answer], None]:
        def respond(answer: Answer) -> None:
            self._at_broker.pop(reply, None)
            if self._draw(self.weather.loses_answers):
                return

            def arrive() -> None:
                if process.name not in self.weather.cut_off and not reply.is_over:
                    reply.answer = answer
                    self._scheduler.give(reply.came)

            self._scheduler.after(self._way_us(), f"answer to {process.name}", arrive)

        return respond

    def _reset_soon(self, reply: _Reply) -> None:
        def reset() -> None:
            if reply.answer is None and not reply.is_over:
                reply.is_reset = True
                self._scheduler.give(reply.came)

        self._scheduler.after(self._way_us(), "a connection is reset", reset)

    def _way_us(self) -> int:
        rng = self._scheduler.rng
        longest_us = _SLOW_US if self._draw(self.weather.delays) else _WAY_US
        return 200 + rng.randrange(longest_us)

    def _draw(self, chance: float) -> bool:
        return chance > 0 and self._scheduler.rng.random() < chance

    def on_begin(self, life: BrokerLife) -> None:
        """The broker listens."""
        self._face = Face(life, self._on_hand_out)

    def on_death(self, _: BrokerLife) -> None:
        """Its connections are reset."""
        self._face = None
        waiting, self._at_broker = self._at_broker, {}
        for reply in waiting:
            self._reset_soon(reply)


class Line:
    """The `Transport` of one process; what is heard goes to `Ears`."""

    def __init__(self, network: Network, process: Process, ears: Ears) -> None:
        self._network = network
        self._process = process
        self._ears = ears

    def send(self, frame: bytes) -> SendAnswer:
        """See `Transport.send`."""
        answer = _decode(self._call("send", frame), SendAnswer)
        parsed = parse_message_frame(frame)
        if (answer.frame_crc, answer.count) != (parsed.header.body_crc, parsed.header.record_count):
            raise AssertionError("an answer names another frame")
        self._ears.on_accepted(self._process, frame, answer)
        return answer

    def pull(self, request: PullRequest) -> Deliveries:
        """See `Transport.pull`."""
        began_us = self._ears.begin(self._process, request)
        try:
            data = self._call("pull", encode_control(request), request.wait_ms * MS)
            deliveries = parse_deliveries(data, frame_bytes_max=_FRAME_BYTES_MAX)
        except BaseException:
            self._ears.on_unsettled(self._process, request, began_us)
            raise
        self._ears.on_settled(self._process, request, deliveries.head.stale, began_us)
        self._ears.on_delivered(self._process, request, deliveries)
        return deliveries

    def settle(self, request: SettleRequest) -> SettleAnswer:
        """See `Transport.settle`."""
        began_us = self._ears.begin(self._process, request)
        try:
            answer = _decode(self._call("settle", encode_control(request)), SettleAnswer)
        except BaseException:
            self._ears.on_unsettled(self._process, request, began_us)
            raise
        self._ears.on_settled(self._process, request, answer.stale, began_us)
        return answer

    def cancel(self, message_ids: tuple[str, ...]) -> tuple[Cancellation, ...]:
        """See `Cancelling`."""
        body = encode_json(CancelRequest(message_ids=message_ids))
        answer = self._call("cancel", body, content_type=JSON_CONTENT_TYPE)
        return decode_json(answer, CancelAnswer).outcomes

    def close(self) -> None:
        """Nothing is kept open."""

    def _call(
        self, route: str, body: bytes, wait_us: int = 0, content_type: str = FRAME_CONTENT_TYPE
    ) -> bytes:
        answer = self._network.call(self._process, route, body, ANSWER_US + wait_us)
        if answer.status != 200:
            headers = {"content-type": FRAME_CONTENT_TYPE}
            if answer.retry_after:
                headers["retry-after"] = answer.retry_after
            response = httpx.Response(answer.status, headers=headers)
            check_status(response, answer.body, FRAME_CONTENT_TYPE)
        return answer.body
