"""Decides the actions that follow from a consumer's settlements, and from leases that end by themselves.

Only decides: reads the state of a group and returns actions for the log. A range is settled as far
as this consumer still holds it under the given token; the rest is reported as stale. A range that
was acked before under the same token counts as settled again, because an answer can get lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from qmq_client.group.actions import Acked, Action, Dead, Expired, Extended, Nacked
from qmq_client.group.dead_letters import ATTEMPTS_USED_UP, REJECTED
from qmq_client.group.history import LEASE_ENDED
from qmq_client.group.leases import Lease
from qmq_client.group.ranges import RangeSet, Spans
from qmq_client.group.state import NO_RETRY, GroupState
from qmq_client.wire.backoff import ExponentialBackoff
from qmq_client.wire.requests import Nack, Settlement

#: Characters kept of a consumer's error text: enough for type, message and place.
ERROR_CHARACTERS_MAX: Final = 500
#: The same when the memory of all groups is used up, because messages in flight must still fit.
ERROR_CHARACTERS_MIN: Final = 50
#: Least wait of a message that is returned untried again: otherwise a consumer that returns every
#: message would get it in a loop. After the first return it is redelivered at once, for the
#: consumer that replaces a stopping one.
UNTRIED_WAIT_MS: Final = 1_000

Stale = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The settings that decide when a message is redelivered."""

    now_ms: int
    backoff: ExponentialBackoff
    #: Returns random numbers from 0 … 1.
    draw: Callable[[], float]
    #: Longest time from a delivery to the end of its lease, including extensions.
    held_ms: int
    #: Most characters of a consumer's error text.
    error_characters: int = ERROR_CHARACTERS_MAX


@dataclass(slots=True, kw_only=True)
class Plan:
    """Actions to write and apply, and the answer for the consumer."""

    actions: list[Action] = field(default_factory=list)
    #: Messages whose settlement was accepted.
    settled: int = 0
    #: (token, first, next) of ranges that were refused.
    stale: list[Stale] = field(default_factory=list)


def plan_settlements(
    state: GroupState, consumer: str, settlements: Iterable[Settlement], terms: Terms
) -> Plan:
    """The plan for these settlements; for each message the first one counts."""
    plan = Plan()
    by_token: dict[int, _OfToken] = {}
    for settlement in settlements:
        one = by_token.get(settlement.token)
        if one is None:
            one = by_token[settlement.token] = _OfToken(
                state, consumer, settlement.token, terms, plan
            )
        one.ack(settlement.acks)
        for nack in settlement.nacks:
            one.nack(nack)
        for reject in settlement.rejects:
            one.reject(reject.range, reject.reason)
        for extend in settlement.extends:
            one.extend(extend.range, extend.lease_ms)
    return plan


def plan_ended_leases(
    state: GroupState, ended: Sequence[tuple[str, Lease]], terms: Terms
) -> list[Action]:
    """The actions for expired leases."""
    actions: list[Action] = []
    for consumer, lease in ended:
        is_last = lease.attempt >= state.max_attempts
        if is_last:
            actions += _dead(state, lease, ATTEMPTS_USED_UP, LEASE_ENDED, terms.now_ms)
        wait_ms = terms.backoff.delay_ms(lease.attempt, terms.draw())
        actions.append(
            Expired(
                at_ms=terms.now_ms,
                subject=state.subject,
                group=state.group,
                consumer=consumer,
                first=lease.first,
                next=lease.next,
                retry_at_ms=NO_RETRY if is_last else terms.now_ms + wait_ms,
            )
        )
    return actions


class _OfToken:
    """The settlements of one token in progress: the undecided leases, and the actions so far."""

    def __init__(
        self, state: GroupState, consumer: str, token: int, terms: Terms, plan: Plan
    ) -> None:
        self._state = state
        self._consumer = consumer
        self._log = state.consumer(consumer)
        self._token = token
        self._terms = terms
        self._plan = plan
        #: Leases left for further settlements: each message is used once, even if several ranges name it.
        self._undecided: Spans[Lease] = Spans() if self._log is None else self._log.leases().copy()
        #: The same for extensions, from the first one on.
        self._unextended: Spans[Lease] | None = None

    def ack(self, ranges: Iterable[tuple[int, int]]) -> None:
        merged = RangeSet()
        for first, next_ in ranges:
            merged.add(first, next_)
        for first, next_ in merged:
            held = RangeSet()
            for lease in self._decide(first, next_, repeats_acked=True):
                held.add(lease.first, lease.next)
            self._plan.actions += [Acked(*self._where(*part)) for part in held]

    def nack(self, nack: Nack) -> None:
        error = shorten_error(nack.error, self._terms.error_characters)
        terms = self._terms
        for lease in self._decide(*nack.range):
            wait_ms = nack.delay_ms
            if wait_ms is None:
                wait_ms = terms.backoff.delay_ms(lease.attempt, terms.draw())
            if nack.was_begun is False:
                if lease.untried:
                    wait_ms = max(wait_ms, UNTRIED_WAIT_MS)
                self._nack_lease(lease, terms.now_ms + wait_ms, error, was_tried=False)
                continue
            is_last = lease.attempt >= self._state.max_attempts
            if is_last:
                self._bury(lease, ATTEMPTS_USED_UP, error)
            self._nack_lease(lease, NO_RETRY if is_last else terms.now_ms + wait_ms, error)

    def reject(self, given: tuple[int, int], reason: str) -> None:
        reason = shorten_error(reason, self._terms.error_characters)
        for lease in self._decide(*given):
            self._bury(lease, REJECTED, reason)
            self._nack_lease(lease, NO_RETRY, reason)

    def extend(self, given: tuple[int, int], lease_ms: int) -> None:
        if self._unextended is None:
            self._unextended = self._undecided.copy()
        for lease in self._under_token(*given, self._unextended.take(*given)):
            until_ms = self._until_ms(lease, lease_ms)
            where = self._where(lease.first, lease.next)
            self._plan.actions.append(Extended(*where, lease_until_ms=until_ms))

    def _until_ms(self, lease: Lease, lease_ms: int) -> int:
        wanted_ms = self._terms.now_ms + lease_ms
        # A lease from a snapshot of an older broker has no begin time.
        if not lease.given_at_ms:
            return wanted_ms
        return min(wanted_ms, lease.given_at_ms + self._terms.held_ms)

    def _decide(self, first: int, next_: int, *, repeats_acked: bool = False) -> list[Lease]:
        """The held part of the range, for one outcome; the rest is recorded as stale."""
        if self._unextended is not None:
            self._unextended.take(first, next_)
        found = self._undecided.take(first, next_)
        return self._under_token(first, next_, found, repeats_acked=repeats_acked)

    def _under_token(
        self, first: int, next_: int, found: Sequence[Lease], *, repeats_acked: bool = False
    ) -> list[Lease]:
        """The leases in this range under the token; the rest is stale."""
        plan, held = self._plan, RangeSet()
        leases = [lease for lease in found if lease.token == self._token]
        for lease in leases:
            held.add(lease.first, lease.next)
        stale = held.missing(first, next_)
        if repeats_acked and self._log is not None:
            log = self._log
            stale = [part for gap in stale for part in log.unacked(*gap, token=self._token)]
        plan.stale += [(self._token, *part) for part in stale]
        plan.settled += next_ - first - sum(part[1] - part[0] for part in stale)
        return leases

    def _bury(self, lease: Lease, reason: str, error: str) -> None:
        self._plan.actions += _dead(self._state, lease, reason, error, self._terms.now_ms)

    def _nack_lease(
        self, lease: Lease, retry_at_ms: int, error: str, *, was_tried: bool = True
    ) -> None:
        where = self._where(lease.first, lease.next)
        self._plan.actions.append(
            Nacked(*where, retry_at_ms=retry_at_ms, error=error, was_tried=was_tried)
        )

    def _where(self, first: int, next_: int) -> tuple[int, str, str, str, int, int]:
        """The first fields of every action on a range of this consumer."""
        state = self._state
        return self._terms.now_ms, state.subject, state.group, self._consumer, first, next_


def shorten_error(text: str, characters_max: int = ERROR_CHARACTERS_MAX) -> str:
    """A consumer's text, bounded, and without characters that UTF-8 cannot encode."""
    return text[:characters_max].encode(errors="replace").decode()


def _dead(state: GroupState, lease: Lease, reason: str, error: str, now_ms: int) -> list[Action]:
    return [
        Dead(
            at_ms=now_ms,
            subject=state.subject,
            group=state.group,
            sequence=sequence,
            attempts=lease.attempt,
            reason=reason,
            error=error,
        )
        for sequence in range(lease.first_sequence, lease.next_sequence)
    ]
