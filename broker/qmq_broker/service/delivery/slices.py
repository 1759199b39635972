"""Settlements in portions that do not block other requests: each is settled in one iteration of the loop.

An ack is merged with its neighbours before it costs anything. Every message of another outcome may come
back, or die, by itself; so ranges of what a consumer holds are cut, each part of them once.
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
#: Messages of one iteration that may die: as long.
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
    """At most `RANGES_MAX`, and so many messages that may die, at a time."""
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
    """Each with the messages that it may concern; beyond what is held, it concerns none."""
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
    """Extensions of what was not named by one before: of each message the first one counts."""
    seen = RangeSet()
    for extend in one.extends:
        everything = (0, extend.range[1])
        for part, is_new in _parts(extend.range, everything, seen):
            if is_new:
                yield msgspec.structs.replace(extend, range=part)
            else:
                refuse(one.token, part)


def _parts(whole: _Range, held: _Range, seen: RangeSet) -> list[tuple[_Range, bool]]:
    """A range in parts, and whether each is held, perhaps, and was not named before."""
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
