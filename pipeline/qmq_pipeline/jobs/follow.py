"""`qmq pipeline ingest --follow`: tables that are kept up to date until somebody stops it.

It looks at the ends of both logs, and where there is something new makes one run of `ingest`: the same tables, the
same commits, nothing else to keep in mind. What a look and a run cost does not grow with the tables: the ends of logs
and of tables are looked at, not what is before them. While another job writes the tables, news wait.

Not for: rows elsewhere than in these tables. A query of one's own reads the stream of the source (`log_stream.py`).
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


#: Told what each batch brought: table → rows.
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
    """Ingest what is there, then look for what comes, once in so many seconds, until `stop` is set.

    A batch that is under way then is brought to its end. `workers`: a session, or `LocalWorkers`. Requires: a place to
    read from. Raises a `PipelineError`, as `ingest` does; that another run writes the tables only at the start.
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
    """The runs of `ingest` one after the other."""

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
        """Whether there is something in a log that is not in the tables."""
        return any(
            watch.look().next_offset > self._ends[log] for log, watch in self._watches.items()
        )

    def run_once_or_later(self) -> None:
        """One run, or none while another one writes the tables: what is new then is new at the next look, too."""
        try:
            self.run_once()
        except LakeInUseError:
            return

    def run_once(self, *, skip_expired: bool = False) -> None:
        """One run of `ingest`; expired ranges may be skipped by the first alone: later ones are new."""
        # The outboxes first: what they show as sent is in the log when that is read.
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
