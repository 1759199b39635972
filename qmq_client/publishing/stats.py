"""Counters of a publisher, of one pass, and between two flushes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherStats:
    """Totals of a publisher since its creation; counts of messages unless a line says otherwise."""

    enqueued: int = 0
    #: Dropped because the queue was full.
    dropped: int = 0
    sent: int = 0
    #: Returned with a later due time.
    failed: int = 0
    parked: int = 0
    #: Left to the watchdog.
    left: int = 0
    #: Missing after the end of their transaction: rolled back, also to a savepoint, or cancelled.
    gone: int = 0
    #: Claimed again close to their takeover time.
    reclaimed: int = 0
    #: Times that messages waited for an earlier one of their ordering key.
    held: int = 0
    #: Accepted rows deleted, or kept for an audit.
    deleted: int = 0
    #: Accepted rows that no longer existed at their deletion: another process sent or removed them.
    not_deleted: int = 0
    #: Accepted rows that the database did not delete, and that were marked as sent; `qmq doctor` finds the cause.
    undeleted: int = 0
    #: Requests to the broker.
    requests: int = 0
    #: Calls of the store to delete rows.
    delete_calls: int = 0
    #: Failed calls of the store: locked, unreachable.
    database_errors: int = 0
    #: Messages that wait now.
    queued: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The result of one step, and the time of the next."""

    sent: int = 0
    failed: int = 0
    parked: int = 0
    left: int = 0
    deleted: int = 0
    #: Seconds until the next step is due; None until a message is enqueued.
    wait_s: float | None = None
    #: Number of messages that should wake the thread before that.
    wake_at_messages: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed:
    """The outcome of the messages committed since the previous flush, or since the start.

    True, as in `assert producer.flush()`, if the broker accepted all of them.
    """

    #: Whether this process had sent all messages before the deadline.
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
        """The difference between two totals of one publisher."""
        given_up = (after.failed + after.left + after.dropped) - (
            before.failed + before.left + before.dropped
        )
        return cls(
            is_done=is_done,
            accepted=after.sent - before.sent,
            left=given_up,
            parked=after.parked - before.parked,
        )
