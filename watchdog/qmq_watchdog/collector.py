"""The watchdog's metrics, made on request from the totals of its jobs; needs the extra `metrics`.

The label `database` has as many values as there are databases now, plus one for the registry; that
of a removed database disappears. `kind` and `state` come from short, fixed lists. No subject,
message id or error text becomes a label.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from qmq_client.clock import SYSTEM_CLOCK, Clock
from qmq_watchdog.daemon import Daemon, Job
from qmq_watchdog.databases import ConnectionBudget
from qmq_watchdog.sweep_job import SweepJob, sweep_jobs

_PREFIX: Final = "qmq_watchdog"
_COUNTERS: Final = {
    "claimed": "Rows claimed.",
    "sent": "Rows that the broker accepted.",
    "failed": "Rows returned, to be tried again.",
    "parked": "Rows parked for a person.",
    "held": "Rows returned untried because of an earlier row of their ordering key.",
    "lost": "Rows whose claims ended before they were settled.",
    "sweeps": "Sweeps.",
}


class WatchdogCollector(Collector):
    """Reads the jobs of a daemon at each scrape. Any thread."""

    def __init__(
        self, daemon: Daemon, budget: ConnectionBudget | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._daemon = daemon
        self._budget = budget
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """All metrics at this moment."""
        all_jobs = self._daemon.jobs()
        jobs = sweep_jobs(all_jobs)
        yield from self._ages(jobs)
        yield from self._rows(jobs)
        yield from _counters(jobs)
        yield _breakers(all_jobs)
        yield _errors(jobs)
        yield from self._threads(jobs)

    def _ages(self, jobs: list[SweepJob]) -> Iterator[Metric]:
        now_s = self._clock.monotonic_s()
        oldest = _gauge("oldest_unsent_age_seconds", "Age of the oldest unsent row.")
        well = _gauge("last_success_age_seconds", "Time since the last successful sweep.")
        for job in jobs:
            if job.totals.sampled_at_s is not None:
                oldest.add_metric([job.name], job.totals.oldest_unsent_s(now_s))
            if job.totals.well_at_s is not None:
                well.add_metric([job.name], now_s - job.totals.well_at_s)
        yield oldest
        yield well

    def _rows(self, jobs: list[SweepJob]) -> Iterator[Metric]:
        rows = _gauge("rows", "Rows in the outbox, counted up to 10,000 of each.", "state")
        for job in jobs:
            if (found := job.totals.rows) is not None:
                rows.add_metric([job.name, "live"], found.live)
                rows.add_metric([job.name, "due"], found.due)
                rows.add_metric([job.name, "parked"], found.parked)
        yield rows

    def _threads(self, jobs: list[SweepJob]) -> Iterator[Metric]:
        running, isolated, waiting = self._daemon.under_way()
        threads = GaugeMetricFamily(
            f"{_PREFIX}_runs",
            "Sweeps that run, run on spare threads (isolated), or wait.",
            labels=["state"],
        )
        threads.add_metric(["running"], running)
        threads.add_metric(["isolated"], isolated)
        threads.add_metric(["waiting"], waiting)
        yield threads
        yield GaugeMetricFamily(f"{_PREFIX}_databases", "Databases that are swept.", len(jobs))
        if self._budget is not None:
            text = "Databases with connections that are open and not in use."
            yield GaugeMetricFamily(f"{_PREFIX}_kept_connections", text, self._budget.kept)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=["database", *labels])


def _counters(jobs: list[SweepJob]) -> Iterator[Metric]:
    for name, text in _COUNTERS.items():
        counter = CounterMetricFamily(f"{_PREFIX}_{name}", text, labels=["database"])
        for job in jobs:
            counter.add_metric([job.name], getattr(job.totals, name))
        yield counter
    seconds = CounterMetricFamily(
        f"{_PREFIX}_sweep_seconds", "Time in sweeps.", labels=["database"]
    )
    undeleted = CounterMetricFamily(
        f"{_PREFIX}_undeleted",
        "Rows that the database kept when they were to be deleted, each counted once.",
        labels=["database"],
    )
    for job in jobs:
        seconds.add_metric([job.name], job.totals.seconds)
        undeleted.add_metric([job.name], job.database.store.undeleted)
    yield seconds
    yield undeleted


def _breakers(jobs: Mapping[str, Job]) -> Metric:
    is_open = _gauge("breaker_open", "1 while the database, or the broker for it, is unreachable.")
    for name, job in jobs.items():
        is_open.add_metric([name], int(job.is_in_trouble))
    return is_open


def _errors(jobs: list[SweepJob]) -> Metric:
    errors = CounterMetricFamily(
        f"{_PREFIX}_errors", "Sweeps that failed, by kind.", labels=["database", "kind"]
    )
    for job in jobs:
        for kind, count in sorted(job.totals.errors.copy().items()):
            errors.add_metric([job.name, kind], count)
    return errors
