"""The delayed messages of one broker: releases, queries and changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qmq_broker.service.delay.query import DelayQuery
from qmq_broker.service.delay.releasing import Releaser
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.service.writer import CommitWriter
from qmq_broker.storage.schedule.cancelled import (
    CANCELLED_MAX,
    NOTHING_WITHDRAWN,
    Cancelled,
    WithdrawnIds,
)
from qmq_broker.storage.schedule.states import DelayedState
from qmq_broker.storage.store import Store
from qmq_client.clock import Clock


class Delayed:
    """The delayed messages of one broker; each part documents the thread that owns it."""

    def __init__(
        self,
        store: Store,
        writer: CommitWriter,
        clock: Clock,
        limits: ServiceLimits,
        *,
        post: Callable[[Callable[[], None]], object],
    ) -> None:
        """`post` runs a function in the loop thread."""
        #: Releases due messages.
        self.releaser = Releaser(
            store.schedule, writer, clock, limits, post=post, refusals=store.refusals
        )
        #: Answers queries.
        self.query = DelayQuery(store.schedule, self.releaser, clock)
        #: Cancels messages.
        self.changes = DelayChanges(store, writer)


#: Called in the loop thread with the state of each, or with the error if nothing was done.
OnCancelled = Callable[[list[DelayedState | None] | Exception], None]


class DelayChanges:
    """Cancellations of one broker; belongs to the loop thread."""

    def __init__(self, store: Store, writer: CommitWriter) -> None:
        self._store = store
        self._writer = writer

    def cancel(
        self,
        places: Sequence[Cancelled],
        on_done: OnCancelled,
        withdrawn: WithdrawnIds = NOTHING_WITHDRAWN,
    ) -> None:
        """Cancel the pending ones of these messages; `on_done` is called once that is durable.

        Messages with the ids `withdrawn`, by subject, that are not stored yet will be refused.

        Requires: the states of their buckets were already read, because damage found by the writer
        would stop the broker. At most `CANCELLED_MAX` places.
        """
        if len(places) > CANCELLED_MAX:
            raise ValueError(f"{len(places)} cancellations; allowed: {CANCELLED_MAX}")
        self._writer.change(lambda: self._store.cancel(places, withdrawn), on_done)
