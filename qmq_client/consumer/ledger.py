"""The outcomes that a consumer still has to send to the broker: collected, joined to ranges, sent and repeated.

Any thread may add outcomes at any time; `drain` takes out the entries of one request, and
`put_back` returns those that could not be sent. When an answer was lost, the broker may have
applied the outcomes: they are sent again, and a refusal as stale then proves nothing and is not
reported. Otherwise stale outcomes are reported to the handler's owner, and new dead letters are
logged. A request that is refused for its content is halved until only the invalid outcome is left.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from qmq_client.consumer.counters import Counters
from qmq_client.consumer.delivery import Outcome, Received, Verdict
from qmq_client.consumer.error_texts import error_text, in_one_line
from qmq_client.consumer.handler import Handler, OnStale, StaleDelivery
from qmq_client.consumer.identity import Identity
from qmq_client.consumer.options import ConsumerOptions
from qmq_client.errors import BrokerBusyError, BrokerRefusedError, TransportError
from qmq_client.transport.port import Transport
from qmq_client.wire import requests


def pull_request(
    options: ConsumerOptions,
    identity: Identity,
    *,
    max_messages: int,
    wait_ms: int,
    settlements: tuple[requests.Settlement, ...] = (),
) -> requests.PullRequest:
    """Pull messages, and send the outcomes of earlier ones."""
    return requests.PullRequest(
        subject=options.subject,
        group=options.group,
        consumer=identity.name,
        max_messages=max_messages,
        wait_ms=wait_ms,
        lease_ms=options.lease_ms,
        max_attempts=options.max_attempts,
        start=str(options.start),
        settlements=settlements,
        tags=_tags(options),
        ordered=options.ordered or UNSET,
        at_most_once=options.at_most_once or UNSET,
        broadcast=_member(options, identity),
        backoff=_backoff(options),
    )


def settle_request(
    options: ConsumerOptions, consumer_id: str, settlements: tuple[requests.Settlement, ...]
) -> requests.SettleRequest:
    """Send the outcomes of messages."""
    return requests.SettleRequest(
        subject=options.subject,
        group=options.group,
        consumer=consumer_id,
        settlements=settlements,
        broadcast=_broadcast(options),
    )


def _tags(options: ConsumerOptions) -> requests.Tags | UnsetType:
    if not options.tags and not options.all_tags:
        return UNSET
    return requests.Tags(any=options.tags, all=options.all_tags)


def _broadcast(options: ConsumerOptions) -> Any:
    if not options.broadcast:
        return UNSET
    return "named" if options.broadcast == "named" else "ephemeral"


def _member(options: ConsumerOptions, identity: Identity) -> requests.BroadcastMember | UnsetType:
    if not options.broadcast:
        return UNSET
    return requests.BroadcastMember(kind=_broadcast(options), instance=identity.instance)


def _backoff(options: ConsumerOptions) -> requests.Backoff | UnsetType:
    if options.backoff is None:
        return UNSET
    return requests.Backoff(
        first_ms=options.backoff.first_ms,
        factor=options.backoff.factor,
        max_ms=options.backoff.max_ms,
    )


_LOG: Final = logging.getLogger("qmq.consumer")
#: Statuses caused by the settlements themselves, not by the sender or the address.
_NEVER_TAKEN: Final = frozenset({400, 413, 422})


class Settling:
    """Sends the outcomes of one consumer. Thread safe."""

    def __init__(
        self, handler: Handler, ledger: Ledger, *, counters: Counters, identity: Identity
    ) -> None:
        self._handler = handler
        self._options = handler.options
        self._ledger = ledger
        self._counters = counters
        self._identity = identity

    def send(self, transport: Transport, outgoing: Outgoing) -> int:
        """Send outcomes; returns how many were sent. Raises `TransportError` if they must be sent again.

        Outcomes that the broker never accepts are dropped: the leases end, and the messages are redelivered.
        """
        request = settle_request(self._options, self._identity.name, outgoing.settlements)
        try:
            answer = transport.settle(request)
        except BrokerRefusedError as error:
            if error.status not in _NEVER_TAKEN:
                raise
            count = len(outgoing.entries)
            if count > 1:
                halves = outgoing.entries[: count // 2], outgoing.entries[count // 2 :]
                return sum(self.send(transport, as_outgoing(half)) for half in halves)
            self._counters.add("settle_refused")
            first = outgoing.entries[0].received
            _LOG.error(
                "settle_refused consumer=%s message_id=%s error=%s",
                self._options.name,
                first.message_id,
                error,
            )
            return 0
        self.report(outgoing, answer.stale)
        return len(outgoing.entries)

    def put_back(self, outgoing: Outgoing, error: TransportError) -> None:
        """Keep the outcomes that could not be sent."""
        is_uncertain = not isinstance(error, BrokerBusyError | BrokerRefusedError)
        self._ledger.put_back(outgoing, is_uncertain=is_uncertain)

    def report(self, outgoing: Outgoing, stale: Sequence[tuple[int, int, int]]) -> None:
        """Log the broker's answer: stale outcomes and new dead letters."""
        outcomes, extensions = log_answer(self._options, outgoing, stale)
        if stale:
            self._counters.add("stale", len(outcomes))
            self._counters.add("lost_leases", len(extensions))
        if outcomes and self._handler.on_stale is not None:
            self._call_on_stale(self._handler.on_stale, tuple(map(self._stale_delivery, outcomes)))

    def _call_on_stale(self, on_stale: OnStale, stale: tuple[StaleDelivery, ...]) -> None:
        try:
            on_stale(stale)
        except Exception as error:  # the application's code, called last
            _LOG.warning(
                "on_stale_failed consumer=%s error=%s", self._options.name, error_text(error)
            )

    def _stale_delivery(self, entry: Entry) -> StaleDelivery:
        received = entry.received
        return StaleDelivery(
            subject=self._options.subject,
            group=self._options.group,
            message_id=received.message_id,
            sequence=received.sequence,
            attempt=received.attempt,
            outcome=entry.outcome.verdict.value if entry.outcome is not None else "",
        )


def log_answer(
    options: ConsumerOptions, sent: Outgoing, stale: Sequence[tuple[int, int, int]]
) -> tuple[list[Entry], list[Entry]]:
    """Log the refused outcomes of an answer; returns the outcomes and the extensions that came too late."""
    outcomes, extensions = stale_entries(sent, stale)
    for what, entries in (("stale_outcomes", outcomes), ("lost_leases", extensions)):
        if entries:
            first = entries[0].received
            _LOG.warning(
                "%s consumer=%s messages=%d first_message_id=%s attempt=%d",
                what,
                options.name,
                len(entries),
                first.message_id,
                first.attempt,
            )
    # Most answers are about acks alone.
    if any(one.nacks or one.rejects for one in sent.settlements):
        late = set(outcomes)
        _log_dead(options, [one for one in sent.entries if one not in late])
    return outcomes, extensions


def _log_dead(options: ConsumerOptions, taken: Sequence[Entry]) -> None:
    """A line for each new dead letter, with the broker's reason."""
    for entry in taken:
        received, outcome = entry.received, entry.outcome
        if outcome is None or not outcome.is_dead_letter(received.attempt, options.max_attempts):
            continue
        _LOG.error(
            "dead_letter consumer=%s message_id=%s sequence=%d attempt=%d reason=%s error=%s",
            options.name,
            received.message_id,
            received.sequence,
            received.attempt,
            "rejected" if outcome.verdict is Verdict.REJECT else "attempts_used_up",
            in_one_line(outcome.text),
        )


#: A range takes at most 20 bytes and a nack 600, so a request stays below the 1 MiB of a control
#: frame.
_ENTRIES_PER_REQUEST_MAX: Final = 1_500


class Entry(msgspec.Struct, eq=False, gc=False):
    """One delivery with its outcome; None asks for a longer lease of `lease_ms`."""

    received: Received
    outcome: Outcome | None
    lease_ms: int = 0
    #: Whether it was sent before without an answer.
    is_uncertain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """The entries of one request."""

    entries: tuple[Entry, ...]
    settlements: tuple[requests.Settlement, ...]


@dataclass(slots=True)
class _Sorted:
    acks: list[int] = field(default_factory=list)
    nacks: list[tuple[int, Outcome]] = field(default_factory=list)
    rejects: list[tuple[int, Outcome]] = field(default_factory=list)
    extends: list[tuple[int, int]] = field(default_factory=list)


_Value = TypeVar("_Value")
NOTHING: Final = Outgoing(entries=(), settlements=())


class Ledger:
    """Outcomes of one consumer that the broker has not confirmed. Thread safe."""

    def __init__(self, *, is_kept: bool = True) -> None:
        """`is_kept` False: outcomes are counted but not sent, for at most once delivery."""
        self._is_kept = is_kept
        self._lock = threading.Lock()
        self._entries: list[Entry] = []
        #: Wakes the settling thread.
        self._has_entries = threading.Event()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, received: Iterable[Received], outcome: Outcome) -> int:
        """Record the outcome of deliveries that have none yet; returns how many."""
        count = 0
        with self._lock:
            for one in received:
                if one.is_settled:
                    continue
                one.is_settled = True
                count += 1
                if self._is_kept:
                    self._entries.append(Entry(one, outcome))
            self._notify()
        return count

    def extend(self, received: Iterable[Received], lease_ms: int) -> None:
        """Ask for longer leases of deliveries that have no outcome yet."""
        if not self._is_kept:
            return
        with self._lock:
            self._entries += [Entry(one, None, lease_ms) for one in received if not one.is_settled]
            self._notify()

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is something to send, or for `wake`; returns whether there is."""
        self._has_entries.wait(timeout_s)
        return bool(self._entries)

    def wake(self) -> None:
        """End a `wait` at once."""
        self._has_entries.set()

    def drain(self) -> Outgoing:
        """Take out the entries of one request, oldest first."""
        if not self._entries:
            return NOTHING
        with self._lock:
            taken = self._entries[:_ENTRIES_PER_REQUEST_MAX]
            del self._entries[:_ENTRIES_PER_REQUEST_MAX]
            if not self._entries:
                self._has_entries.clear()
        # A lease need not be extended once its outcome is known.
        taken = [entry for entry in taken if entry.outcome or not entry.received.is_settled]
        return as_outgoing(taken)

    def put_back(self, unsent: Outgoing, *, is_uncertain: bool) -> None:
        """Keep unsent entries for the next request."""
        if not unsent.entries:
            return
        for entry in unsent.entries:
            entry.is_uncertain = entry.is_uncertain or is_uncertain
        with self._lock:
            self._entries[:0] = unsent.entries
            self._notify()

    def _notify(self) -> None:
        if self._entries and not self._has_entries.is_set():
            self._has_entries.set()


def as_outgoing(entries: Sequence[Entry]) -> Outgoing:
    """These entries in the form of one request."""
    return Outgoing(entries=tuple(entries), settlements=_settlements(entries))


def stale_entries(
    sent: Outgoing, stale: Sequence[tuple[int, int, int]]
) -> tuple[list[Entry], list[Entry]]:
    """The sent outcomes and extensions that were refused because they came too late.

    Leaves out uncertain ones, and extensions of deliveries that have an outcome by now.
    """
    refused = {
        (token, pull_sequence)
        for token, first, after in stale
        for pull_sequence in range(first, min(after, first + _ENTRIES_PER_REQUEST_MAX))
    }
    outcomes: list[Entry] = []
    extensions: list[Entry] = []
    for entry in sent.entries if refused else ():
        received = entry.received
        if entry.is_uncertain or (received.token, received.pull_sequence) not in refused:
            continue
        if entry.outcome is not None:
            outcomes.append(entry)
        elif not received.is_settled:
            extensions.append(entry)
    return outcomes, extensions


def as_ranges(numbers: Iterable[int]) -> list[requests.Range]:
    """Numbers as half open ranges, in order; repeated ones count once."""
    ranges: list[requests.Range] = []
    first = after = -1
    for number in sorted(numbers):
        if number == after:
            after += 1
        elif number > after or first < 0:
            if first >= 0:
                ranges.append((first, after))
            first, after = number, number + 1
    if first >= 0:
        ranges.append((first, after))
    return ranges


def _settlements(entries: Iterable[Entry]) -> tuple[requests.Settlement, ...]:
    by_token: dict[int, _Sorted] = {}
    for entry in entries:
        received, outcome = entry.received, entry.outcome
        group = by_token.get(received.token)
        if group is None:
            group = by_token[received.token] = _Sorted()
        if outcome is None:
            group.extends.append((received.pull_sequence, entry.lease_ms))
        elif outcome.verdict is Verdict.ACK:
            group.acks.append(received.pull_sequence)
        elif outcome.verdict is Verdict.NACK:
            group.nacks.append((received.pull_sequence, outcome))
        else:
            group.rejects.append((received.pull_sequence, outcome))
    return tuple(_settlement(token, group) for token, group in by_token.items())


def _settlement(token: int, group: _Sorted) -> requests.Settlement:
    return requests.Settlement(
        token=token,
        acks=tuple(as_ranges(group.acks)),
        nacks=tuple(
            requests.Nack(
                range=pulls,
                delay_ms=outcome.delay_ms,
                error=outcome.text,
                was_begun=UNSET if outcome.was_tried else False,
            )
            for outcome, numbers in _by_value(group.nacks).items()
            for pulls in as_ranges(numbers)
        ),
        rejects=tuple(
            requests.Reject(range=pulls, reason=outcome.text)
            for outcome, numbers in _by_value(group.rejects).items()
            for pulls in as_ranges(numbers)
        ),
        extends=tuple(
            requests.Extend(range=pulls, lease_ms=lease_ms)
            for lease_ms, numbers in _by_value(group.extends).items()
            for pulls in as_ranges(numbers)
        ),
    )


def _by_value(pairs: Iterable[tuple[int, _Value]]) -> dict[_Value, list[int]]:
    by_value: dict[_Value, list[int]] = {}
    for number, value in pairs:
        by_value.setdefault(value, []).append(number)
    return by_value
