"""The databases that the daemon has, compared with those it should have, as files and rows change.

A database that was removed is given up after its current sweep, a changed one is opened anew, and
one whose settings cannot be right is refused with a reason and leaves the others alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from qmq_client.errors import ConfigurationError
from qmq_client.settings.sections import DatabaseSection
from qmq_watchdog.daemon import Daemon, Job
from qmq_watchdog.events import log_event


class Fleet:
    """The databases of one daemon. Safe for any number of threads."""

    def __init__(self, daemon: Daemon, open_job: Callable[[DatabaseSection], Job]) -> None:
        self._daemon = daemon
        self._open_job = open_job
        self._lock = threading.Lock()
        self._configured: tuple[DatabaseSection, ...] = ()
        self._registered: tuple[DatabaseSection, ...] = ()
        self._current: dict[str, DatabaseSection] = {}
        #: Whether changes are logged: the caller reports those of the start in one line.
        self._is_told = False
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
            self._is_told = True

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
            if not self._is_told:
                raise
            if self._current.pop(name, None) is not None:
                self._daemon.remove(name)
            self.refuse(name, error)
            return
        event = "database.changed" if name in self._current else "database.added"
        self._current[name] = section
        self._refused.pop(name, None)
        self._daemon.add(job)
        log_event(event, database=name, level=logging.INFO if self._is_told else logging.DEBUG)
