"""The routes that list, cancel and reschedule delayed messages.

Disk reads run outside the loop, in small portions. A cancellation is answered when it is durable;
the answer says if it came too late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from qmq_broker.errors import BusyError, CorruptionError, NotFoundError
from qmq_broker.face.answers import error_answer
from qmq_broker.face.authentication.authenticator import caller_of
from qmq_broker.face.http.request_response import make_known
from qmq_broker.face.routes.bodies import read_body
from qmq_broker.face.routes.json_messages import JsonDelivered, record_to_json
from qmq_broker.face.routes.queries import number
from qmq_broker.face.routes.route import NUMBER_MAX, check_subject, route_of, sight
from qmq_broker.service.broker import Broker
from qmq_broker.service.delay.query import LISTED_MAX, SPANS_MS, DelayedStatus, Found, HeldError
from qmq_broker.service.query import LISTED_BYTES_MAX
from qmq_broker.storage.schedule.cancelled import (
    CANCELLED_MAX,
    NOTHING_WITHDRAWN,
    Cancelled,
    WithdrawnIds,
)
from qmq_broker.storage.schedule.states import DelayedState
from qmq_broker.storage.store import Placed
from qmq_client.wire.delayed import (
    CANCELLED_PER_REQUEST_MAX,
    CancelAnswer,
    Cancellation,
    CancelRequest,
    RescheduleAnswer,
    RescheduleRequest,
    Rescheduling,
    check_due,
)
from qmq_client.wire.errors import InvalidMessageError
from qmq_client.wire.message_id import parse_message_id
from qmq_client.wire.names import OWN_PREFIX, check_name, check_not_own
from qmq_client.wire.requests import JSON_CONTENT_TYPE, ErrorAnswer
from qmq_client.wire.shown import shorten

#: Simultaneous searches of the schedule: each takes a thread, and the disk.
LOOKS_MAX: Final = 2
_LISTED: Final = 100
#: Searches for one message while other requests reschedule, cancel or release it.
TRIES_MAX: Final = 4
#: Most subjects that are shown for one message id.
SUBJECTS_SHOWN_MAX: Final = 10

T = TypeVar("T")


class JsonWaiting(msgspec.Struct, frozen=True, kw_only=True):
    """The message of one subject with the requested id."""

    subject: str
    #: The message itself while it is pending …
    message: JsonDelivered | None = None
    #: … or the reason why it cannot be read, with file and offset. The message is held back until then.
    damage: ErrorAnswer | None = None


class JsonDelayed(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `GET /v1/delayed/{message_id}`."""

    #: All places, the newest last: more than one if a message was rescheduled, or if several
    #: subjects have a message with this id.
    places: list[DelayedStatus]
    #: One message for each subject of the places, the newest place last; of very many, or very
    #: large messages, only the newest: see `SUBJECTS_SHOWN_MAX` and `LISTED_BYTES_MAX`.
    messages: list[JsonWaiting]


class DelayedRoutes:
    """Handlers of requests about delayed messages."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._query = broker.delayed.query
        self._looks = asyncio.Semaphore(LOOKS_MAX)

    async def status(self, _: Request) -> Response:
        """Counts, lateness, and faults."""
        return _json(self._query.status())

    async def listed(self, request: Request) -> Response:
        """Pending messages in the order of their due times."""
        subject, first_ms, next_ms = _question(request)
        count = min(number(request, "count", default=_LISTED), LISTED_MAX)
        rows = await self._look(lambda: self._query.listed(subject, first_ms, next_ms, count + 1))
        return _json({"delayed": rows[:count], "has_more": len(rows) > count})

    async def histogram(self, request: Request) -> Response:
        """Numbers of messages by due time."""
        subject, first_ms, next_ms = _question(request)
        span = request.query_params.get("span", "hour")
        if span not in SPANS_MS:
            raise InvalidMessageError(
                field="span",
                limit=", ".join(SPANS_MS),
                value=shorten(span),
                remedy="Choose one of these.",
            )
        rows = await self._look(lambda: self._query.histogram(subject, first_ms, next_ms, span))
        return _json({"span": span, "span_ms": SPANS_MS[span], "rows": rows})

    async def show(self, request: Request) -> Response:
        """One message, in any bucket."""
        text = request.path_params["message_id"]
        message_id = parse_message_id(text)
        sees = sight(request.scope)
        found = await self._look(lambda: self._query.find(message_id))
        found = [one for one in found if sees(one.message.subject)]
        if not found:
            raise _not_delayed(text)
        places = [self._query.shown(one) for one in found]
        messages = await self._waiting(_newest_of_subjects(found))
        answer = JsonDelayed(places=places, messages=messages)
        return Response(
            await asyncio.to_thread(msgspec.json.encode, answer), media_type=JSON_CONTENT_TYPE
        )

    async def retry(self, _: Request) -> Response:
        """Read unreadable messages again; the status soon shows the result."""
        self._broker.serving.check_delivers()
        releaser = self._broker.delayed.releaser
        buckets = sorted(
            releaser.damage.reasons().keys() | releaser.counts.damaged_by_bucket.copy().keys()
        )
        releaser.look_again(buckets)
        return _json({"buckets": buckets})

    async def accept_clock(self, _: Request) -> Response:
        """Accept the current clock for releases, as after a start; the answer has the alarms that this ends."""
        self._broker.serving.check_delivers()
        releaser = self._broker.delayed.releaser
        ended = {"clock": releaser.time.alarm, "clock_held": self._query.clock_held()}
        releaser.accept_clock()
        return _json(ended)

    async def cancel(self, request: Request) -> Response:
        """Cancel messages; the answer has the outcome of each."""
        wanted = await read_body(request, CancelRequest)
        if not 1 <= len(wanted.message_ids) <= CANCELLED_PER_REQUEST_MAX:
            raise InvalidMessageError(
                field="message_ids",
                limit=f"1 to {CANCELLED_PER_REQUEST_MAX} ids",
                value=str(len(wanted.message_ids)),
                remedy="Send several requests.",
            )
        ids = [parse_message_id(text) for text in wanted.message_ids]
        sees = _theirs(request, wanted.subject)
        self._broker.serving.check_delivers()
        due_at_ms = wanted.deliver_at_ms
        if wanted.withdrawn:  # before the search: an id that is unknown now stays unknown
            await self._cancel((), withdrawn={_named(wanted.subject): ids})
        found = await self._look(lambda: self._find(ids, due_at_ms, sees))
        known = await self._take_back(ids, found, sees)
        if None in known:
            found = await self._look_on(lambda: self._find(ids, None, sees))
            known = await self._take_back(ids, found, sees)
        outcomes = [Cancellation.UNKNOWN if one is None else one for one in known]
        for index, outcome in enumerate(outcomes):
            if outcome is Cancellation.UNKNOWN and await self._is_stored(ids[index], sees):
                outcomes[index] = Cancellation.TOO_LATE
        return _json(CancelAnswer(outcomes=tuple(outcomes)))

    async def reschedule(self, request: Request) -> Response:
        """Give a pending message another due time."""
        wanted = await read_body(request, RescheduleRequest)
        message_id = parse_message_id(wanted.message_id)
        sees = _theirs(request, wanted.subject)
        now_ms = self._broker.time.latest_ms()
        check_due(wanted.deliver_at_ms, now_ms, self._broker.settings.wire, field="deliver_at_ms")
        due_at_ms = max(wanted.deliver_at_ms, now_ms)  # a time in the past means now
        self._broker.serving.check_takes_messages()
        for _ in range(TRIES_MAX):
            found = await self._look(lambda: self._query.find(message_id))
            found = [one for one in found if sees(one.message.subject)]
            if not found:
                break
            _check_one_subject(found)
            outcome = await self._put_off(found, due_at_ms)
            if outcome is not None:
                return _json(RescheduleAnswer(outcomes=(outcome,)))
        if found and await self._is_stored(message_id, sees):
            return _json(RescheduleAnswer(outcomes=(Rescheduling.TOO_LATE,)))
        raise _not_delayed(wanted.message_id)

    async def _waiting(self, newest: Sequence[Found]) -> list[JsonWaiting]:
        """The messages of these places; only the last ones if they are too many or too large."""
        messages: list[JsonWaiting] = []
        room_bytes = LISTED_BYTES_MAX
        for one in newest[: -SUBJECTS_SHOWN_MAX - 1 : -1]:
            subject, message, damage = one.message.subject, None, None
            if one.state is DelayedState.PENDING:
                try:
                    record = await self._look_on(partial(self._query.record, one.message))
                    room_bytes -= len(record)
                    if room_bytes < 0 and messages:
                        break
                    message = record_to_json(subject, record, 0)
                except CorruptionError as error:  # its place and due time are known
                    damage = error_answer(error)
            messages.append(JsonWaiting(subject=subject, message=message, damage=damage))
        return messages[::-1]

    async def _take_back(
        self,
        ids: Sequence[bytes],
        found: Mapping[bytes, list[Found] | HeldError],
        sees: Callable[[str], bool],
    ) -> list[Cancellation | None]:
        """The outcome of each message; None for one that may be at another place by now.

        Nothing is cancelled if damage may hide one of them.
        """
        known: list[list[Found]] = []
        for message_id in ids:
            some = found[message_id]
            if isinstance(some, HeldError):
                if not await self._is_stored(message_id, sees):
                    raise some
                some = []
            known.append(some)
        # The states of the others are final; a message that was often rescheduled was at many places.
        pending = [one for some in known for one in some if one.state is DelayedState.PENDING]
        states = dict(zip(pending, await self._cancel(pending), strict=True)) if any(known) else {}
        return [
            _cancellation([(one, states.get(one, one.state)) for one in some]) for some in known
        ]

    async def _put_off(self, found: Sequence[Found], due_at_ms: int) -> Rescheduling | None:
        """Reschedule a message at these places; returns None if it may be at another place by now."""
        pending = [one.message for one in found if one.state is DelayedState.PENDING]
        if not pending:
            await self._cancel(())  # an empty commit: afterwards the message's state is durable
            return _rescheduling([one.state for one in found])
        last = pending[-1]
        if last.due_at_ms == due_at_ms:
            return Rescheduling.RESCHEDULED
        frame = await self._look_on(lambda: self._query.rescheduled_frame(last, due_at_ms))
        done: asyncio.Future[Placed] = asyncio.get_running_loop().create_future()
        self._broker.writer.submit(frame, partial(make_known, done))
        return Rescheduling.RESCHEDULED if (await done).physical_offset else None

    def _find(
        self, ids: Sequence[bytes], due_at_ms: int | None, sees: Callable[[str], bool]
    ) -> dict[bytes, list[Found] | HeldError]:
        """Find the places of messages; those not found at the expected due time are searched for in all buckets."""
        if due_at_ms is None:
            return _seen(self._query.find_all(ids), sees)
        found = _seen(self._query.find_all(ids, due_at_ms=due_at_ms), sees)
        elsewhere = [
            message_id
            for message_id, some in found.items()
            if not isinstance(some, HeldError)
            and all(one.state is DelayedState.RESCHEDULED for one in some)
        ]
        if not elsewhere:
            return found
        return found | _seen(self._query.find_all(elsewhere), sees)

    async def _cancel(
        self,
        found: Sequence[Found],
        *,
        withdrawn: WithdrawnIds = NOTHING_WITHDRAWN,
    ) -> list[DelayedState | None]:
        """Cancel in the writer's thread: on return this is durable, and so are the states found before."""
        states: list[DelayedState | None] = []
        for first in range(0, max(1, len(found)), CANCELLED_MAX):
            places = [_cancelled(one) for one in found[first : first + CANCELLED_MAX]]
            done: asyncio.Future[list[DelayedState | None]] = (
                asyncio.get_running_loop().create_future()
            )
            on_done = partial(make_known, done)
            self._broker.delayed.changes.cancel(places, on_done, withdrawn)
            states += await done
        return states

    async def _is_stored(self, message_id: bytes, sees: Callable[[str], bool]) -> bool:
        """Whether the message is in a consume queue: released, or never delayed."""
        search = self._broker.query.search
        return bool((await self._look_on(lambda: search.by_id(message_id, 1, sees))).found)

    async def _look(self, look: Callable[[], T]) -> T:
        """The first search of a request; refused if too many searches are running."""
        if self._looks.locked():
            raise BusyError(
                f"{LOOKS_MAX} searches of delayed messages are running; allowed: {LOOKS_MAX}",
                retry_after_s=1.0,
            )
        return await self._look_on(look)

    async def _look_on(self, look: Callable[[], T]) -> T:
        """A further search, which waits for the others: a request that has made a change is not refused."""
        async with self._looks:
            return await asyncio.to_thread(look)


def _newest_of_subjects(found: Sequence[Found]) -> list[Found]:
    """The newest place in each subject."""
    newest: dict[str, Found] = {}
    for one in found:
        newest.pop(one.message.subject, None)
        newest[one.message.subject] = one
    return list(newest.values())


def _cancelled(found: Found) -> Cancelled:
    message = found.message
    return Cancelled(
        message.bucket, message.sequence, message.source, message.subject, message.message_id
    )


def _seen(
    found: Mapping[bytes, list[Found] | HeldError], sees: Callable[[str], bool]
) -> dict[bytes, list[Found] | HeldError]:
    return {
        message_id: some
        if isinstance(some, HeldError)
        else [one for one in some if sees(one.message.subject)]
        for message_id, some in found.items()
    }


def _cancellation(found: Sequence[tuple[Found, DelayedState | None]]) -> Cancellation | None:
    """The outcome for an id from all its places; None if it is unknown.

    If several subjects have a message with this id, the id is cancelled when all of them are.
    """
    by_subject: dict[str, list[DelayedState | None]] = {}
    for one, state in found:
        by_subject.setdefault(one.message.subject, []).append(state)
    outcomes = [_outcome(states) for states in by_subject.values()]
    if not outcomes:
        return Cancellation.UNKNOWN
    if None in outcomes:
        return None
    is_late = Cancellation.TOO_LATE in outcomes
    return Cancellation.TOO_LATE if is_late else Cancellation.CANCELLED


def _outcome(states: Sequence[DelayedState | None]) -> Cancellation | None:
    """The outcome for a message from all its places; None if the place after a rescheduling is unknown."""
    ends = [state for state in states if state is not DelayedState.RESCHEDULED]
    if not ends:
        return None
    return Cancellation.CANCELLED if ends[-1] is DelayedState.CANCELLED else Cancellation.TOO_LATE


def _rescheduling(states: Sequence[DelayedState]) -> Rescheduling | None:
    """The outcome of a rescheduling for a message that is not pending."""
    ends = [state for state in states if state is not DelayedState.RESCHEDULED]
    if not ends:
        return None
    return Rescheduling.CANCELLED if ends[-1] is DelayedState.CANCELLED else Rescheduling.TOO_LATE


def _theirs(request: Request, subject: str | None) -> Callable[[str], bool]:
    """A test for subjects that the request is about; the broker's own copies belong to groups.

    Raises `RequestRefusedError` (403) if the caller may send to none of them, even if there are no such messages.
    """
    if subject is not None:
        check_not_own(check_name(subject, field="subject"))
        check_subject(request.scope, subject)
        return lambda name: name == subject
    caller_of(request.scope).check_any(route_of(request.scope).roles)
    sees = sight(request.scope)
    return lambda name: sees(name) and not name.startswith(OWN_PREFIX)


def _not_delayed(message_id: str) -> NotFoundError:
    return NotFoundError(
        f"message {message_id} is not delayed: it never was, or it was released long ago",
        field="message_id",
        value=message_id,
        remedy="`qmq message show` looks for it everywhere.",
    )


def _named(subject: str | None) -> str:
    if subject is not None:
        return subject
    raise InvalidMessageError(
        field="subject",
        limit="the subject of all messages of the request, if they are withdrawn",
        value="none",
        remedy="Name it; messages of several subjects need several requests.",
    )


def _check_one_subject(found: Sequence[Found]) -> None:
    subjects = {one.message.subject for one in found}
    if len(subjects) > 1:
        raise InvalidMessageError(
            field="subject",
            limit="the subject of the message, if several have one with its id",
            value=shorten(", ".join(sorted(subjects))),
            remedy="Name one of them, in the request as `subject` and in a command with --subject.",
        )


def _question(request: Request) -> tuple[str | None, int, int]:
    subject = request.query_params.get("subject")
    if subject is not None:
        check_name(subject, field="subject")
    return subject, number(request, "from", default=0), number(request, "to", default=NUMBER_MAX)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON_CONTENT_TYPE)
