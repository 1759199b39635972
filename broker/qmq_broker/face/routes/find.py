"""Routes that find messages and show the history of one.

`GET /v1/messages?id=…` and `?subject=…&key=…&from=…&to=…`, and `GET /v1/messages/{id}/trace`. A
search reads the disk, so it runs outside the loop, a few at a time; afterwards the loop reads the
state of each message in its groups.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec

from qmq_broker.errors import BusyError, NotFoundError
from qmq_broker.face.routes.json_messages import JsonDelivered, record_to_json
from qmq_broker.service.broker import Broker
from qmq_broker.service.delivery.in_group import MessageInGroup
from qmq_broker.service.trace import Trace, TraceEvent
from qmq_broker.storage.index.key_search import FoundRecord, SearchResult, TimeRange
from qmq_client.wire.message_id import parse_message_id

#: Most simultaneous searches: each occupies a thread and the disk.
SEARCHES_MAX: Final = 2
_RETRY_AFTER_S: Final = 1.0
#: Groups whose state of a message is read in one iteration of the loop: some ten milliseconds.
_GROUPS_PER_STEP: Final = 50
#: Most places of one id whose history is shown. Usually there is one; repeats after the dedupe
#: window and other subjects with the same id add more.
TRACED_PLACES_MAX: Final = 10

T = TypeVar("T")


class JsonFound(JsonDelivered, frozen=True, kw_only=True, omit_defaults=True):
    """One message that was found, and where it is."""

    subject: str
    #: Offset of the record in the commit log.
    offset: int
    stored_at_ms: int
    #: Its state in each group of its subject; only if a message id was asked for.
    groups: Sequence[MessageInGroup] | None = None


class JsonSearch(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a search, newest first."""

    messages: list[JsonFound]
    #: Whether there are more than the requested `count`.
    has_more: bool
    #: Whether the search reached all messages; if not, the next three fields say how far it got.
    is_complete: bool
    #: Everything in the commit log below this offset was indexed.
    indexed_up_to: int
    #: Where the commit log ended.
    log_end: int
    #: Bytes that neither the index nor the search covered.
    unsearched_bytes: int


class JsonGroupTrace(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to the message in one group, oldest first, and where it is there now."""

    group: str
    events: Sequence[TraceEvent]
    #: None if the group no longer exists.
    now: MessageInGroup | None


class JsonPlaceTrace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One place where the message was stored, and its history from there on."""

    subject: str
    sequence: int
    #: Offset of the record in the commit log.
    offset: int
    stored_at_ms: int
    born_at_ms: int
    groups: Sequence[JsonGroupTrace]
    #: Beginning of the action log, if earlier events are no longer in it.
    history_from_ms: int | None = None
    #: Time up to which events were read, if there were too many.
    history_until_ms: int | None = None


class JsonTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a trace; more than one place if it was sent again after the dedupe window."""

    message_id: str
    places: Sequence[JsonPlaceTrace]
    #: Whether all events are listed; if not, the search or the action log did not reach far enough.
    is_complete: bool


class Finder:
    """Searches of one broker; belongs to the loop thread."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._running = 0

    async def by_id(self, message_id: str, count: int, sees: Callable[[str], bool]) -> JsonSearch:
        """All places of a message in subjects that the caller `sees`, with its state in groups."""
        result = await self._by_id(parse_message_id(message_id), count, sees)
        return _answer(
            result,
            [_found(one, await self._in_groups(one)) for one in result.found],
        )

    async def trace(self, message_id: str, sees: Callable[[str], bool]) -> JsonTrace:
        """The history of a message in subjects that the caller `sees`.

        Raises `NotFoundError` if a complete search found no place.
        """
        query = self._broker.query
        result = await self._by_id(parse_message_id(message_id), TRACED_PLACES_MAX, sees)
        traces = await self._run(
            lambda: [
                query.trace(one.subject, one.sequence, one.stored_at_ms) for one in result.found
            ]
        )
        if not result.found and result.is_complete:
            raise NotFoundError(
                f"there is no message {message_id}: it was never stored here, or retention has deleted it",
                field="message_id",
                value=message_id,
            )
        places = [
            _place(one, trace, await self._in_groups(one))
            for one, trace in zip(result.found, traces, strict=True)
        ]
        is_complete = result.is_complete and not result.has_more
        is_complete = is_complete and all(trace.is_complete for trace in traces)
        return JsonTrace(message_id=message_id, places=places, is_complete=is_complete)

    async def by_key(self, subject: str, key: str, times: TimeRange, count: int) -> JsonSearch:
        """Messages of a subject with this key, stored in this range of time."""
        search = self._broker.query.search
        result = await self._run(lambda: search.by_key(subject, key, times, count))
        return _answer(result, [_found(one) for one in result.found])

    async def _in_groups(self, one: FoundRecord) -> list[MessageInGroup]:
        now_ms = self._broker.time.now_ms()
        found: list[MessageInGroup] = []
        for each in self._broker.query.in_groups(one.subject, one.sequence, one.record, now_ms):
            found.append(each)
            if len(found) % _GROUPS_PER_STEP == 0:
                await asyncio.sleep(0)
        return found

    async def _by_id(
        self, message_id: bytes, count: int, sees: Callable[[str], bool]
    ) -> SearchResult:
        """All places of a message; if the log has none, its copies for long retries."""
        query = self._broker.query
        result = await self._run(lambda: query.search.by_id(message_id, count, sees))
        kept = None if result.found else query.copies.kept()
        if kept is not None:
            found, is_complete = await self._run(lambda: query.copies.by_id(message_id, kept))
            result.found += [one for one in query.copies.still_kept(found) if sees(one.subject)]
            result.is_uncertain = result.is_uncertain or not is_complete
        return result

    async def _run(self, search: Callable[[], T]) -> T:
        if self._running >= SEARCHES_MAX:
            raise BusyError(
                f"{self._running} searches are running; allowed: {SEARCHES_MAX}",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._running += 1
        try:
            return await asyncio.to_thread(search)
        finally:
            self._running -= 1


def _answer(result: SearchResult, messages: list[JsonFound]) -> JsonSearch:
    return JsonSearch(
        messages=messages,
        has_more=result.has_more,
        is_complete=result.is_complete,
        indexed_up_to=result.indexed_offset,
        log_end=result.next_offset,
        unsearched_bytes=result.unsearched_bytes,
    )


def _place(one: FoundRecord, trace: Trace, found: Sequence[MessageInGroup]) -> JsonPlaceTrace:
    now = {each.group: each for each in found}
    return JsonPlaceTrace(
        subject=one.subject,
        sequence=one.sequence,
        offset=one.physical_offset,
        stored_at_ms=one.stored_at_ms,
        born_at_ms=record_to_json(one.subject, one.record, one.sequence).born_at_ms,
        groups=[
            JsonGroupTrace(group=name, events=trace.events.get(name, []), now=now.get(name))
            for name in sorted(now.keys() | trace.events.keys())
        ],
        history_from_ms=trace.history_from_ms,
        history_until_ms=trace.history_until_ms,
    )


def _found(one: FoundRecord, groups: Sequence[MessageInGroup] | None = None) -> JsonFound:
    shown = record_to_json(one.subject, one.record, one.sequence)
    return JsonFound(
        **msgspec.structs.asdict(shown),
        subject=one.subject,
        offset=one.physical_offset,
        stored_at_ms=one.stored_at_ms,
        groups=groups,
    )
