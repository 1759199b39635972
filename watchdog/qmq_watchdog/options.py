"""Intervals and limits of the daemon, from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from qmq_client.retry import Backoff
from qmq_client.settings.sections import WatchdogSection

_FIRST_RETRY_MS: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonOptions:
    """Intervals and limits of the daemon; see `qmq_client.settings.sections.WatchdogSection`."""

    poll_s: float = WatchdogSection().poll_s
    idle_after_s: float = WatchdogSection().idle_after_s
    idle_poll_s: float = WatchdogSection().idle_poll_s
    outage_s_max: float = WatchdogSection().outage_s_max
    share_s: float = WatchdogSection().share_s
    workers: int = WatchdogSection().workers
    isolated_workers: int = WatchdogSection().isolated_workers
    maintenance_s: float = WatchdogSection().maintenance_s
    #: 0 without metrics.
    sample_s: float = 0.0

    @classmethod
    def from_config(cls, section: WatchdogSection) -> DaemonOptions:
        """The options of a configuration."""
        return cls(
            poll_s=section.poll_s,
            idle_after_s=section.idle_after_s,
            idle_poll_s=section.idle_poll_s,
            outage_s_max=section.outage_s_max,
            share_s=section.share_s,
            workers=section.workers,
            isolated_workers=section.isolated_workers,
            maintenance_s=section.maintenance_s,
            sample_s=section.sample_s if section.metrics_listen else 0.0,
        )

    @property
    def backoff(self) -> Backoff:
        """The backoff for unreachable databases and brokers."""
        max_ms = max(1, round(self.outage_s_max * 1000))
        return Backoff(first_ms=min(_FIRST_RETRY_MS, max_ms), max_ms=max_ms)
