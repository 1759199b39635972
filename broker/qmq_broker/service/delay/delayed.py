"""All about the delayed messages of one broker: releases, queries, changes."""

from __future__ import annotations

from collections.abc import Callable

from qmq_broker.clock import Clock
from qmq_broker.service.delay.changes import DelayChanges
from qmq_broker.service.delay.query import DelayQuery
from qmq_broker.service.delay.releasing import Releaser
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.service.writer import CommitWriter
from qmq_broker.storage.store import Store


class Delayed:
    """The delayed messages of one broker; each part says which thread it belongs to."""

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
        #: Releases what is due.
        self.releaser = Releaser(
            store.schedule, writer, clock, limits, post=post, refusals=store.refusals
        )
        #: Answers queries.
        self.query = DelayQuery(store.schedule, self.releaser, clock)
        #: Cancels messages.
        self.changes = DelayChanges(store, writer)
