"""One sweep of every database of the configuration and the registry, for cron and manual runs.

It uses a few threads, like the daemon, so a hanging database does not delay the others. At the
deadline, databases without a result are reported as not reached. A database with a rate limit waits
between its batches without a thread, and continues until `sweep_s_max` has passed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Final

from qmq_client.clock import SYSTEM_CLOCK, Clock
from qmq_client.errors import ConfigurationError, DatabaseUnavailableError, QmqError
from qmq_client.settings.masking import mask_secrets
from qmq_client.settings.sections import Config, WatchdogSection
from qmq_watchdog.databases import Database, open_database, open_registry
from qmq_watchdog.events import LOGGER
from qmq_watchdog.fleet import REGISTRY_JOB
from qmq_watchdog.sweep import Sweep, SweepCounts
from qmq_watchdog.workers import Workers


def open_all(
    config: Config, environment: Mapping[str, str]
) -> tuple[list[Database], dict[str, QmqError]]:
    """The databases, and by name the reasons why others cannot be opened."""
    sections = {section.name: section for section in config.databases}
    refused: dict[str, QmqError] = {}
    if config.registry.url:
        try:
            content = open_registry(config, environment).read()
        except (ConfigurationError, DatabaseUnavailableError) as error:
            refused[REGISTRY_JOB] = error
        else:
            refused |= content.refused
            sections = {section.name: section for section in content.enabled()} | sections
    databases = []
    for name, section in sections.items():
        try:
            databases.append(open_database(section, environment, config.watchdog))
        except ConfigurationError as error:
            refused[name] = error
    return databases, refused


_BUILT_IN: Final = WatchdogSection()
#: How often to check for hanging databases, and for those whose wait has ended.
_LOOK_S: Final = 0.25
_SLOW_S: Final = 2.0


def sweep_all(
    sweeps: Sequence[Sweep],
    deadline_s: float,
    *,
    limits: WatchdogSection = _BUILT_IN,
    clock: Clock = SYSTEM_CLOCK,
) -> tuple[dict[str, SweepCounts], bool]:
    """Counts for each database by name, and whether all sweeps have ended.

    A sweep that has not ended continues in its thread; the caller should end the process.
    """
    one_pass = _Pass(limits, clock)
    is_ended = one_pass.run(sweeps, deadline_s)
    results = {
        sweep.name: one_pass.results.get(sweep.name) or _late(sweep.name, deadline_s)
        for sweep in sweeps
    }
    return results, is_ended


class _Pass:
    """The sweeps under way. `run` belongs to one thread, the rest to the workers."""

    def __init__(self, limits: WatchdogSection, clock: Clock) -> None:
        self._clock = clock
        self._rest_until_s_max = clock.monotonic_s() + limits.sweep_s_max
        self._lock = threading.Lock()
        #: Waiting sweeps, and the time at which each continues.
        self._resting: dict[Sweep, float] = {}
        self._counts: dict[Sweep, SweepCounts] = {}
        #: Counts of ended sweeps, by name.
        self.results: dict[str, SweepCounts] = {}
        self._workers: Workers[Sweep] = Workers(
            self._sweep_one,
            threads=limits.workers,
            isolated_max=limits.isolated_workers,
            slow_s=_SLOW_S,
            clock=clock,
        )

    def run(self, sweeps: Sequence[Sweep], deadline_s: float) -> bool:
        """Run until all sweeps have ended, or the deadline; returns whether they have ended."""
        end_s = self._clock.monotonic_s() + deadline_s
        for sweep in sweeps:
            self._workers.offer(sweep)
        pause = threading.Event()  # never set: only waited on
        while not (is_ended := self._workers.wait_idle(_LOOK_S) and not self._resting):
            if self._clock.monotonic_s() >= end_s:
                break
            self._workers.look()
            if not self._offer_rested():
                pause.wait(_LOOK_S)
        self._workers.stop()
        return is_ended

    def _offer_rested(self) -> bool:
        """Resume sweeps whose wait has ended; returns False if it must only wait."""
        with self._lock:
            now_s = self._clock.monotonic_s()
            rested = [sweep for sweep, until_s in self._resting.items() if until_s <= now_s]
            for sweep in rested:
                del self._resting[sweep]
            is_waiting = bool(self._resting) and not rested
        for sweep in rested:
            self._workers.offer(sweep)
        return not is_waiting

    def _sweep_one(self, sweep: Sweep) -> bool:
        """Run one pass of a sweep; returns whether its database worked."""
        counts = self._counts.setdefault(sweep, SweepCounts())
        try:
            counts.is_cut_short, counts.rate_wait_s = False, 0.0
            sweep.step(counts=counts)
            if self._rests(sweep, counts):
                return True
            if counts.error is None:
                sweep.count_parked(counts)
        except (
            Exception
        ) as fault:  # the top of a thread: an error must not suppress the report of others
            LOGGER.exception("sweep.fault database=%s", sweep.name)
            text = mask_secrets(f"database {sweep.name}: {type(fault).__name__}: {fault}")
            counts.error = DatabaseUnavailableError(text)
        sweep.database.close()  # finished: close it, because hundreds need not stay connected
        self.results[sweep.name] = counts
        return counts.error is None

    def _rests(self, sweep: Sweep, counts: SweepCounts) -> bool:
        """Whether only its rate limit ended this sweep, so that it continues later."""
        until_s = self._clock.monotonic_s() + counts.rate_wait_s
        if not counts.rate_wait_s or counts.error or until_s >= self._rest_until_s_max:
            return False
        with self._lock:
            self._resting[sweep] = until_s
        return True


def _late(name: str, deadline_s: float) -> SweepCounts:
    text = f"database {name}: the sweep did not end within {deadline_s:g} s"
    return SweepCounts(error=DatabaseUnavailableError(text))
