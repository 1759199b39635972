"""`qmq pipeline ingest --follow`: keeps the tables up to date until it is stopped.

It checks the ends of both logs and, when something is new, makes one run of `ingest`: the same
tables, the same commits, and no state of its own. A check and a run cost the same however long the
tables are: only the ends of logs and tables are read. While another job writes the tables, new data
waits; while the broker is away, this waits for it.

Not for: sending rows elsewhere. For that, a query of your own reads the source as a stream
(`log_stream.py`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING

from qmq_client.clock import SYSTEM_CLOCK, Clock
from qmq_client.signal_flag import SignalFlag
from qmq_pipeline.errors import LakeError, LakeInUseError, UnreachableError
from qmq_pipeline.jobs.ingest import check, watched_logs
from qmq_pipeline.jobs.ingest_both import ingest_both
from qmq_pipeline.jobs.progress import Progress
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.log_watch import LogWatch
from qmq_pipeline.places.outage import Outage
from qmq_pipeline.places.places import with_token
from qmq_pipeline.spark.explain import explain
from qmq_pipeline.tables.marker import is_lake
from qmq_pipeline.tables.sequences import Runs, joined

if TYPE_CHECKING:
    from qmq_pipeline.sources.tasks import Workers


@dataclass(slots=True, kw_only=True)
class Followed:
    """What came in, altogether."""

    batches: int = 0
    #: Table → rows.
    rows: dict[str, int] = field(default_factory=dict)
    #: Subject → runs of sequences that the broker has in quarantine.
    quarantined: Runs = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Rows of all tables."""
        return sum(self.rows.values())


#: Called with what each batch brought: table → rows.
OnBatch = Callable[[Mapping[str, int]], None]


def follow(
    workers: Workers,
    config: PipelineConfig,
    stop: SignalFlag,
    *,
    every_s: float,
    skip_expired: bool = False,
    on_batch: OnBatch,
    clock: Clock = SYSTEM_CLOCK,
) -> Followed:
    """Ingest what is there, then check for more at an interval, until `stop` is set.

    The batch in progress at that time is finished. `workers`: a session, or `LocalWorkers`. A broker
    that is away is waited for: at the start as long as the place says, from then on without end.
    Requires: a place to read from. Raises a `PipelineError` as `ingest` does, but `LakeInUseError`
    only at the start, and `LakeError` if the tables vanish on the way.
    """
    assert config.place is not None
    # What waits for a broker below this level hears no signal. So nobody there waits: a batch ends,
    # and is made again, from its last commit on.
    hasty = replace(config, place=replace(config.place, wait_s=0.0))
    outage = Outage(config.place.name, config.place.wait_s, clock=clock)
    assert hasty.place is not None
    with watched_logs(with_token(hasty.place, os.environ)) as watches, closing(outage):
        follower = _Follower(workers, hasty, watches, on_batch)
        while True:
            looked_s = clock.monotonic_s()
            pause_s = _turn(follower, outage, skip_expired=skip_expired)
            if pause_s is None:
                pause_s = looked_s + every_s - clock.monotonic_s()
            if stop.wait(max(0.0, pause_s)):
                return follower.done


def _turn(follower: _Follower, outage: Outage, *, skip_expired: bool) -> float | None:
    """The first run, or a look and what follows from it.

    Returns how long to pause before a broker that is away is asked again; None if it was there.
    """
    rows = follower.done.total
    try:
        if follower.has_begun:
            follower.look()
        else:
            follower.begin(skip_expired=skip_expired)
    except Exception as error:  # as the outermost place of a command does: it may be Spark's
        told = explain(error, "")
        if not isinstance(told, UnreachableError):
            raise
        if follower.done.total > rows:
            outage.arrived()
        outage.asking()  # only now: a first run may have read for an hour before it broke off
        pause_s = outage.pause_s(getattr(told, "reason", "the broker does not answer"))
        if pause_s is None:
            raise
        return pause_s
    outage.arrived()
    outage.wait_s = inf
    return None


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
        #: Whether one run came to its end.
        self.has_begun = False
        self.done = Followed()

    def begin(self, *, skip_expired: bool) -> None:
        """The first run. It alone may skip expired ranges: any later gap is a new loss."""
        check(self._config)
        self._run_once(skip_expired=skip_expired)

    def look(self) -> None:
        """Run once if a log has something new; or not at all while another run writes the tables.

        What is new is still new at the next look.
        """
        self._check_tables()
        if self._has_news():
            with suppress(LakeInUseError):
                self._run_once(skip_expired=False)

    def _check_tables(self) -> None:
        """Refuse to go on where the tables are gone: a run would silently begin new ones."""
        if not is_lake(self._config.tables):
            raise LakeError(
                path=self._config.tables,
                reason="the tables that were kept up to date are not there any more",
                remedy="See whether the folder was moved or removed, or its disk unmounted; then start again",
            )

    def _has_news(self) -> bool:
        """Whether a log does not end where the tables do; a run refuses one that ends before."""
        return any(
            watch.look().next_offset != self._ends[log] for log, watch in self._watches.items()
        )

    def _run_once(self, *, skip_expired: bool) -> None:
        """One run of `ingest`."""
        rows: Counter[str] = Counter()
        is_whole = False

        def on_progress(progress: Progress) -> None:
            rows.update(progress.added)
            self.done.quarantined = joined([self.done.quarantined, progress.quarantined])

        try:
            _, found = ingest_both(
                self._workers,
                self._config,
                watches=self._watches,
                skip_expired=skip_expired,
                on_progress=on_progress,
            )
            self._ends, is_whole = found.next_offsets, True
        finally:
            self._count(rows, is_whole=is_whole)

    def _count(self, rows: Mapping[str, int], *, is_whole: bool) -> None:
        """What a run has committed: everything, or what it came to before it failed."""
        has_rows = any(rows.values())
        is_news = has_rows or (is_whole and not self.has_begun)
        self.has_begun |= is_whole
        self.done.batches += is_whole or has_rows
        for name, count in rows.items():
            self.done.rows[name] = self.done.rows.get(name, 0) + count
        if is_news:
            self._on_batch(rows)
