"""The three hot routes: send, pull, settle.

Each reads its request, calls the service, and writes one answer. No code here runs per message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeVar

import msgspec
from starlette.types import Scope

from qmq_broker.face.answers import error_answer, error_code, error_headers, refuse
from qmq_broker.face.authentication.authenticator import Authenticator, caller_of
from qmq_broker.face.http.request_response import Outcome, RequestResponse, make_known
from qmq_broker.face.http.requests import (
    BodyRoom,
    ClientGone,
    Encoding,
    Head,
    check_head,
    decode,
    encode,
    read_head,
)
from qmq_broker.face.limits import FaceLimits
from qmq_broker.face.logs import FaultLog
from qmq_broker.face.routes.json_messages import JsonSend, deliveries_to_json, json_to_frame
from qmq_broker.face.routes.route import check_subject
from qmq_broker.face.strict_json import read_json
from qmq_broker.service.broker import Broker, send_answer
from qmq_broker.service.delivery.delivery import HandOut, Settled
from qmq_broker.service.delivery.waiting import WaitingPull
from qmq_broker.service.serving import Serving
from qmq_broker.storage.store import Placed
from qmq_client.group.settling import Stale
from qmq_client.wire.deliveries import build_deliveries
from qmq_client.wire.errors import QmqError
from qmq_client.wire.groups import group_of
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.requests import CONTROL_BYTES_MAX, PullRequest, SettleAnswer, SettleRequest

_ALLOW_POST: Final = ((b"allow", b"POST"),)
#: JSON up to this length is decoded and encoded in the loop, which takes a millisecond or two. A
#: thread does this for longer JSON; meanwhile the loop runs every few milliseconds.
_IN_LOOP_BYTES_MAX: Final = 16 * 1024
#: A pull with more refused settlements than this does not wait, because it would keep them in memory.
_STALE_WAITING_MAX: Final = 100

T = TypeVar("T")
_Work = Callable[[Head, RequestResponse], Awaitable[None]]


class HotRoutes:
    """Send, pull and settle of one broker."""

    def __init__(
        self,
        broker: Broker,
        limits: FaceLimits,
        room: BodyRoom,
        authenticator: Authenticator,
        faults: FaultLog,
        *,
        instance: int,
    ) -> None:
        """Requires: `instance` is random. The ids of JSON messages begin with it."""
        self._broker = broker
        self._room = room
        self._authenticator = authenticator
        self._json_bytes_max = limits.json_bytes
        self._ids = MessageIds(instance)
        self._thread_lock = asyncio.Lock()
        self._faults = faults

    async def serve(self, work: _Work, http: RequestResponse) -> None:
        """Serve one request by `send`, `pull` or `settle`; a `QmqError` becomes its answer."""
        head = read_head(http.scope)
        try:
            if http.scope["method"] != "POST":
                raise _method_not_allowed(http.scope["method"])
            self._room.begin_request()
            try:
                await work(head, http)
            finally:
                self._room.end_request()
        except QmqError as error:
            self._faults.note(http.scope["path"], error)
            self._broker.metrics.refused[error_code(error)] += 1
            await answer_error(http, head.answer_encoding(), error)

    async def send(self, head: Head, http: RequestResponse) -> None:
        """Store messages; answers once they are durable."""
        encoding, body_bytes_max = check_head(
            head,
            frame_bytes_max=self._broker.settings.wire.frame_bytes,
            json_bytes_max=self._json_bytes_max,
        )
        self._broker.serving.check_takes_messages()
        with self._room.body(head.content_bytes or 0) as share:
            data = await http.body(body_bytes_max, share)
            message_ids: tuple[str, ...] = ()
            if encoding is Encoding.JSON:
                data, message_ids = await self._off_loop(len(data), partial(self._frame_of, data))
            durable: Outcome[Placed] = Outcome()
            may_send = partial(check_subject, http.scope)
            owner = head.caller.owner
            frame = self._broker.send(data, partial(make_known, durable), may_send, owner=owner)
            placed = await durable
        reply = head.answer_encoding()
        await http.answer(200, reply, encode(reply, send_answer(frame, placed, message_ids)))

    async def pull(self, head: Head, http: RequestResponse) -> None:
        """Apply settlements, then answer with messages; waits up to `wait_ms` if there are none."""
        request = await self._read(head, http, PullRequest)
        check_subject(http.scope, request.subject)
        self._broker.serving.check_delivers()
        self._check_answer(request)
        delivery = self._broker.delivery
        delivery.check_pull(request)
        stale = tuple((await self._settled(request)).stale)
        has_settled, request = bool(request.settlements), without_settlements(request)
        owner = head.caller.owner
        try:
            given = delivery.pull(request, self._broker.time.now_ms(), stale, owner=owner)
            if given is None and request.wait_ms and len(stale) <= _STALE_WAITING_MAX:
                given = await self._wait(request, stale, http)
        except QmqError as error:
            if not has_settled or self._broker.serving.state is Serving.POISONED:
                raise
            self._faults.note(http.scope["path"], error)
            # A refusal would suggest that the settlements failed; the next pull gets the error.
            given = None
        if given is None:
            given = delivery.nothing(request, stale)
        reply, given_bytes = head.answer_encoding(), sum(given.records.lengths)
        with self._room.answer(given_bytes, http.scope):  # while the answer is built
            if given.is_final:
                await asyncio.to_thread(self._broker.sync_actions)
            if reply is Encoding.FRAME:
                body = build_deliveries(given.head, given.records.lengths, given.records.parts)
            else:
                body = await self._off_loop(given_bytes, partial(deliveries_to_json, given))
        # The client may be slow to read the answer: keep only one copy of the messages.
        del given
        with self._room.answer(len(body), http.scope), self._room.waiting():
            await http.answer(200, reply, body)

    async def settle(self, head: Head, http: RequestResponse) -> None:
        """Apply settlements of delivered messages."""
        request = await self._read(head, http, SettleRequest)
        check_subject(http.scope, request.subject)
        self._broker.serving.check_delivers()
        self._broker.delivery.check_settle(request)
        settled = await self._settled(request)
        answer = SettleAnswer(settled=settled.count, stale=tuple(settled.stale))
        reply = head.answer_encoding()
        await http.answer(200, reply, encode(reply, answer))

    async def _settled(self, request: SettleRequest | PullRequest) -> Settled:
        """Apply the settlements of a request in portions; others are served in between."""
        delivery, settled = self._broker.delivery, Settled()
        for part in delivery.slices(request, settled):
            if settled.has_begun:
                await asyncio.sleep(0)
            delivery.settle_slice(request, part, self._broker.time.now_ms(), settled)
        return settled

    async def _read(self, head: Head, http: RequestResponse, kind: type[T]) -> T:
        encoding, body_bytes_max = check_head(
            head, frame_bytes_max=CONTROL_BYTES_MAX, json_bytes_max=CONTROL_BYTES_MAX
        )
        with self._room.body(head.content_bytes or 0) as share:
            data = await http.body(body_bytes_max, share)
            return await self._off_loop(len(data), partial(decode, encoding, data, kind))

    async def _off_loop(self, data_bytes: int, work: Callable[[], T]) -> T:
        """Do work on data of this length: at once if short, else in a thread, one at a time."""
        if data_bytes <= _IN_LOOP_BYTES_MAX:
            return work()
        async with self._thread_lock:
            return await asyncio.to_thread(work)

    async def _wait(
        self, request: PullRequest, stale: tuple[Stale, ...], http: RequestResponse
    ) -> HandOut | None:
        """Wait for messages; None if the time is up or the broker stops. Raises `ClientGone`."""
        now_s = asyncio.get_running_loop().time()
        until_s = now_s + min(request.wait_ms, self._broker.settings.limits.wait_ms) / 1000
        with self._room.waiting():
            while True:
                waiting = await self._sleep(request, http, until_s)
                if not waiting.is_woken or self._broker.serving.is_stopping:
                    return None
                given = self._pull_woken(request, stale, waiting, http.scope)
                if given is not None:
                    return given

    def _pull_woken(
        self, request: PullRequest, stale: tuple[Stale, ...], waiting: WaitingPull, scope: Scope
    ) -> HandOut | None:
        """Pull after a wake-up, if the caller is still allowed; a refused pull wakes the next."""
        delivery = self._broker.delivery
        try:
            self._authenticator.authenticate(scope)
            check_subject(scope, request.subject)
            self._check_answer(request)
            owner = caller_of(scope).owner
            return delivery.pull(request, self._broker.time.now_ms(), stale, owner=owner)
        except QmqError:
            delivery.waiting.wake_group(waiting.key)
            raise

    async def _sleep(
        self, request: PullRequest, http: RequestResponse, until_s: float
    ) -> WaitingPull:
        """Wait once; returns the waiting pull, whose `is_woken` says whether it was woken."""
        waiting_pulls = self._broker.delivery.waiting
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = waiting_pulls.add(
            (request.subject, group_of(request)),
            partial(_set, woken),
            consumer=request.consumer,
        )
        try:
            await http.wait(woken, until_s)
        except ClientGone:
            if waiting.is_woken:
                waiting_pulls.wake_group(waiting.key)
            raise
        finally:
            waiting_pulls.leave(waiting)
        return waiting

    def _check_answer(self, request: PullRequest) -> None:
        self._room.check_answer(min(request.max_bytes, self._broker.settings.limits.pull_bytes))

    def _frame_of(self, data: bytes) -> tuple[bytes, tuple[str, ...]]:
        return json_to_frame(
            read_json(data, JsonSend),
            new_id=self._ids.next_id,
            now_ms=self._broker.time.wall_ms(),
            latest_ms=self._broker.time.latest_ms(),
            limits=self._broker.settings.wire,
        )


async def answer_error(http: RequestResponse, encoding: Encoding, error: QmqError) -> None:
    """Answer a refused request with its error."""
    headers = error_headers(error)
    status = error.status
    if status == 405:
        headers = (*headers, *_ALLOW_POST)
    await http.answer(status, encoding, encode(encoding, error_answer(error)), headers)


def without_settlements(request: PullRequest) -> PullRequest:
    """The pull without its settlements, which may take a megabyte, after they were applied."""
    return msgspec.structs.replace(request, settlements=()) if request.settlements else request


def _set(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


def _method_not_allowed(method: str) -> QmqError:
    return refuse(
        405,
        "method_not_allowed",
        f"method {method[:20]} is not allowed here; allowed: POST",
        field="method",
        limit="POST",
        value=method[:20],
        remedy="Send POST.",
    )
