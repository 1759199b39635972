"""One sweep of every database, side by side: for cron and for a person at a terminal.

Each database has a thread, so one that hangs costs the others nothing; when the deadline comes it is
reported as not reached and left behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from qmq_client.errors import DatabaseUnavailableError
from qmq_watchdog.sweep import Sweep, SweepCounts


def sweep_all(sweeps: Sequence[Sweep], deadline_s: float) -> tuple[dict[str, SweepCounts], bool]:
    """Counts for each database by name, and whether all sweeps have ended.

    A sweep that has not ended goes on in its thread; the caller should end the process.
    """
    pool = ThreadPoolExecutor(max(1, len(sweeps)))
    futures = {sweep.database.name: pool.submit(_sweep_and_count, sweep) for sweep in sweeps}
    late = wait(futures.values(), deadline_s).not_done
    pool.shutdown(wait=False)
    results = {
        name: _late(name, deadline_s) if future in late else future.result()
        for name, future in futures.items()
    }
    for sweep in sweeps:
        if futures[sweep.database.name] not in late:
            sweep.close()
    return results, not late


def _sweep_and_count(sweep: Sweep) -> SweepCounts:
    counts = sweep.step()
    if counts.error is None:
        sweep.count_parked(counts)
    return counts


def _late(name: str, deadline_s: float) -> SweepCounts:
    text = f"database {name}: no end after {deadline_s:g} s"
    return SweepCounts(error=DatabaseUnavailableError(text))
