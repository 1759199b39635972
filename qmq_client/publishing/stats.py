"""Counters of a publisher: in total, of one pass, and between two flushes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherStats:
    """What a publisher did since it was made; counts of messages unless a line says otherwise."""

    enqueued: int = 0
    #: Not taken because the queue was full.
    dropped: int = 0
    sent: int = 0
    #: Given back with a later due time.
    failed: int = 0
    parked: int = 0
    #: Left to fall due by themselves, for the watchdog.
    left: int = 0
    #: Not there although their transaction had ended: rolled back, or to a savepoint, or cancelled.
    gone: int = 0
    #: Claimed again because they were near their takeover.
    reclaimed: int = 0
    #: Times that messages waited for an earlier one of their ordering key.
    held: int = 0
    #: Accepted rows deleted, or kept for an audit.
    deleted: int = 0
    #: Accepted rows that were not there to be deleted: another process sent or removed them.
    not_deleted: int = 0
    #: Accepted rows that the database did not delete, and that were marked as sent; `qmq doctor` names
    #: what keeps them.
    undeleted: int = 0
    #: Requests to the broker.
    requests: int = 0
    #: Calls of the store that deleted.
    delete_calls: int = 0
    #: Calls of the store that failed: locked, unreachable.
    database_errors: int = 0
    #: Waiting now.
    queued: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What one step did and when the next is needed."""

    sent: int = 0
    failed: int = 0
    parked: int = 0
    left: int = 0
    deleted: int = 0
    #: Seconds until there is something to do; None until a message is enqueued.
    wait_s: float | None = None
    #: Messages that make it worth to wake up before that.
    wake_at_messages: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed:
    """The outcome of the messages committed since the previous flush, or since the start.

    True, as in `assert producer.flush()`, if the broker accepted all of them.
    """

    #: Whether this process had nothing left to send before the deadline.
    is_done: bool
    #: Messages that the broker accepted.
    accepted: int
    #: Messages left to the watchdog: the broker was unreachable, the queue full, or an earlier message of
    #: the same ordering key was not sent yet.
    left: int
    #: Messages that wait for a person.
    parked: int

    def __bool__(self) -> bool:
        return self.is_done and not self.left and not self.parked

    @classmethod
    def between(cls, before: PublisherStats, after: PublisherStats, *, is_done: bool) -> Flushed:
        """The difference of two looks at one publisher."""
        given_up = (after.failed + after.left + after.dropped) - (
            before.failed + before.left + before.dropped
        )
        return cls(
            is_done=is_done,
            accepted=after.sent - before.sent,
            left=given_up,
            parked=after.parked - before.parked,
        )
