"""Suspects: messages that may have crashed their consumer. Each is delivered alone, so that it does not affect others.

When a process dies, every message it had in flight has used up an attempt. The cause is unknown;
but it crashes the next consumer again, and the others do not. So a message whose leases repeatedly
ended without an outcome (a *suspect*, `Redelivery.is_suspect`) is delivered to a consumer that has
no other message of the group in flight. That consumer gets no other message until it settles the
suspect or extends its lease.

A busy consumer always has messages in flight. So one consumer of a group at a time is drained: it
gets no messages until it is idle, but only for a limited time, because a hanging handler must not
block other messages. After each suspect a consumer gets other messages first, if there are any:
suspects slow a group down but never stop it.

This state is only in memory: a restart forgets which consumer is drained.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from qmq_client.group.state import GroupState

#: Longest drain of a consumer, or its lease if that is shorter.
DRAINING_MS_MAX: Final = 10_000


class Allowed(Enum):
    """The messages that a pull may get."""

    #: All except suspects.
    OTHERS = "others"
    #: The same, or a suspect if there are no others.
    OTHERS_FIRST = "others first"
    #: The next suspect.
    SUSPECT = "suspect"
    NOTHING = "nothing"


class Suspects:
    """Decides which consumers of one group get its suspects; belongs to the loop thread."""

    __slots__ = ("_draining", "_draining_until_ms", "_leases", "_others_next", "_slow", "_state")

    def __init__(self, state: GroupState) -> None:
        """`state` is only read."""
        self._state = state
        #: Consumer → pull sequence and end of the lease of its suspect.
        self._leases: dict[str, tuple[int, int]] = {}
        #: The consumer that gets no messages until it is idle.
        self._draining: str | None = None
        self._draining_until_ms = 0
        #: Consumers that did not become idle in time; removed when they do.
        self._slow: set[str] = set()
        #: Consumers whose last answer was a suspect.
        self._others_next: set[str] = set()

    def allowed(self, consumer: str, lease_ms: int, now_ms: int) -> Allowed:
        """The messages that this consumer may get now."""
        if self._has_suspect(consumer):
            return Allowed.NOTHING
        if not self._state.redeliveries.has_suspect(now_ms):
            return Allowed.OTHERS
        is_idle = self._is_idle(consumer)
        if is_idle:
            self._slow.discard(consumer)
        if is_idle or consumer in self._slow:
            return Allowed.OTHERS_FIRST if consumer in self._others_next else Allowed.SUSPECT
        if self._draining is None:
            self._draining = consumer
            self._draining_until_ms = now_ms + min(lease_ms, DRAINING_MS_MAX)
        return Allowed.NOTHING if self._draining == consumer else Allowed.OTHERS

    def note_given(self, consumer: str, *, pull_sequence: int, until_ms: int) -> None:
        """Record that this consumer got a suspect."""
        self._leases = {one: lease for one, lease in self._leases.items() if self._has_suspect(one)}
        self._leases[consumer] = pull_sequence, until_ms
        self._others_next.add(consumer)
        if self._draining == consumer:
            self._draining = None

    def note_others(self, consumer: str) -> None:
        """Record that this consumer got other messages, or that there were none."""
        self._others_next.discard(consumer)

    def look(self, now_ms: int) -> int | None:
        """End a drain that has lasted too long or serves no purpose; returns when to check again."""
        if self._state.redeliveries.next_suspect_ms() is None:
            self._draining = None
            self._slow.clear()
            self._others_next.clear()
            return None
        if self._draining is None:
            return None
        if self._is_idle(self._draining):  # or the consumer was not seen since
            self._draining = None
            return None
        if now_ms >= self._draining_until_ms:
            self._slow.add(self._draining)
            self._draining = None
            return None
        return self._draining_until_ms

    def is_held_back(self, consumer: str) -> bool:
        """Whether this consumer may get no message now."""
        if self._has_suspect(consumer):
            return True
        return self._draining == consumer and not self._is_idle(consumer)

    def _has_suspect(self, consumer: str) -> bool:
        given, log = self._leases.get(consumer), self._state.consumer(consumer)
        if given is None or log is None:
            return False
        pull_sequence, until_ms = given
        lease = log.at(pull_sequence)
        return lease is not None and lease.until_ms == until_ms

    def _is_idle(self, consumer: str) -> bool:
        log = self._state.consumer(consumer)
        return log is None or not log.in_flight
