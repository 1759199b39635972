"""The network of the played world, and the transport that every client gets.

A request may be late, lost, or arrive twice; so may an answer be late or lost; a client may be cut off
for a while, and a broker that is down refuses. Whoever gives up waiting hangs up, and the broker hears
of it unless he is cut off. What the client makes of answers is the client's own code: `Line` is the
product's transport with this network below it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import httpx

from qmq_client.errors import BrokerUnreachableError
from qmq_client.transport.http import _ANSWER_TYPES, HttpTransport
from qmq_client.transport.http_errors import check_head, check_status
from qmq_client.wire.delayed import Cancellation
from qmq_client.wire.deliveries import Deliveries
from qmq_client.wire.message_id import parse_message_id
from qmq_client.wire.requests import (
    FRAME_CONTENT_TYPE,
    PullRequest,
    SendAnswer,
    SettleAnswer,
    SettleRequest,
)
from tests.simulation.broker import BrokerLife
from tests.simulation.ears import Ears
from tests.simulation.face import Answer, Call, Face
from tests.simulation.scheduler import MS, Process, Scheduler, Signal
from tests.simulation.watch import Watch, let_see

#: How long a client waits for an answer beside what it lets the broker wait.
ANSWER_US: Final = 3_000 * MS
_WAY_US: Final = 3 * MS
_SLOW_US: Final = 6_000 * MS


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
    #: Whether nobody waits any more.
    is_over: bool = False
    call: Call | None = None


class Network:
    """All ways between the clients and the one broker."""

    def __init__(self, scheduler: Scheduler, watch: Watch) -> None:
        self.weather = Weather()
        #: How many requests were sent twice.
        self.doubled = 0
        self._scheduler = scheduler
        self._watch = watch
        self._face: Face | None = None
        #: Replies of calls that are at the broker, and who waits for them.
        self._at_broker: dict[_Reply, Process] = {}
        #: How many requests of each process have not arrived.
        self._under_way: Counter[Process] = Counter()

    def call(
        self,
        process: Process,
        route: str,
        body: bytes,
        timeout_us: int,
        content_type: str = FRAME_CONTENT_TYPE,
    ) -> Answer:
        """One request of a client's strand; raises `BrokerUnreachableError`."""
        reply, weather, rng = _Reply(), self.weather, self._scheduler.rng
        process.check()
        if self._draw(weather.loses_requests):
            if rng.random() < 0.5:  # at once, as a reset; else nothing is ever heard
                self._reset_soon(reply)
        else:
            call = partial(Call, route, body, content_type=content_type)
            self._carry(process, call, reply)
            if self._draw(weather.doubles):
                self.doubled += 1
                self._carry(process, call, _Reply(), delay_us=rng.randrange(_SLOW_US))
        try:
            process.wait(reply.came, timeout_us, f"waits for {route}")
        finally:
            reply.is_over = True
            self._hang_up(reply)
        if reply.answer is None:
            reason = "the connection was lost" if reply.is_reset else "no answer in time"
            raise BrokerUnreachableError(f"{route}: {reason} (played)")
        return reply.answer

    def _carry(
        self, process: Process, make: Callable[..., Call], reply: _Reply, delay_us: int = 0
    ) -> None:
        def arrive() -> None:
            self._under_way[process] -= 1
            face = self._face
            if process.name in self.weather.cut_off:
                return
            if face is None or face.life.process.is_dead:
                self._reset_soon(reply)
                return
            self._at_broker[reply] = process
            call = reply.call = make(respond=self._way_back(process, reply))
            face.life.in_loop(f"serves {call.route}", lambda: face.serve(call))

        self._under_way[process] += 1
        self._scheduler.after(delay_us + self._way_us(), f"a request of {process.name}", arrive)

    def has_under_way(self, process: Process) -> bool:
        """Whether a request of this process has not been answered, and may yet be heard."""
        return self._under_way[process] > 0 or process in self._at_broker.values()

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

    def _hang_up(self, reply: _Reply) -> None:
        """Close the connection of a call that may still be at the broker."""

        def arrive() -> None:
            process, face, call = self._at_broker.get(reply), self._face, reply.call
            if process is None or face is None or call is None:
                return
            if process.name not in self.weather.cut_off:
                face.life.loop.turn(call.lose)

        if reply in self._at_broker:
            self._scheduler.after(self._way_us(), "a client hangs up", arrive)

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
        let_see(life.broker, self._watch)
        self._face = Face(life)

    def on_death(self, _: BrokerLife) -> None:
        """Its connections are reset."""
        self._face = None
        waiting, self._at_broker = self._at_broker, {}
        for reply in waiting:
            self._reset_soon(reply)


class Line(HttpTransport):
    """The transport of one process; what is heard goes to `Ears`."""

    def __init__(self, network: Network, process: Process, ears: Ears) -> None:
        super().__init__(answer_timeout_s=ANSWER_US / 1e6)
        self._network = network
        self._process = process
        self._ears = ears

    def send(self, frame: bytes) -> SendAnswer:
        """See `Transport.send`."""
        answer = super().send(frame)
        self._ears.on_accepted(self._process, frame, answer)
        return answer

    def pull(self, request: PullRequest) -> Deliveries:
        """See `Transport.pull`."""
        with self._ears.settling(self._process, request) as told:
            deliveries = super().pull(request)
            told.stale = deliveries.head.stale
        self._ears.on_delivered(self._process, request, deliveries)
        return deliveries

    def settle(self, request: SettleRequest) -> SettleAnswer:
        """See `Transport.settle`."""
        with self._ears.settling(self._process, request) as told:
            answer = super().settle(request)
            told.stale = answer.stale
        return answer

    def cancel(
        self, message_ids: tuple[str, ...], *, withdrawn_from: str | None = None
    ) -> tuple[Cancellation, ...]:
        """See `HttpTransport.cancel`."""
        outcomes = super().cancel(message_ids, withdrawn_from=withdrawn_from)
        for message_id, outcome in zip(message_ids, outcomes, strict=True):
            if outcome is Cancellation.CANCELLED:
                self._ears.rows.accepted.add(parse_message_id(message_id))
        return outcomes

    def _call(self, route: str, body: bytes, answer_bytes_max: int, timeout_s: float) -> bytes:
        content_type = _ANSWER_TYPES.get(route, FRAME_CONTENT_TYPE)
        timeout_us = round(timeout_s * 1000) * MS
        answer = self._network.call(self._process, route, body, timeout_us, content_type)
        response = httpx.Response(answer.status, headers=answer.headers)
        check_head(response, content_type, self.broker_url)
        check_status(response, answer.body, self.broker_url)
        assert len(answer.body) <= answer_bytes_max
        return answer.body
