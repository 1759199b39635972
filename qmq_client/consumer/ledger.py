"""Outcomes on their way to the broker: collected, joined to ranges, sent again when that failed.

Anything may be put in at any time from any thread; `drain` takes out what one request can carry, and
`put_back` returns what could not be sent. When an answer was lost, the broker may have done
the work: the same outcome is sent again, and a refusal as stale then proves nothing and is not
reported.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec
from msgspec import UNSET

from qmq_client.consumer.delivery import Outcome, Received, Verdict
from qmq_client.wire import requests

#: A range takes at most 20 bytes and a nack 600, so a request stays below the 1 MiB of a control
#: frame.
_ENTRIES_PER_REQUEST_MAX: Final = 1_500


class Entry(msgspec.Struct, eq=False, gc=False):
    """One delivery with its outcome; None asks for a longer lease of `lease_ms`."""

    received: Received
    outcome: Outcome | None
    lease_ms: int = 0
    #: Sent before, and no answer came.
    is_uncertain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """What one request carries."""

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
        """`is_kept` False: outcomes are counted, and nobody hears of them; for at most once."""
        self._is_kept = is_kept
        self._lock = threading.Lock()
        self._entries: list[Entry] = []
        #: For the settling thread.
        self._has_entries = threading.Event()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, received: Iterable[Received], outcome: Outcome) -> int:
        """Note the outcome of deliveries; those that have one already are left out. How many."""
        with self._lock:
            new = [one for one in received if not one.is_settled]
            for one in new:
                one.is_settled = True
                if self._is_kept:
                    self._entries.append(Entry(one, outcome))
            self._tell()
            return len(new)

    def extend(self, received: Iterable[Received], lease_ms: int) -> None:
        """Ask for longer leases of deliveries that have no outcome yet."""
        if not self._is_kept:
            return
        with self._lock:
            self._entries += [Entry(one, None, lease_ms) for one in received if not one.is_settled]
            self._tell()

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is something to send, or for `wake`; whether there is."""
        self._has_entries.wait(timeout_s)
        return bool(self._entries)

    def wake(self) -> None:
        """End a `wait` at once."""
        self._has_entries.set()

    def drain(self) -> Outgoing:
        """Take out what one request can carry, oldest first."""
        if not self._entries:
            return NOTHING
        with self._lock:
            taken = self._entries[:_ENTRIES_PER_REQUEST_MAX]
            del self._entries[:_ENTRIES_PER_REQUEST_MAX]
            if not self._entries:
                self._has_entries.clear()
        # A lease need not be prolonged when its outcome is known by now.
        taken = [entry for entry in taken if entry.outcome or not entry.received.is_settled]
        return as_outgoing(taken)

    def put_back(self, unsent: Outgoing, *, is_uncertain: bool) -> None:
        """Keep what could not be sent for the next request."""
        if not unsent.entries:
            return
        for entry in unsent.entries:
            entry.is_uncertain = entry.is_uncertain or is_uncertain
        with self._lock:
            self._entries[:0] = unsent.entries
            self._tell()

    def _tell(self) -> None:
        if self._entries and not self._has_entries.is_set():
            self._has_entries.set()


def as_outgoing(entries: Sequence[Entry]) -> Outgoing:
    """These entries as one request carries them."""
    return Outgoing(entries=tuple(entries), settlements=_settlements(entries))


def stale_entries(
    sent: Outgoing, stale: Sequence[tuple[int, int, int]]
) -> tuple[list[Entry], list[Entry]]:
    """Of what was sent, the outcomes and the extensions that were refused because too late.

    Uncertain ones are left out, and extensions of what has an outcome by now.
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
