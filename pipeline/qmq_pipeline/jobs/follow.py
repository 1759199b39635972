"""`qmq pipeline ingest --follow`: keeps the tables up to date until it is stopped.

It checks the ends of both logs and, when something is new, makes one run of `ingest`: the same
tables, the same commits, and no state of its own. A check and a run cost the same however long the
tables are: only the ends of logs and tables are read. While another job writes the tables, new data
waits.

Not for: sending rows elsewhere. For that, a query of your own reads the source as a stream
(`log_stream.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING

from qmq_client.clock import SYSTEM_CLOCK
from qmq_pipeline.errors import LakeInUseError
from qmq_pipeline.jobs.ingest import Ingested, ingest, watched_logs
from qmq_pipeline.jobs.ingest_outbox import ingest_outbox
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.log_watch import LogWatch
from qmq_pipeline.places.places import with_token

if TYPE_CHECKING:
    from qmq_pipeline.sources.tasks import Workers


@dataclass(slots=True, kw_only=True)
class Followed:
    """What came in, altogether."""

    batches: int = 0
    #: Table → rows.
    rows: dict[str, int] = field(default_factory=dict)


#: Called with what each batch brought: table → rows.
OnBatch = Callable[[Mapping[str, int]], None]


def follow(
    workers: Workers,
    config: PipelineConfig,
    stop: Event,
    *,
    every_s: float,
    skip_expired: bool = False,
    on_batch: OnBatch,
) -> Followed:
    """Ingest what is there, then check for more at an interval, until `stop` is set.

    The batch in progress at that time is finished. `workers`: a session, or `LocalWorkers`.
    Requires: a place to read from. Raises a `PipelineError` as `ingest` does, but `LakeInUseError`
    only at the start.
    """
    assert config.place is not None
    place = with_token(config.place, os.environ)
    with watched_logs(place) as watches:
        follower = _Follower(workers, config, watches, on_batch)
        looked_s = SYSTEM_CLOCK.monotonic_s()
        follower.run_once(skip_expired=skip_expired)
        while not stop.wait(max(0.0, looked_s + every_s - SYSTEM_CLOCK.monotonic_s())):
            looked_s = SYSTEM_CLOCK.monotonic_s()
            if follower.has_news():
                follower.run_once_or_later()
    return follower.done


class _Follower:
    """The runs of `ingest`, one after the other."""

    def __init__(
        self,
        workers: Workers,
        config: PipelineConfig,
        watches: Mapping[str, LogWatch],
        on_batch: OnBatch,
    ) -> None:
        self._workers = workers
        self._config = config
        self._watches = watches
        self._on_batch = on_batch
        #: Log → offset up to which it is in the tables.
        self._ends: Mapping[str, int] = {}
        self.done = Followed()

    def has_news(self) -> bool:
        """Whether a log has something that is not in the tables."""
        return any(
            watch.look().next_offset > self._ends[log] for log, watch in self._watches.items()
        )

    def run_once_or_later(self) -> None:
        """Run once, or not at all while another run writes the tables: what is new is still new at the next check."""
        try:
            self.run_once()
        except LakeInUseError:
            return

    def run_once(self, *, skip_expired: bool = False) -> None:
        """One run of `ingest`. Only the first may skip expired ranges: any later gap is a new loss."""
        # Outboxes first: what they show as sent is then in the log when it is read.
        outbox = ingest_outbox(self._workers, self._config)
        found: Ingested = ingest(
            self._workers, self._config, watches=self._watches, skip_expired=skip_expired
        )
        self._ends = found.next_offsets
        rows = {**({"outbox": sum(outbox.values())} if outbox else {}), **found.rows}
        self.done.batches += 1
        for name, count in rows.items():
            self.done.rows[name] = self.done.rows.get(name, 0) + count
        if any(rows.values()) or self.done.batches == 1:
            self._on_batch(rows)
