"""The trace of one message: its events in each group, read from the action log.

The actions since the message was stored are read, up to a bound. Actions older than the oldest
segment of the log are gone; then only the state of the group shows past attempts. Runs in any thread.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from qmq_broker.errors import CorruptionError, DiskError
from qmq_broker.storage.logs.action_log import ActionLog
from qmq_broker.storage.logs.frame_seek import LogRange
from qmq_broker.storage.logs.segments import SEGMENT_HEAD_BYTES
from qmq_client.group.actions import (
    Acked,
    Action,
    Dead,
    Ended,
    Expired,
    Extended,
    Keyed,
    Nacked,
    Pulled,
    Purged,
    Replayed,
    Skipped,
    Sought,
)
from qmq_client.group.dead_letters import REJECTED

#: Bytes of the action log that one trace reads: about a second.
READ_BYTES_MAX: Final = 128 * 1024 * 1024
#: Events of one message that are reported.
EVENTS_MAX: Final = 1_000
#: Tolerated time difference: actions are stamped by the same clock as messages, but in a separate log.
_MARGIN_MS: Final = 10_000


class TraceEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event of the message in one group."""

    at_ms: int
    #: given, acked, nacked, nacked untried, lease ended, extended, rejected, dead, replayed,
    #: purged, held, moved (the group), lost, or ended (the group).
    event: str
    consumer: str = ""
    attempt: int = 0
    #: The end of the lease, or the time of the next delivery; 0 if there is none.
    until_ms: int = 0
    reason: str = ""
    error: str = ""


class Trace(NamedTuple):
    """The events that were found."""

    events: dict[str, list[TraceEvent]]
    #: Whether all actions since the message was stored were read.
    is_complete: bool
    #: Time from which actions still exist, if older ones are gone.
    history_from_ms: int | None = None
    #: Time up to which actions were read, if there were too many.
    history_until_ms: int | None = None


def trace(actions: ActionLog, subject: str, sequence: int, stored_at_ms: int) -> Trace:
    """Events of one message in all groups of its subject, oldest first."""
    follower = _Follower(subject, sequence)
    try:
        within = actions.offsets_since(stored_at_ms - _MARGIN_MS)
        first_base = next(iter(actions.log.bases()), 0)
        reaches_back = not first_base or within.first_offset > first_base + SEGMENT_HEAD_BYTES
        history_from_ms = None if reaches_back else actions.log.made_at_ms(first_base)
        history_until_ms = _read(actions, within, follower)
    except (
        CorruptionError,
        DiskError,
    ):  # deleted during the read, or damaged: the result reports it
        return Trace(follower.events, is_complete=False)
    return Trace(
        follower.events,
        is_complete=reaches_back and history_until_ms is None,
        history_from_ms=history_from_ms,
        history_until_ms=history_until_ms,
    )


def _read(actions: ActionLog, within: LogRange, follower: _Follower) -> int | None:
    """Pass the actions to the follower; returns the time of the last one if there are more."""
    read_to, last_ms = within.first_offset, 0
    for next_offset, found in actions.between(within):
        for action in found:
            last_ms = action.at_ms
            if action.subject == follower.subject:
                follower.see(action)
        read_to = next_offset
        if follower.count >= EVENTS_MAX or read_to - within.first_offset >= READ_BYTES_MAX:
            break
    return last_ms if read_to < within.next_offset else None


class _Follower:
    """Follows one message through the actions of its subject."""

    def __init__(self, subject: str, sequence: int) -> None:
        self.subject = subject
        self._sequence = sequence
        self.events: dict[str, list[TraceEvent]] = {}
        self.count = 0
        #: Group → the consumer that holds it, pull sequence, attempt.
        self._held: dict[str, tuple[str, int, int]] = {}

    def see(self, action: Action) -> None:
        """Record what this action did to the message.

        Requires: it concerns the message's subject.
        """
        match action:
            case Pulled():
                self._on_pulled(action)
            case Acked() | Nacked() | Expired() | Extended():
                self._on_settled(action)
            case Dead():
                if action.sequence == self._sequence:
                    event = TraceEvent(
                        at_ms=action.at_ms,
                        event="dead",
                        attempt=action.attempts,
                        reason=action.reason,
                        error=action.error,
                    )
                    self._add(action.group, event)
            case Replayed() | Purged() | Skipped():
                if action.first <= self._sequence < action.next:
                    names = {Replayed: "replayed", Purged: "purged", Skipped: "lost"}
                    self._add(action.group, _plain(action, names[type(action)]))
            case Keyed():
                if self._sequence in action.sequences:
                    self._add(action.group, _plain(action, "held"))
            case Sought() | Ended():
                self._held.pop(action.group, None)
                name = "moved" if isinstance(action, Sought) else "ended"
                self._add(action.group, _plain(action, name))

    def _on_pulled(self, action: Pulled) -> None:
        pull_sequence = action.first_pull_sequence
        for run in action.runs:
            index = self._sequence - run.first_sequence
            if 0 <= index < run.count:
                self._held[action.group] = (action.consumer, pull_sequence + index, run.attempt)
                event = TraceEvent(
                    at_ms=action.at_ms,
                    event="given",
                    consumer=action.consumer,
                    attempt=run.attempt,
                    until_ms=action.lease_until_ms,
                )
                self._add(action.group, event)
                return
            pull_sequence += run.count

    def _on_settled(self, action: Acked | Nacked | Expired | Extended) -> None:
        held = self._held.get(action.group)
        if held is None:
            return
        consumer, pull_sequence, attempt = held
        if consumer != action.consumer or not action.first <= pull_sequence < action.next:
            return
        name, until_ms, error = self._outcome(action)
        event = TraceEvent(
            at_ms=action.at_ms,
            event=name,
            consumer=consumer,
            attempt=0 if isinstance(action, Extended) else attempt,
            until_ms=until_ms,
            error=error,
        )
        self._add(action.group, event)
        if not isinstance(action, Extended):
            del self._held[action.group]
        events = self.events[action.group]
        if len(events) > 1 and events[-2].event == "dead":
            # The log has the dead letter before the outcome that caused it (see `_dead`).
            events[-2:] = reversed(events[-2:])

    def _outcome(self, action: Acked | Nacked | Expired | Extended) -> tuple[str, int, str]:
        """The name of the outcome, the time it holds until, and the handler's error."""
        match action:
            case Extended():
                return "extended", action.lease_until_ms, ""
            case Acked():
                return "acked", 0, ""
            case Nacked():
                return self._nack_name(action), action.retry_at_ms, action.error
            case Expired():
                return "lease ended", action.retry_at_ms, ""

    def _nack_name(self, action: Nacked) -> str:
        if not action.was_tried:
            return "nacked untried"
        last = self.events[action.group][-1]
        is_rejected = last.event == "dead" and last.reason == REJECTED
        return "rejected" if is_rejected else "nacked"

    def _add(self, group: str, event: TraceEvent) -> None:
        self.events.setdefault(group, []).append(event)
        self.count += 1


def _plain(action: Action, event: str) -> TraceEvent:
    return TraceEvent(at_ms=action.at_ms, event=event)
