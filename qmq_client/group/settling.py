"""Decides the actions that follow from a consumer's settlements, and from leases that end by themselves.

Decides only: reads the state of a group and returns actions for the log. A range is settled as far
as this consumer still holds it under the token it names; the rest is reported as stale. A range
that was acked before under the same token counts as settled again, because an answer can get lost.
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
#: The same where the memory of all groups is used up: what is in flight must fit all the same.
ERROR_CHARACTERS_MIN: Final = 50
#: What is returned untried again waits at least so long: a consumer that returns everything
#: would get it again and again. The first time it is delivered again at once, for the consumer that takes over from a
#: consumer that stops.
UNTRIED_WAIT_MS: Final = 1_000

Stale = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What decides when a message comes back."""

    now_ms: int
    backoff: ExponentialBackoff
    #: Gives random numbers from 0 … 1.
    draw: Callable[[], float]
    #: However often it is extended, a lease ends at most this long after the message was given.
    held_ms: int
    #: As much is kept of what a consumer says.
    error_characters: int = ERROR_CHARACTERS_MAX


@dataclass(slots=True, kw_only=True)
class Plan:
    """Actions to write and apply, and what to tell the consumer."""

    actions: list[Action] = field(default_factory=list)
    #: Messages whose settlement was accepted.
    settled: int = 0
    #: (token, first, next) of ranges that were refused.
    stale: list[Stale] = field(default_factory=list)


def plan_settlements(
    state: GroupState, consumer: str, settlements: Iterable[Settlement], terms: Terms
) -> Plan:
    """What follows from these settlements; for each message the first one named counts."""
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
    """What follows when these leases ended by themselves."""
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
    """The settlements of one token in progress: what is not decided, and the actions so far."""

    def __init__(
        self, state: GroupState, consumer: str, token: int, terms: Terms, plan: Plan
    ) -> None:
        self._state = state
        self._consumer = consumer
        self._log = state.consumer(consumer)
        self._token = token
        self._terms = terms
        self._plan = plan
        #: What is left for settlements still to come: each message is looked at once, however many
        #: ranges name it.
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
        # A lease from a snapshot of an older broker does not know when it began.
        if not lease.given_at_ms:
            return wanted_ms
        return min(wanted_ms, lease.given_at_ms + self._terms.held_ms)

    def _decide(self, first: int, next_: int, *, repeats_acked: bool = False) -> list[Lease]:
        """What this consumer holds of the range, for one outcome; the rest is recorded as stale."""
        if self._unextended is not None:
            self._unextended.take(first, next_)
        found = self._undecided.take(first, next_)
        return self._under_token(first, next_, found, repeats_acked=repeats_acked)

    def _under_token(
        self, first: int, next_: int, found: Sequence[Lease], *, repeats_acked: bool = False
    ) -> list[Lease]:
        """Those of the leases in this range that are under the token; the rest is stale."""
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
        """The fields with which every action on a range of this consumer begins."""
        state = self._state
        return self._terms.now_ms, state.subject, state.group, self._consumer, first, next_


def shorten_error(text: str, characters_max: int = ERROR_CHARACTERS_MAX) -> str:
    """A consumer's text, bounded, and without what cannot be stored as UTF-8."""
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
