"""Reading the registry as one of the daemon's jobs, so that it may hang without harm.

While the registry is away, the databases it held when last read are still swept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from qmq_client.errors import ConfigurationError, DatabaseUnavailableError
from qmq_watchdog.events import log_event
from qmq_watchdog.fleet import Fleet
from qmq_watchdog.options import DaemonOptions
from qmq_watchdog.outage import FAULT, Outage, kind_of
from qmq_watchdog.registry import Registry

#: No database can have this name.
REGISTRY_JOB: Final = "[registry]"


class RegistryJob:
    """Reads the registry and tells the fleet. One thread at a time."""

    def __init__(
        self,
        registry: Registry,
        fleet: Fleet,
        options: DaemonOptions,
        *,
        refresh_s: float,
        random: Callable[[], float],
    ) -> None:
        self.name = self.server = REGISTRY_JOB
        self._registry = registry
        self._fleet = fleet
        self._refresh_s = refresh_s
        self._outage = Outage(options.backoff, random)
        self.delay_s = 0.0
        self.is_well = True

    @property
    def is_in_trouble(self) -> bool:
        """See `Job`."""
        return self._outage.failures > 0

    @property
    def trouble(self) -> str:
        """See `Job`."""
        return self._outage.kind

    def step(self, is_stopped: Callable[[], bool]) -> None:
        """Read the registry once; see `Job`."""
        try:
            content = self._registry.read()
        except (DatabaseUnavailableError, ConfigurationError) as error:
            failure = self._outage.on_failure(kind_of(error))
            self.is_well, self.delay_s = False, failure.delay_s
            log_event(
                "registry.failed",
                level=logging.WARNING if failure.is_news else logging.DEBUG,
                failures=self._outage.failures,
                next_s=failure.delay_s,
                error=str(error),
            )
            return
        if ended := self._outage.on_success():
            log_event("registry.recovered", failures=ended)
        self.is_well, self.delay_s = True, self._refresh_s
        for name, refused in content.refused.items():
            self._fleet.refuse(name, refused)
        if not is_stopped():
            self._fleet.set_registered(content.enabled())

    def on_fault(self) -> None:
        """See `Job`."""
        self.is_well, self.delay_s = False, self._outage.on_failure(FAULT).delay_s

    def close(self) -> None:
        """See `Job`."""
