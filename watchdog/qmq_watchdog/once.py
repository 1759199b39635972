"""One sweep of every database: for cron and for a person at a terminal.

On the same few threads as the daemon's, so one that hangs costs the others nothing; when the deadline
comes, those without a result are reported as not reached and left behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from qmq_client.clock import SYSTEM_CLOCK, Clock
from qmq_client.config import mask_secrets
from qmq_client.errors import DatabaseUnavailableError
from qmq_client.sections import WatchdogSection
from qmq_watchdog.events import LOGGER
from qmq_watchdog.sweep import Sweep, SweepCounts
from qmq_watchdog.workers import Workers

_BUILT_IN: Final = WatchdogSection()
#: How often to look for those that hang.
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

    A sweep that has not ended goes on in its thread; the caller should end the process.
    """
    results: dict[str, SweepCounts] = {}

    def sweep_one(sweep: Sweep) -> bool:
        try:
            counts = _sweep_and_count(sweep)
        except (
            Exception
        ) as fault:  # the top of a thread: no fault may cost the report of the others
            LOGGER.exception("sweep.fault database=%s", sweep.name)
            text = mask_secrets(f"database {sweep.name}: {type(fault).__name__}: {fault}")
            counts = SweepCounts(error=DatabaseUnavailableError(text))
        results[sweep.name] = counts
        return counts.error is None

    workers = Workers(
        sweep_one,
        threads=limits.workers,
        aside_max=limits.aside_workers,
        slow_s=_SLOW_S,
        clock=clock,
    )
    for sweep in sweeps:
        workers.offer(sweep)
    end_s = clock.monotonic_s() + deadline_s
    while not (is_idle := workers.wait_idle(_LOOK_S)) and clock.monotonic_s() < end_s:
        workers.look()
    workers.stop()
    found = {
        sweep.name: results.get(sweep.name) or _late(sweep.name, deadline_s) for sweep in sweeps
    }
    return found, is_idle


def _sweep_and_count(sweep: Sweep) -> SweepCounts:
    """A database is done with when it was swept: hundreds need not stay connected."""
    try:
        counts = sweep.step()
        if counts.error is None:
            sweep.count_parked(counts)
        return counts
    finally:
        sweep.database.close()


def _late(name: str, deadline_s: float) -> SweepCounts:
    text = f"database {name}: no end after {deadline_s:g} s"
    return SweepCounts(error=DatabaseUnavailableError(text))
