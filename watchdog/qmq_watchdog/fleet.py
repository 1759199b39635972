"""The set of swept databases, updated when the configuration file or the registry changes.

A removed database is closed after its current sweep, a changed one is opened again, and one with
invalid settings is refused with a reason, without affecting the others.

The registry is read by a job like the others, so that it may hang without harm. While the registry is
unreachable, the databases it held when last read are still swept.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

from qmq_client.database.registry import Registry
from qmq_client.errors import ConfigurationError, DatabaseUnavailableError
from qmq_client.settings.sections import DatabaseSection
from qmq_watchdog.daemon import Daemon, Job
from qmq_watchdog.events import log_event
from qmq_watchdog.options import DaemonOptions
from qmq_watchdog.outage import FAULT, Outage, kind_of


class Fleet:
    """The databases of one daemon. Safe for any number of threads."""

    def __init__(self, daemon: Daemon, open_job: Callable[[DatabaseSection], Job]) -> None:
        self._daemon = daemon
        self._open_job = open_job
        self._lock = threading.Lock()
        self._configured: tuple[DatabaseSection, ...] = ()
        self._registered: tuple[DatabaseSection, ...] = ()
        self._current: dict[str, DatabaseSection] = {}
        #: Whether changes are logged: at the start the caller logs all databases in one line.
        self._is_started = False
        #: Why each database was refused, so that it is logged once.
        self._refused: dict[str, str] = {}

    def set_configured(self, sections: Sequence[DatabaseSection]) -> None:
        """Set the databases of the configuration; they win over rows of the registry with their
        names.

        Raises `ConfigurationError` for a wrong one the first time; later it is only refused.
        """
        with self._lock:
            self._configured = tuple(sections)
            self._apply()
            self._is_started = True

    def set_registered(self, sections: Sequence[DatabaseSection]) -> None:
        """Set the databases of the registry."""
        with self._lock:
            self._registered = tuple(sections)
            self._apply()

    def refuse(self, name: str, error: ConfigurationError) -> None:
        """Log why a database is not swept, unless it was logged already."""
        if self._refused.get(name) != str(error):
            self._refused[name] = str(error)
            log_event("database.refused", level=logging.ERROR, database=name, error=str(error))

    @property
    def names(self) -> list[str]:
        """The names of the databases being swept."""
        with self._lock:
            return list(self._current)

    def _apply(self) -> None:
        wanted = {section.name: section for section in self._registered}
        wanted |= {section.name: section for section in self._configured}
        for name in [name for name in self._current if name not in wanted]:
            del self._current[name]
            self._daemon.remove(name)
            log_event("database.removed", database=name)
        for name, section in wanted.items():
            if self._current.get(name) != section:
                self._open(name, section)

    def _open(self, name: str, section: DatabaseSection) -> None:
        try:
            job = self._open_job(section)
        except ConfigurationError as error:
            if not self._is_started:
                raise
            if self._current.pop(name, None) is not None:
                self._daemon.remove(name)
            self.refuse(name, error)
            return
        event = "database.changed" if name in self._current else "database.added"
        self._current[name] = section
        self._refused.pop(name, None)
        self._daemon.add(job)
        log_event(event, database=name, level=logging.INFO if self._is_started else logging.DEBUG)


#: No database can have this name.
REGISTRY_JOB: Final = "[registry]"


class RegistryJob:
    """Reads the registry and updates the fleet. One thread at a time."""

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
