"""Settlements in portions that do not block other requests: each is settled in one iteration of the loop.

Acks are merged with their neighbours first. Messages with another outcome may each be redelivered
or become a dead letter; so ranges of held messages are split, each part used once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

import msgspec

from qmq_client.group.ranges import RangeSet
from qmq_client.group.state import GroupState
from qmq_client.wire.requests import Extend, Nack, Reject, Settlement

#: Ranges that are settled in one iteration: some ten milliseconds.
RANGES_MAX: Final = 100
#: Messages of one iteration that may become dead letters: also some ten milliseconds.
MESSAGES_MAX: Final = 500

_Outcome = TypeVar("_Outcome", Nack, Reject)
_Range = tuple[int, int]


def in_slices(
    settlements: Iterable[Settlement],
    state: GroupState | None,
    consumer: str,
    refuse: Callable[[int, _Range], object],
) -> Iterator[Settlement]:
    """The same settlements, in order; acks of each token first.

    `refuse` gets the token and range of a second extension of the same messages.
    """
    log = None if state is None else state.consumer(consumer)
    leases = [] if log is None else list(log.leases())
    held = (leases[0].first, leases[-1].next) if leases else (0, 0)
    dying_max = MESSAGES_MAX if state is None else state.dead.changed_at_once(MESSAGES_MAX)
    for one in settlements:
        if _is_short(one, dying_max):
            yield one
            continue
        merged = RangeSet()
        for first, next_ in one.acks:
            merged.add(first, next_)
        for acks in _batches(((each, 0) for each in merged), dying_max):
            yield Settlement(token=one.token, acks=acks)
        for nacks in _batches(_cut(one.nacks, held, dying_max), dying_max):
            yield Settlement(token=one.token, nacks=nacks)
        for rejects in _batches(_cut(one.rejects, held, dying_max), dying_max):
            yield Settlement(token=one.token, rejects=rejects)
        for extends in _batches(((each, 0) for each in _once(one, refuse)), dying_max):
            yield Settlement(token=one.token, extends=extends)


def _is_short(one: Settlement, dying_max: int) -> bool:
    count = len(one.acks) + len(one.nacks) + len(one.rejects) + len(one.extends)
    if count > RANGES_MAX:
        return False
    others = [nack.range for nack in one.nacks] + [reject.range for reject in one.rejects]
    return sum(next_ - first for first, next_ in others) <= dying_max


_T = TypeVar("_T")


def _batches(weighed: Iterable[tuple[_T, int]], dying_max: int) -> Iterator[tuple[_T, ...]]:
    """Batches of at most `RANGES_MAX` ranges and of messages that may become dead letters."""
    batch: list[_T] = []
    messages = 0
    for one, weight in weighed:
        if batch and (len(batch) >= RANGES_MAX or messages + weight > dying_max):
            yield tuple(batch)
            batch, messages = [], 0
        batch.append(one)
        messages += weight
    if batch:
        yield tuple(batch)


def _cut(
    outcomes: Iterable[_Outcome], held: _Range, dying_max: int
) -> Iterator[tuple[_Outcome, int]]:
    """Each settlement, limited to the messages that the consumer holds."""
    seen = RangeSet()
    for outcome in outcomes:
        for (first, next_), is_new in _parts(outcome.range, held, seen):
            step = dying_max if is_new else next_ - first
            for begin in range(first, next_, step):
                part = (begin, min(next_, begin + step))
                weight = part[1] - part[0] if is_new else 0
                is_whole = part == outcome.range
                yield (
                    outcome if is_whole else msgspec.structs.replace(outcome, range=part),
                    weight,
                )


def _once(one: Settlement, refuse: Callable[[int, _Range], object]) -> Iterator[Extend]:
    """Extensions of messages that no earlier extension names: the first one of each message counts."""
    seen = RangeSet()
    for extend in one.extends:
        everything = (0, extend.range[1])
        for part, is_new in _parts(extend.range, everything, seen):
            if is_new:
                yield msgspec.structs.replace(extend, range=part)
            else:
                refuse(one.token, part)


def _parts(whole: _Range, held: _Range, seen: RangeSet) -> list[tuple[_Range, bool]]:
    """A range in parts, each with whether it may be held and was not named before."""
    first, next_ = whole
    new = seen.missing(max(first, held[0]), min(next_, held[1]))
    parts: list[tuple[_Range, bool]] = []
    for gap in new:
        if first < gap[0]:
            parts.append(((first, gap[0]), False))
        parts.append((gap, True))
        first = gap[1]
        seen.add(*gap)
    if first < next_:
        parts.append(((first, next_), False))
    return parts
