"""The broker's face in the played world: send, pull, settle and cancel, as the real one serves them.

Requests and answers are the bytes of the wire and statuses; only HTTP itself is left out. A pull waits
in the broker's own list of waiting pulls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from qmq_broker.face.answers import error_answer, error_status, retry_after
from qmq_broker.face.delayed_routes import _outcome
from qmq_broker.service.broker import send_answer
from qmq_broker.service.delivery.delivery import HandOut
from qmq_broker.service.delivery.settling import Stale
from qmq_broker.service.delivery.waiting import WaitingPull
from qmq_broker.storage.schedule.cancelled import Cancelled
from qmq_broker.storage.schedule.fates import Fate
from qmq_broker.storage.store import Placed
from qmq_client.wire.delayed import CancelAnswer, CancelRequest
from qmq_client.wire.deliveries import build_deliveries
from qmq_client.wire.errors import QmqError
from qmq_client.wire.groups import group_of
from qmq_client.wire.message_id import parse_message_id
from qmq_client.wire.requests import (
    PullRequest,
    SettleRequest,
    decode_control,
    decode_json,
    encode_control,
    encode_json,
)
from tests.simulation.broker import BrokerLife
from tests.simulation.scheduler import MS


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes back: a status, the body, and after how many seconds to come again."""

    status: int
    body: bytes
    retry_after: str = ""


@dataclass(slots=True, eq=False)
class Call:
    """One request at the broker."""

    route: str
    body: bytes
    respond: Callable[[Answer], None]
    #: Whether its client still waits; one that went away is like a closed connection.
    is_wanted: Callable[[], bool]


#: A hand-out, for those who judge: request, what was given, broker's time of delivery.
OnHandOut = Callable[[PullRequest, HandOut, int], None]


@dataclass(slots=True, eq=False)
class Face:
    """Serves the calls of one life of the broker."""

    life: BrokerLife
    on_hand_out: OnHandOut
    _routes: dict[str, Callable[[Call], None]] = field(init=False)

    def __post_init__(self) -> None:
        self._routes = {
            "send": self._send,
            "pull": self._pull,
            "settle": self._settle,
            "cancel": self._cancel,
        }

    def serve(self, call: Call) -> None:
        """One request, in the broker's loop; its answer may come later."""
        self._guarded(call, lambda: self._routes[call.route](call))

    def _guarded(self, call: Call, work: Callable[[], None]) -> None:
        try:
            work()
        except QmqError as error:
            call.respond(_refusal(error))

    def _send(self, call: Call) -> None:
        broker = self.life.broker
        broker.serving.check_takes_messages()

        def on_done(outcome: Placed | Exception) -> None:
            if isinstance(outcome, QmqError):
                call.respond(_refusal(outcome))
            elif isinstance(outcome, Exception):
                raise outcome
            else:
                call.respond(Answer(200, encode_control(send_answer(frame, outcome))))

        frame = broker.send(call.body, on_done)

    def _settle(self, call: Call) -> None:
        broker = self.life.broker
        request = decode_control(call.body, SettleRequest)
        broker.serving.check_delivers()
        settled = broker.delivery.settle(request, broker.time.now_ms())
        call.respond(Answer(200, encode_control(settled)))

    def _cancel(self, call: Call) -> None:
        """Of delayed messages, as `delayed_routes` does it."""
        broker = self.life.broker
        (text,) = decode_json(call.body, CancelRequest).message_ids
        broker.serving.check_delivers()
        message_id = parse_message_id(text)
        found = [one.message for one in broker.delayed.query.find(message_id)]
        places = [
            Cancelled(one.bucket, one.sequence, one.source, one.subject, message_id)
            for one in found
        ]

        def on_done(outcome: list[Fate | None] | Exception) -> None:
            if isinstance(outcome, QmqError):
                call.respond(_refusal(outcome))
            elif isinstance(outcome, Exception):
                raise outcome
            else:
                answer = CancelAnswer(outcomes=(_outcome(outcome),))
                call.respond(Answer(200, encode_json(answer)))

        broker.delayed.changes.cancel(places, on_done)

    def _pull(self, call: Call) -> None:
        broker = self.life.broker
        request = decode_control(call.body, PullRequest)
        broker.serving.check_delivers()
        stale = broker.delivery.begin_pull(request, broker.time.now_ms())
        given = broker.delivery.pull(request, broker.time.now_ms(), stale)
        if given is None and request.wait_ms:
            _Wait(self, call, request, stale).begin()
            return
        self.give(call, request, given, stale)

    def give(
        self, call: Call, request: PullRequest, given: HandOut | None, stale: tuple[Stale, ...]
    ) -> None:
        """Answer a pull; one whose messages are acked already waits for the sync."""
        broker = self.life.broker
        if given is None:
            given = broker.delivery.nothing(request, stale)
        else:
            self.on_hand_out(request, given, broker.time.now_ms())
        body = build_deliveries(given.head, given.lengths, given.records)
        answer = Answer(200, body)
        if not given.is_final:
            call.respond(answer)
            return

        def sync_and_answer() -> None:
            final = answer
            try:
                broker.sync_actions()
            except QmqError as error:
                final = _refusal(error)
            self.life.in_loop("answers", lambda: call.respond(final))

        self.life.process.spawn("sync before an answer", sync_and_answer)


@dataclass(slots=True, eq=False)
class _Wait:
    """A pull that waits until there is something, its time is up, or its client is gone."""

    face: Face
    call: Call
    request: PullRequest
    stale: tuple[Stale, ...]
    is_over: bool = False
    waiting: WaitingPull | None = None

    def begin(self) -> None:
        self.face.life.in_loop("a pull's time is up", self._end, self.request.wait_ms * MS)
        self._wait()

    def _wait(self) -> None:
        life, key = self.face.life, (self.request.subject, group_of(self.request))

        def wake() -> None:
            life.in_loop("wakes a pull", self._woken)

        self.waiting = life.broker.delivery.waiting.add(key, wake)

    def _woken(self) -> None:
        broker, waiting = self.face.life.broker, self.waiting
        assert waiting is not None
        if self.is_over or not self.call.is_wanted():
            self.is_over = True
            broker.delivery.waiting.wake_group(waiting.key)
            return
        try:
            given = broker.delivery.pull(self.request, broker.time.now_ms(), self.stale)
        except QmqError as error:
            broker.delivery.waiting.wake_group(waiting.key)
            self.is_over = True
            self.call.respond(_refusal(error))
            return
        if given is None and not broker.serving.is_stopping:
            self._wait()
            return
        self.is_over = True
        self.face.give(self.call, self.request, given, self.stale)

    def _end(self) -> None:
        if self.is_over or self.waiting is None:
            return
        self.is_over = True
        delivery = self.face.life.broker.delivery
        delivery.waiting.leave(self.waiting)
        if self.waiting.is_woken:
            delivery.waiting.wake_group(self.waiting.key)
        self.face.give(self.call, self.request, None, self.stale)


def _refusal(error: QmqError) -> Answer:
    wait = retry_after(error)
    return Answer(
        error_status(error),
        encode_control(error_answer(error)),
        "" if wait is None else wait.decode(),
    )
